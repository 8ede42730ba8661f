"""Measure training speed against SB3's PPO and sbx's.

    python benchmarks/speed.py                                  # every case; leave the machine alone meanwhile
    python benchmarks/speed.py --cases paper pong --sbx-python PATH --out docs/results/speed

Blocks of SB3's PPO and of a variant alternate, each in a process of its own; for masks and LSTM policies, PPO is
sb3-contrib's. ``blocks.csv`` has a row per block, ``speed.md`` medians and quartiles of the ratios of neighboring blocks, and
the time of the last quarter of a whole run divided by that of the first. ``scale-N`` are N environments with rollouts of
2048 samples.

The cases ``cleanrl`` and ``cleanrl-pong`` are those of CleanRL's ``ppo_continuous_action.py`` and ``ppo_atari_envpool.py``.
With ``--peers``, a directory with clones and an environment for them, these and LeanRL's run as their authors wrote
them; docs/performance.md says how to make it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
from gymnasium import spaces
from stable_baselines3.common.utils import LinearSchedule
from torch.nn import ReLU
from torch.optim import RMSprop

from sb3_ano._io import write_file
from sb3_ano._system import cores, machine, versions
from sb3_ano.bench.pool import WorkerError, call

ROOT = Path(__file__).resolve().parents[1]
PAPER = {"n_steps": 32, "batch_size": 1024, "policy_kwargs": {"net_arch": {"pi": [256, 256], "vf": [256, 256]}}}
PONG = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range": 0.1, "ent_coef": 0.01}
# Library, environments, constructor arguments. "cold" and "warm" say what the compiler's cache holds.
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sb3": ("stable_baselines3:PPO", "sb3", {}),
    "sb3-fast-envs": ("stable_baselines3:PPO", "ano", {}),
    "sbx": ("sbx:PPO", "sb3", {}),
    "ano-eager": ("sb3_ano:ANO", "ano", {"torch_compile": False}),
    "ano-auto": ("sb3_ano:ANO", "ano", {"torch_compile": "auto"}),
    "ano-compiled": ("sb3_ano:ANO", "ano", {"torch_compile": True}),
    "ano-bfloat16": ("sb3_ano:ANO", "ano", {"torch_compile": True, "precision": "bfloat16"}),
    "ppo-compiled": ("sb3_ano:ANO", "ano", {"torch_compile": True, "shaping": "ppo"}),
    "ano-cold": ("sb3_ano:ANO", "ano", {"torch_compile": True}),
    "ano-warm": ("sb3_ano:ANO", "ano", {"torch_compile": True}),
    "maskable-ppo": ("sb3_contrib:MaskablePPO", "sb3", {}),
    "maskable-eager": ("sb3_ano:MaskableANO", "sb3", {"torch_compile": False}),
    "maskable-compiled": ("sb3_ano:MaskableANO", "sb3", {"torch_compile": True}),
    "recurrent-ppo": ("sb3_contrib:RecurrentPPO", "sb3", {}),
    "recurrent-ano": ("sb3_ano:RecurrentANO", "sb3", {}),
}
# Script in the directory of --peers, and its options.
SCRIPTS = {
    "cleanrl": ("cleanrl/cleanrl/{}.py", []),
    "leanrl-eager": ("LeanRL/leanrl/{}.py", []),
    "leanrl-compiled": ("LeanRL/leanrl/{}_torchcompile.py", ["--compile"]),
}
# Of both scripts that the cases stand for: name, options, samples per rollout.
PEERS = {
    "cleanrl": ("ppo_continuous_action", ["--env-id", "HalfCheetah-v4"], 2048),
    "cleanrl-pong": ("ppo_atari_envpool", ["--env-id", "Pong-v5"], 1024),
}
# What the variants of a case are compared with, where it is not SB3's PPO.
REFERENCES = {"masks": "maskable-ppo", "lstm": "recurrent-ppo"}
CLEANRL = {"batch_size": 64, "clip_range_vf": 0.2, "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}}
# Arguments that users add to the defaults, each by itself. The last two change the environment.
OPTIONS: dict[str, dict[str, Any]] = {
    "clip-range-vf": {"clip_range_vf": 0.2},
    "schedules": {"learning_rate": LinearSchedule(3e-4, 0.0, 1.0), "clip_range": LinearSchedule(0.2, 0.0, 1.0)},
    "target-kl": {"target_kl": 1.0},
    "sde": {"use_sde": True, "sde_sample_freq": 4},
    "network": {"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": ReLU}},
    "weight-decay": {"policy_kwargs": {"optimizer_kwargs": {"weight_decay": 1e-4}}},
    "rmsprop": {"policy_kwargs": {"optimizer_class": RMSprop}},
    "dict": {"policy": "MultiInputPolicy"},
    "multi-discrete": {},
}
ZOO_LSTM = {"batch_size": 256, "n_steps": 32, "n_epochs": 20, "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": [64]}}
STEADY = ["sbx", "ano-eager", "ano-compiled"]
# Task, number of environments (None: the id alone), arguments, variants, steps of a whole run (None: the steady state).
CASES: dict[str, tuple[str, int | None, dict[str, Any], list[str], int | None]] = {
    "defaults": ("HalfCheetah-v5", None, {}, [*STEADY, "ppo-compiled"], None),
    "vec8": ("HalfCheetah-v4", 8, {"n_steps": 256}, [*STEADY, "sb3-fast-envs", "ano-bfloat16"], None),
    "paper": ("HalfCheetah-v4", 128, PAPER, [*STEADY, "sb3-fast-envs", "ano-bfloat16"], None),
    "pong": ("Pong-v5", 8, PONG, ["sb3-fast-envs", "ano-eager", "ano-compiled", "ano-bfloat16"], None),
    "cleanrl": ("HalfCheetah-v4", 1, CLEANRL, ["ano-compiled", "ano-bfloat16", *SCRIPTS], None),
    "cleanrl-pong": ("Pong-v5", 8, {**PONG, "clip_range_vf": 0.1}, ["ano-compiled", "ano-bfloat16", *SCRIPTS], None),
    "cartpole": ("CartPole-v1", None, {}, ["ano-auto"], 20_000),
    "run100k": ("HalfCheetah-v5", None, {}, ["ano-cold", "ano-warm"], 100_000),
    "long": ("HalfCheetah-v5", None, {}, ["ano-compiled"], 300_000),
    "masks": ("masks", None, {}, ["maskable-eager", "maskable-compiled"], None),
    "masks-8": ("masks", 8, {"n_steps": 256}, ["maskable-eager", "maskable-compiled"], None),
    "lstm": ("HalfCheetah-v5", None, {}, ["recurrent-ano"], None),
    "lstm-zoo": ("CartPole-v1", 8, ZOO_LSTM, ["recurrent-ano"], None),
    "lstm-pong": ("Pong-v5", 8, {"n_steps": 32, "batch_size": 128, "n_epochs": 4}, ["recurrent-ano"], None),
    **{f"option-{name}": ("HalfCheetah-v5", None, settings, ["ano-compiled"], None) for name, settings in OPTIONS.items()},
    **{f"scale-{n}": ("HalfCheetah-v4", n, {"n_steps": 2048 // n}, ["ano-compiled"], None) for n in (1, 4, 16, 64, 256)},
}


class OptionsEnv(gym.Wrapper):
    """HalfCheetah-v5 with observations of two parts, or with eleven levels of each action."""

    def __init__(self, case: str) -> None:
        super().__init__(gym.make("HalfCheetah-v5"))
        self.splits, self.levels = case == "option-dict", case == "option-multi-discrete"
        if self.splits:
            sizes = {"q": 8, "v": 9}
            self.observation_space = spaces.Dict({name: spaces.Box(-np.inf, np.inf, (size,)) for name, size in sizes.items()})
        if self.levels:
            self.action_space = spaces.MultiDiscrete([11] * 6)

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return self.split(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action / 5.0 - 1.0 if self.levels else action)
        return self.split(observation), *rest

    def split(self, observation: Any) -> Any:
        return {"q": observation[:8], "v": observation[8:]} if self.splits else observation


def make_model(request: dict[str, Any]) -> Any:
    """Make a variant's model with its environments."""
    library, envs, options = VARIANTS[request["variant"]]
    env: Any
    env_id, n_envs, settings, _, _ = CASES[request["case"]]
    atari = env_id == "Pong-v5"
    if env_id == "masks":
        task = import_module("sb3_contrib.common.envs").InvalidActionEnvDiscrete
        env = import_module("stable_baselines3.common.env_util").make_vec_env(
            task, n_envs or 1, seed=0, env_kwargs={"dim": 70, "n_invalid_actions": 55}
        )
    elif request["case"] in ("option-dict", "option-multi-discrete"):
        env = OptionsEnv(request["case"])
    elif n_envs is None:
        env = env_id
    elif envs == "ano":
        env = import_module("sb3_ano.envs").make_vec_env(env_id, n_envs, seed=0, num_threads=request["threads"])
    elif atari:
        import_module("gymnasium").register_envs(import_module("ale_py"))
        env = import_module("stable_baselines3.common.env_util").make_atari_env("PongNoFrameskip-v4", n_envs, seed=0)
        env = import_module("stable_baselines3.common.vec_env").VecFrameStack(env, 4)
    else:
        env = import_module("stable_baselines3.common.env_util").make_vec_env(env_id, n_envs, seed=0)
    if request["case"] == "cleanrl":
        normalize = import_module("sb3_ano.envs" if envs == "ano" else "stable_baselines3.common.vec_env").VecNormalize
        env = normalize(env)
    module, name = library.split(":")
    policy = ("Cnn" if atari else "Mlp") + ("LstmPolicy" if name.startswith("Recurrent") else "Policy")
    device = {} if module == "sbx" else {"device": request["device"]}
    return getattr(import_module(module), name)(**{"policy": policy, **settings}, env=env, seed=0, **options, **device)


