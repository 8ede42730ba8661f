"""Compare with SB3's PPO in what users of SB3 expect of an on-policy algorithm."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import callbacks
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano import ANO, PAPO
from tests.algorithms.comparison import relative_difference
from tests.common import ALGORITHMS, SMALL, parameters
from tests.tiny_envs import BOX_OBSERVATIONS, MaskedEnv, masked_vec_env


def like_ppo(cls: type, env: Any = "CartPole-v1", **options: Any) -> Any:
    """PPO, or ANO with PPO's shape."""
    more = {"shaping": "ppo", "torch_compile": False} if cls is ANO else {}
    return cls("MlpPolicy", env, **{**SMALL, "device": "cpu", **more, **options})


@pytest.mark.parametrize(
    "make",
    [
        lambda: "CartPole-v1",
        lambda: gym.make("CartPole-v1"),
        lambda: Monitor(gym.make("CartPole-v1")),
    ],
    ids=["id", "environment", "Monitor"],
)
def test_environments_of_all_kinds_are_the_same_environment(make):
    model, expected = (like_ppo(cls, make()).learn(128) for cls in (ANO, PPO))
    assert [info["l"] for info in model.ep_info_buffer] == [info["l"] for info in expected.ep_info_buffer]
    assert relative_difference(expected, model) <= 1e-6


class Ending(MaskedEnv):
    """Episodes of at most three steps, of which some succeed."""

    length = 3

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "is_success": bool(action)}


def ending() -> VecEnv:
    env = masked_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2), 1, Ending)
    env.seed(0)
    return env


def evaluations(path: Path, **options: Any) -> EvalCallback:
    settings = {"eval_freq": 10, "n_eval_episodes": 2, "log_path": str(path), "best_model_save_path": str(path)}
    return EvalCallback(ending(), **settings, **options, verbose=0, warn=False)


CALLBACKS = {
    "function": lambda path: lambda local_variables, _: local_variables["n_steps"] < 9,
    "every n": lambda path: callbacks.EveryNTimesteps(20, callbacks.CheckpointCallback(1, str(path))),
    "list": lambda path: [callbacks.CheckpointCallback(7, str(path)), callbacks.StopTrainingOnMaxEpisodes(7)],
    "evaluations": lambda path: evaluations(path),
    "threshold": lambda path: evaluations(path, callback_on_new_best=callbacks.StopTrainingOnRewardThreshold(-100.0)),
    "stagnation": lambda path: evaluations(path, callback_after_eval=callbacks.StopTrainingOnNoModelImprovement(2)),
    "progress bar": lambda path: callbacks.ProgressBarCallback(),
}


@pytest.mark.parametrize(("name", "interval"), [*((name, 1) for name in CALLBACKS), ("list", 2), ("list", None)])
@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_callbacks_of_sb3_act_and_log_as_with_ppo(name, interval, tmp_path):
    def run(cls: type) -> tuple[Any, list, list[dict]]:
        path, events = tmp_path / cls.__name__, MagicMock(spec=BaseCallback)
        model = like_ppo(cls, ending(), n_steps=12, batch_size=12, stats_window_size=3)
        model.set_logger(configure(str(path), ["json"]))
        callback = CALLBACKS[name](path)
        if name != "function":
            callback = [*(callback if isinstance(callback, list) else [callback]), events]
        model.learn(60, callback=callback, log_interval=interval)
        model.logger.close()
        rows = [json.loads(line) for line in (path / "progress.json").read_text().splitlines()]
        return model, [[call[0] for call in events.method_calls], sorted(file.name for file in path.iterdir())], rows

    (model, found, log), (expected, by_ppo, expected_log) = run(ANO), run(PPO)
    assert found == by_ppo
    assert model.num_timesteps == expected.num_timesteps
    assert relative_difference(expected, model) <= 1e-6
    for mine, theirs in zip(log, expected_log, strict=True):
        kept = {name: value for name, value in theirs.items() if name not in ("time/fps", "time/time_elapsed")}
        assert ("rollout/success_rate" in kept) == ("rollout/ep_rew_mean" in kept)
        assert {name: mine[name] for name in kept} == pytest.approx(kept, rel=1e-3, abs=1e-5, nan_ok=True)


def test_tensorboard_runs_are_numbered_and_continued(tmp_path):
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, tensorboard_log=str(tmp_path))
    model.learn(32).learn(32)
    model.learn(32, reset_num_timesteps=False)
    model.learn(32, tb_log_name="mine")
    model.logger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ANO_1", "ANO_2", "mine_1"]
    assert len(list((tmp_path / "ANO_2").iterdir())) == 2  # the second one was continued


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_parameters_are_got_and_set(cls):
    model, other = (cls("MlpPolicy", "CartPole-v1", **{**SMALL, "seed": seed}).learn(32) for seed in (0, 1))
    saved = model.get_parameters()
    assert set(saved) == {"policy", "policy.optimizer"}
    # The versions of the modules.
    assert saved["policy"]._metadata == model.policy.state_dict()._metadata
    other.set_parameters(saved)
    assert torch.equal(parameters(other), parameters(model))
    state, expected = (each.policy.optimizer.state_dict()["state"] for each in (other, model))
    assert all(torch.equal(state[index]["exp_avg"], expected[index]["exp_avg"]) for index in expected)
    # What was set does not follow the model; what was got does, as in SB3.
    before = parameters(other).clone()
    model.learn(32)
    assert torch.equal(parameters(other), before)
    assert not torch.equal(parameters(model), before)
    assert all(torch.equal(part, model.policy.state_dict()[name]) for name, part in saved["policy"].items())


@pytest.mark.slow
@pytest.mark.parametrize("cls", [*ALGORITHMS, PPO])
def test_cart_pole_is_learned(cls):
    few = {"max_epoch_kl": None} if cls is PAPO else {}
    env = make_vec_env("CartPole-v1", 8, seed=0)
    settings = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "learning_rate": 1e-3}
    model = cls("MlpPolicy", env, **settings, seed=0, **few).learn(40_000)
    mean, _ = evaluate_policy(model, Monitor(gym.make("CartPole-v1")), n_eval_episodes=10)
    assert mean > 300.0
