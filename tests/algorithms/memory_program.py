"""Print the peak memory of a short training: memory_program.py CLASS CASE [option...], with MODULE:NAME as class."""

import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

FOUR = spaces.Box(-1.0, 1.0, (4,), np.float32)
TWO = spaces.Discrete(2)
IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 1}

#: Observations, actions, number of environments, layers, arguments.
CASES: dict[str, tuple[spaces.Space, spaces.Space, int, list[int], dict[str, Any]]] = {
    "Discrete": (spaces.Discrete(200_000), TWO, 1, [16], SMALL),
    "Discrete, wide": (spaces.Discrete(30_000), TWO, 4, [64], SMALL),
    "MultiDiscrete": (spaces.MultiDiscrete([20_000, 3]), TWO, 1, [16], SMALL),
    "many dimensions": (spaces.MultiDiscrete([20] * 1000), TWO, 1, [16], SMALL),
    "Dict": (spaces.Dict({"a": spaces.Discrete(30_000), "b": FOUR}), TWO, 1, [16], SMALL),
    "Box": (spaces.Box(-1.0, 1.0, (100_000,), np.float32), TWO, 4, [16], SMALL),
    "Box of one environment": (spaces.Box(-1.0, 1.0, (500_000,), np.float64), TWO, 1, [16], SMALL),
    "MultiBinary": (spaces.MultiBinary(500_000), TWO, 1, [16], SMALL),
    "many actions": (FOUR, spaces.Discrete(100_000), 1, [16], SMALL),
    "actions of many dimensions": (FOUR, spaces.Box(-1.0, 1.0, (100_000,), np.float32), 1, [16], SMALL),
    "wide layers": (FOUR, TWO, 1, [2048, 2048], SMALL),
    "many environments": (FOUR, TWO, 2048, [16], {"n_steps": 16, "batch_size": 4096, "n_epochs": 1}),
    "one large batch": (FOUR, TWO, 256, [16], {"n_steps": 256, "batch_size": 65536, "n_epochs": 2}),
    "many epochs": (FOUR, TWO, 64, [16], {"n_steps": 1024, "batch_size": 4096, "n_epochs": 30}),
    "images": (IMAGES, TWO, 8, [], {"n_steps": 64, "batch_size": 128, "n_epochs": 1}),
    "images of one environment": (IMAGES, TWO, 1, [], {"n_steps": 1536, "batch_size": 64, "n_epochs": 1}),
}


def draw(space: spaces.Space, random: np.random.Generator) -> Any:
    """Draw an observation without the memory that ``sample`` takes."""
    if isinstance(space, spaces.Dict):
        return {key: draw(part, random) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return int(random.integers(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return random.integers(space.nvec)
    return np.full(space.shape, random.integers(2), space.dtype)


class LargeEnv(gym.Env):
    """Random observations, and episodes of 20 steps."""

    def __init__(self, observations: spaces.Space, actions: spaces.Space) -> None:
        self.observation_space = observations
        self.action_space = actions

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return draw(self.observation_space, self.np_random), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        return draw(self.observation_space, self.np_random), float(self.steps), False, self.steps == 20, {}

    def action_masks(self) -> np.ndarray:
        return np.ones(sum(np.atleast_1d(getattr(self.action_space, "nvec", getattr(self.action_space, "n", 2)))), dtype=bool)


def peak() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024.0
    raise OSError("no VmHWM in /proc/self/status")


def main(kind: str, case: str, *flags: str) -> None:
    torch.set_num_threads(1)
    observations, actions, n_envs, layers, options = CASES[case]
    name = "CnnPolicy" if observations is IMAGES else "MlpPolicy"
    if isinstance(observations, spaces.Dict):
        name = "MultiInputPolicy"
    policy_kwargs: dict[str, Any] = {"net_arch": layers}
    if "Recurrent" in kind:
        name = name.replace("Policy", "LstmPolicy")
        policy_kwargs["lstm_hidden_size"] = 16
    if "sb3_ano" in kind and "Recurrent" not in kind:
        options = {**options, "torch_compile": "compiled" in flags}

    env = make_vec_env(lambda: LargeEnv(observations, actions), n_envs)
    cls = pkgutil.resolve_name(kind)
    model = cls(name, env, **options, policy_kwargs=policy_kwargs, device="cpu", seed=0)
    # A callback that may look at everything.
    callback = (lambda variables, _: True) if "callback" in flags else None
    model.learn(2 * options["n_steps"] * n_envs, callback=callback)

    if "files" in flags:
        with tempfile.TemporaryDirectory() as directory:
            model.save(f"{directory}/model")
            model = cls.load(f"{directory}/model", device="cpu")
        evaluate_policy(model, env, n_eval_episodes=1, warn=False)
    print(peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