def measure(request: dict[str, Any]) -> dict[str, float]:
    """Train for a block, or a whole run, and return its speed. Runs in a process of its own."""
    start, total = time.perf_counter(), request["steps"]
    model = make_model(request)
    spent = {"env": 0.0, "update": 0.0}
    if total is None:
        iteration = model.n_steps * model.n_envs
        model.learn(iteration)  # compiles, and fills caches
        begin = time.perf_counter()
        model.learn(iteration, reset_num_timesteps=False)
        iterations = max(1, round(request["seconds"] / (time.perf_counter() - begin)))
        for name, owner, attribute in (("env", model.get_env(), "step_wait"), ("update", model, "train")):
            setattr(owner, attribute, timed(getattr(owner, attribute), spent, name))
        start, total = time.perf_counter(), iterations * iteration
        model.learn(total, reset_num_timesteps=False)
        quarters = [0.0, 0.0]
    else:
        ends = [start]
        for _ in range(4):
            model.learn(total // 4, reset_num_timesteps=False)
            ends.append(time.perf_counter())
        quarters = [ends[1] - ends[0], ends[4] - ends[3]]
    seconds = time.perf_counter() - start
    shares = {name: 100.0 * value / seconds for name, value in spent.items()}
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    return {
        "steps_per_second": total / seconds,
        "peak_mb": peak,
        **shares,
        "first_quarter": quarters[0],
        "last_quarter": quarters[1],
    }


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """Return the function, which adds its seconds to a sum."""

    def wrapper(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        spent[name] += time.perf_counter() - start
        return result

    return wrapper


def measure_script(case: str, variant: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a script of CleanRL or LeanRL, from its third rollout on."""
    (path, extra), (name, task, rollout) = SCRIPTS[variant], PEERS[case]
    script = options.peers / path.format(name)
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    count = options.script_rollouts
    command = [
        str(options.peers / "venv/bin/python"),
        "-u",
        str(script),
        *task,
        *extra,
        "--total-timesteps",
        str(count * rollout),
    ]
    speeds: list[float] = []
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **numbers, "WANDB_MODE": "disabled", "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = list(iter_lines(process, ends, speeds))
    if process.returncode:
        raise WorkerError(f"{script} failed: {lines[-1] if lines else ''}")
    speed = speeds[-1] if speeds else (len(ends) - 3) * rollout / (ends[-1] - ends[2])
    return {
        "steps_per_second": speed,
        "peak_mb": float("nan"),
        "env": 0.0,
        "update": 0.0,
        "first_quarter": 0.0,
        "last_quarter": 0.0,
    }


def iter_lines(process: subprocess.Popen[str], ends: list[float], speeds: list[float]) -> Iterator[str]:
    """Yield the lines of a script; add when CleanRL's rollouts ended, and the speeds that LeanRL measures itself."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("SPS:"):
            ends.append(time.perf_counter())
        speeds += [float(number) for number in re.findall(r"speed: +([0-9.]+) sps", line)]
        yield line.strip()
    process.wait()


def run_block(case: str, variant: str, threads: int, options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Measure one block in a process of its own."""
    if variant in SCRIPTS:
        measured = measure_script(case, variant, threads, options)
        return {"case": case, "variant": variant, "threads": threads, **measured}
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    if variant in ("ano-cold", "ano-warm"):
        environment["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=cache) if variant == "ano-cold" else f"{cache}/warm"
    steps = CASES[case][4]
    request = {"case": case, "variant": variant, "device": options.device, "seconds": options.block_seconds}
    request["steps"] = min(steps, 4096) if steps and options.quick else steps
    python = options.sbx_python if variant == "sbx" else sys.executable
    measured = call("speed:measure", request, threads=threads, environment=environment, python=python)
    return {"case": case, "variant": variant, "threads": threads, **measured}


def measure_case(case: str, options: argparse.Namespace, cache: str) -> list[dict[str, Any]]:
    """Measure all variants of a case in pairs with the reference, each at its best number of threads."""
    rows = []
    candidates = [options.threads] if options.threads else sorted({1, cores()})

    def best_threads(variant: str) -> int:
        tried = {threads: run_block(case, variant, threads, options, cache)["steps_per_second"] for threads in candidates}
        return max(tried, key=lambda threads: tried[threads])

    first = options.reference or REFERENCES.get(case.split("-")[0], "sb3")
    reference = best_threads(first) if len(candidates) > 1 else candidates[0]
    for variant in CASES[case][3]:
        if options.variants and variant not in options.variants:
            continue
        if (variant == "sbx" and options.sbx_python is None) or (variant in SCRIPTS and options.peers is None):
            continue
        try:
            warm = variant == "ano-warm" or len(candidates) > 1
            threads = best_threads(variant) if warm else candidates[0]
            for pair in range(options.pairs):
                order = [(first, reference), (variant, threads)]
                for name, number in order if pair % 2 == 0 else order[::-1]:
                    rows.append({**run_block(case, name, number, options, cache), "of": variant, "pair": pair})
        except WorkerError as error:
            print(f"{case}: {variant}: {error}", file=sys.stderr)
    return rows


def table(blocks: pd.DataFrame) -> str:
    """Return medians, and quartiles of the ratios to the reference, as Markdown."""
    columns = [
        "case",
        "variant",
        "steps per second",
        "against the reference (quartiles)",
        "peak MB",
        "env / update, %",
        "last / first",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---|---|--:|--:|--:|--:|--:|"]
    for (case, variant), rows in blocks.groupby(["case", "of"], sort=False):
        own, reference = (rows[(rows["variant"] == variant) == own].set_index("pair") for own in (True, False))
        ratio = (own["steps_per_second"] / reference["steps_per_second"]).quantile([0.5, 0.25, 0.75]).to_numpy()
        middle = own.median(numeric_only=True)
        growth = middle["last_quarter"] / middle["first_quarter"] if middle["first_quarter"] else float("nan")
        quartiles = f"**{ratio[0]:.2f}** ({ratio[1]:.2f} to {ratio[2]:.2f})"
        shares = f"{middle['env']:.0f} / {middle['update']:.0f}"
        cells = [f"{middle['steps_per_second']:,.0f}", quartiles, f"{middle['peak_mb']:.0f}", shares, f"{growth:.2f}"]
        lines.append(f"| {case} | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the cases, and write blocks and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--variants", nargs="+", choices=[*VARIANTS, *SCRIPTS], metavar="VARIANT", help="only these variants of the cases"
    )
    parser.add_argument(
        "--reference",
        choices=[*VARIANTS, *SCRIPTS],
        metavar="VARIANT",
        help="the other half of each pair; SB3's by default",
    )
    parser.add_argument("--pairs", type=int, default=5, help="pairs of blocks")
    parser.add_argument("--block-seconds", type=float, default=4.0, help="length of a block")
    parser.add_argument("--threads", type=int, help="threads; by default, the best of 1 and all processors")
    parser.add_argument("--device", default="auto", help="SB3's device")
    parser.add_argument("--sbx-python", help="interpreter with sbx-rl, pandas and gymnasium[mujoco]; otherwise no sbx")
    parser.add_argument("--peers", type=Path, help="directory with cleanrl, LeanRL and venv; otherwise none of these")
    parser.add_argument("--script-rollouts", type=int, default=13, help="rollouts of a block of CleanRL and LeanRL")
    parser.add_argument("--quick", action="store_true", help="cut whole runs short, to try the script")
    parser.add_argument("--out", type=Path, default=Path("speed"), help="directory to write")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for case in options.cases:
            rows += measure_case(case, options, cache)
            blocks = pd.DataFrame(rows)
            write_file(options.out / "blocks.csv", blocks.to_csv(index=False))
            write_file(options.out / "speed.md", f"{table(blocks)}\n{machine()}; {versions()}\n")
    print((options.out / "speed.md").read_text())


if __name__ == "__main__":
    main()
