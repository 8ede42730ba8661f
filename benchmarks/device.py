"""Measure training on a GPU against RSL-RL and LeanRL, and where a GPU begins to pay.

    python benchmarks/device.py --out OUT                       # needs a CUDA device, rsl-rl-lib and tensordict
    python benchmarks/device.py --out OUT --peers peers         # with LeanRL's scripts; docs/gpu.md says how to get them
    python benchmarks/device.py --out OUT --device cpu --quick  # a trial without a GPU

Every variant is a process that builds its model, compiles, and then waits for its turn. The blocks of a case alternate, so
that all see the same machine. ``blocks.csv`` has a row per block, ``device.md`` medians and quartiles of the ratios to the
first variant of the case.

- ``pendulum``: TensorPendulum of examples/tensor_envs.py, 4,096 environments x 24 steps, 64-64, 5 epochs x 4 minibatches.
- ``wide``: the same with 256-256.
- ``cheetah``: LeanRL's ppo_continuous_action, one HalfCheetah-v4 of gymnasium, 512 steps, which LeanRL normalizes with
  gymnasium's wrappers, and this package with its VecNormalize.
- ``pong``: LeanRL's ppo_atari_envpool, 8 x 128 steps of images. The frames are drawn at random, for both, because games take
  longer than the rest.
- ``crossover-N``: ``pendulum`` with N environments, on the GPU and on the CPU.
"""

import argparse
import csv
import dataclasses
import json
import os
import runpy
import select
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

N_STEPS, MINIBATCHES, EPOCHS = 24, 4, 5
# A quarter of the usual 2048 steps, because LeanRL compiles a loop over them, which takes longer the more there are.
CONTINUOUS = {"n_steps": 512, "batch_size": 64, "n_epochs": 10, "clip_range_vf": 0.2, "learning_rate": 3e-4}
IMAGES = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "clip_range": 0.1, "clip_range_vf": 0.1, "ent_coef": 0.01}
CROSSOVER = (16, 256, 4096, 16384)
# Variants of each case; the first is the reference.
CASES: dict[str, list[str]] = {
    "pendulum": ["rsl_rl", "rsl_rl-compiled", "ano", "ano-eager", "ano-numpy", "sb3"],
    "wide": ["rsl_rl", "rsl_rl-compiled", "ano", "ano-bfloat16"],
    "pong": ["leanrl", "ano", "ano-bfloat16"],
    **{f"crossover-{number}": ["ano-cpu", "ano"] for number in CROSSOVER},
    # Last, because LeanRL compiles a loop over the steps of a rollout, which takes minutes.
    "cheetah": ["leanrl", "ano", "ano-cpu"],
}
LEANRL = {
    "cheetah": (
        "ppo_continuous_action_torchcompile.py",
        ["--env-id", "HalfCheetah-v4", "--num-steps", "512", "--num-minibatches", "8"],
    ),
    "pong": ("ppo_atari_envpool_torchcompile.py", ["--env-id", "Pong-v5"]),
}

# A function that trains for about as many seconds as it is told, and returns the number of steps.
Train = Callable[[float], int]


def memory() -> dict[str, float]:
    """Return the peak of the GPU's memory that PyTorch has allocated and reserved, and of the host's, in MB."""
    numbers = {"gpu_allocated_mb": 0.0, "gpu_reserved_mb": 0.0}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        numbers["gpu_allocated_mb"] = torch.cuda.max_memory_allocated() / 2**20
        numbers["gpu_reserved_mb"] = torch.cuda.max_memory_reserved() / 2**20
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    return {**numbers, "host_mb": int(peak.split()[1]) / 1024}


def trained_by(model: Any) -> Train:
    """Return the training of an SB3 model in rollouts."""
    rollout = model.n_steps * model.n_envs

    def train(seconds: float) -> int:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            model.learn(4 * rollout, reset_num_timesteps=False)
            steps += 4 * rollout
        return steps

    return train


def make_ours(case: str, variant: str, device: str) -> Train:
    """Build a model of this package, or SB3's PPO."""
    from stable_baselines3 import PPO

    from sb3_ano import ANO

    if variant.endswith("-cpu"):
        device = "cpu"
    options: dict[str, Any] = {"device": device, "seed": 0}
    if variant != "sb3":
        options |= {"shaping": "ppo", "torch_compile": variant not in ("ano-eager",)}
    if variant == "ano-bfloat16":
        options["precision"] = "bfloat16"

    if case == "cheetah":
        from sb3_ano.envs import VecNormalize, make_vec_env

        env = VecNormalize(make_vec_env("HalfCheetah-v4", 1, seed=0, backend="gymnasium"))
        return trained_by(ANO("MlpPolicy", env, **CONTINUOUS, **options))
    if case == "pong":
        torch.set_float32_matmul_precision("high")  # as LeanRL's script does
        return trained_by(ANO("CnnPolicy", image_env(), **IMAGES, **options))

    from tensor_envs import TensorPendulum

    n_envs = int(case.split("-")[1]) if case.startswith("crossover") else int(os.environ.get("N_ENVS", "4096"))
    options |= {"n_steps": N_STEPS, "batch_size": n_envs * N_STEPS // MINIBATCHES, "n_epochs": EPOCHS, "learning_rate": 1e-3}
    if case == "wide":
        options["policy_kwargs"] = {"net_arch": [256, 256]}
    model = (PPO if variant == "sb3" else ANO)("MlpPolicy", TensorPendulum(n_envs, device), **options)
    if variant == "ano-numpy":
        from sb3_ano.fast import engine

        decide = engine.decide
        engine.decide = lambda *given: dataclasses.replace(decide(*given), device="measured without")
    return trained_by(model)


def make_rsl_rl(case: str, variant: str, device: str) -> Train:
    """Build RSL-RL's runner for the same work."""
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensor_envs import TensorPendulum
    from tensordict import TensorDict

    n_envs = int(os.environ.get("N_ENVS", "4096"))

    class Pendulum(VecEnv):
        def __init__(self) -> None:
            self.env = TensorPendulum(n_envs, device)
            self.num_envs, self.num_actions, self.max_episode_length = n_envs, 1, 200
            self.episode_length_buf = torch.zeros(n_envs, dtype=torch.long, device=device)
            self.device, self.cfg = device, {}
            self.seen = self.env.begin(0)

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": self.seen}, batch_size=[n_envs], device=device)

        def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
            step = self.env.advance(actions.clamp(-2.0, 2.0))
            self.seen = step.observations
            ended = (step.terminated | step.truncated).long()
            return self.get_observations(), step.rewards, ended, {"time_outs": step.truncated}

    hidden = [256, 256] if case == "wide" else [64, 64]
    network = {"class_name": "MLPModel", "hidden_dims": hidden, "activation": "tanh"}
    config = {
        "num_steps_per_env": N_STEPS,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "torch_compile_mode": "default" if variant == "rsl_rl-compiled" else None,
        "multi_gpu": None,
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}},
        "critic": {**network},
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": EPOCHS,
            "num_mini_batches": MINIBATCHES,
            "clip_param": 0.2,
            "gamma": 0.99,
            "lam": 0.95,
            "value_loss_coef": 0.5,
            "entropy_coef": 0.0,
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
            "use_clipped_value_loss": False,
            "schedule": "fixed",
            "desired_kl": None,
            "normalize_advantage_per_mini_batch": True,
        },
    }
    runner = OnPolicyRunner(Pendulum(), config, log_dir=None, device=device)

    def train(seconds: float) -> int:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            runner.learn(4)
            steps += 4 * N_STEPS * n_envs
        return steps

    return train


class Frames:
    """Eight games of random frames: a step chooses eight of 64 that were drawn before."""

    def __init__(self) -> None:
        self.frames = np.random.default_rng(0).integers(0, 255, (64, 8, 4, 84, 84), dtype=np.uint8)
        self.count = 0

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.count += 1
        ended = np.full(8, self.count % 500 == 0)
        return self.frames[self.count % 64].copy(), np.ones(8, dtype=np.float32), ended


def image_env() -> Any:
    """Return the frames as an environment of SB3."""
    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecEnv

    class Images(VecEnv):
        def __init__(self) -> None:
            self.frames, self.render_mode = Frames(), None
            super().__init__(8, spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))

        def reset(self) -> np.ndarray:
            return self.frames.step()[0]

        def step_async(self, actions: np.ndarray) -> None:
            pass

        def step_wait(self) -> Any:
            observations, rewards, ended = self.frames.step()
            infos: list[dict[str, Any]] = [{} for _ in range(8)]
            if ended.any():
                for index in range(8):
                    infos[index] = {"terminal_observation": observations[index], "episode": {"r": 500.0, "l": 500, "t": 0.0}}
            return observations, rewards, ended, infos

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(self, attr_name)] * 8

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError

        def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **options: Any) -> list[Any]:
            raise NotImplementedError

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [True] * 8

        def close(self) -> None:
            pass

    return Images()


def run_leanrl(script: Path, arguments: list[str], turns: "Turns") -> None:
    """Run a script of LeanRL as its authors wrote it, with modules of that name for what it reports to and reads from.

    It reports every tenth rollout to Weights & Biases, where it is held until its next turn.
    """
    wandb: Any = types.ModuleType("wandb")
    wandb.init = lambda **options: None
    counted = {"steps": 0}

    def log(values: dict[str, Any], step: int) -> None:
        turns.finish(step - counted["steps"])
        counted["steps"] = step

    wandb.log = log

    tyro: Any = types.ModuleType("tyro")

    def cli(kind: type) -> Any:
        parsed = kind()
        words = iter(arguments)
        for word in words:
            name = word.removeprefix("--").replace("-", "_")
            now = getattr(parsed, name)
            setattr(parsed, name, True if isinstance(now, bool) else type(now)(next(words)))
        return parsed

    tyro.cli = cli

    gym: Any = types.ModuleType("gym")
    gym.spaces = types.SimpleNamespace(Discrete=types.SimpleNamespace)

    class Wrapper:
        def __init__(self, env: Any) -> None:
            self.env = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self.env, name)

        def reset(self, **options: Any) -> Any:
            return self.env.reset(**options)

        def step(self, action: Any) -> Any:
            return self.env.step(action)

    gym.Wrapper = Wrapper
    envpool: Any = types.ModuleType("envpool")

    class Games:
        num_envs = 8
        action_space = types.SimpleNamespace(n=6)
        observation_space = types.SimpleNamespace(shape=(4, 84, 84))

        def __init__(self) -> None:
            self.frames = Frames()

        def reset(self) -> np.ndarray:
            return self.frames.step()[0]

        def step(self, action: np.ndarray) -> Any:
            observations, rewards, ended = self.frames.step()
            return observations, rewards, ended, {"reward": rewards, "terminated": ended, "lives": np.zeros(8, dtype=int)}

    envpool.make = lambda *positional, **options: Games()
    sys.modules.update({"wandb": wandb, "tyro": tyro})
    if "atari" in script.name:
        sys.modules.update({"gym": gym, "envpool": envpool})
    runpy.run_path(str(script), run_name="__main__")


class Turns:
    """Wait for the next turn on standard input, and report to standard output, which nothing else may print to."""

    def __init__(self) -> None:
        self.output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.start = 0.0
        self.is_ready = False

    def wait(self) -> float:
        """Return the seconds of the next block; the process ends with the input."""
        if not self.is_ready:
            self.is_ready = True
            self.say({"ready": True})
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        return float(line)

    def finish(self, steps: int) -> None:
        """Report a block, and wait for the next turn."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start
        if self.is_ready:
            self.say({"steps_per_second": steps / seconds, "seconds": seconds, **memory()})
        self.wait()

    def say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.output, flush=True)


def work(case: str, variant: str, options: argparse.Namespace) -> None:
    """Build a variant and train whenever it is its turn."""
    turns = Turns()
    torch.set_num_threads(options.threads)
    if variant == "leanrl":
        name, arguments = LEANRL[case]
        arguments = [*arguments, "--compile", "--total-timesteps", "100000000"]
        if options.device == "cuda":
            arguments.append("--cudagraphs")
        run_leanrl(options.peers / "LeanRL/leanrl" / name, arguments, turns)
        return

    make = make_rsl_rl if variant.startswith("rsl_rl") else make_ours
    train = make(case, variant, options.device)
    train(0.01)  # compiles, and records graphs
    train(1.0)
    seconds = turns.wait()
    while True:
        turns.finish(train(seconds))


class Worker:
    """A process with one variant."""

    def __init__(self, case: str, variant: str, options: argparse.Namespace) -> None:
        self.case = case
        self.variant = variant
        self.deadline = options.start + options.deadline
        command = [sys.executable, __file__, "--work", case, variant, "--device", options.device]
        command += ["--threads", str(options.threads)]
        if options.peers is not None:
            command += ["--peers", str(options.peers.resolve())]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": str(options.threads)}
        if options.quick:
            environment["N_ENVS"] = "256"
        if variant == "leanrl" and options.peers is not None:
            environment["PYTHONPATH"] = f"{options.peers.resolve() / 'site'}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        self.log = (options.out / f"{case}_{variant}.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )

    def read(self) -> dict[str, Any] | None:
        """Return the next report; None if the process has failed, or says nothing until the deadline."""
        assert self.process.stdout is not None
        left = self.deadline - time.perf_counter()
        if not select.select([self.process.stdout], [], [], max(0.0, left))[0]:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line.strip() else None

    def block(self, seconds: float) -> dict[str, Any] | None:
        """Let it train."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.read()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()


def ready(group: list[Worker]) -> list[Worker]:
    """Wait for processes, and return those that are ready."""
    kept = []
    for worker in group:
        if worker.read() is None:
            print(f"{worker.case}: {worker.variant} failed, or is too slow; see its log", flush=True)
        else:
            kept.append(worker)
    return kept


def write(rows: list[dict[str, Any]], directory: Path) -> None:
    """Write all blocks that have been measured."""
    if not rows:
        return
    with (directory / "blocks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Start all variants at once, and measure the cases one after another when they are ready.

    :return: blocks, and what :func:`train_and_move` says, which runs while they compile
    """
    workers: dict[str, list[Worker]] = {}
    for case in options.cases:
        workers[case] = []
        for variant in CASES[case]:
            if variant == "leanrl" and options.peers is None:
                continue
            if options.variants and variant not in options.variants:
                continue
            workers[case].append(Worker(case, variant, options))

    rows: list[dict[str, Any]] = []
    try:
        trained = train_and_move(options)
        print(trained, flush=True)

        # Compilation would disturb the others, but LeanRL's loop over the steps takes too long to wait for.
        for case in workers:
            if case != "cheetah":
                workers[case] = ready(workers[case])
        print(f"ready after {time.perf_counter() - options.start:.0f} s", flush=True)

        for case in workers:
            group = ready(workers[case]) if case == "cheetah" else workers[case]
            for pair in range(options.pairs):
                for worker in group if pair % 2 == 0 else group[::-1]:
                    report = worker.block(options.block_seconds)
                    if report is None:
                        print(f"{case}: {worker.variant} failed in a block; see its log", flush=True)
                        continue
                    rows.append({"case": case, "variant": worker.variant, "pair": pair, **report})
            print(table([row for row in rows if row["case"] == case]), flush=True)
            write(rows, options.out)
    finally:
        for group in workers.values():
            for worker in group:
                worker.close()
    return rows, trained


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians, and quartiles of the ratios to the first variant of each case, as Markdown."""
    lines = ["| case | variant | steps/s | against the first (quartiles) | GPU MB, allocated and reserved | host MB |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for case in dict.fromkeys(row["case"] for row in rows):
        speeds: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["case"] == case:
                speeds.setdefault(row["variant"], {})[row["pair"]] = row["steps_per_second"]
        first = speeds[next(variant for variant in CASES[case] if variant in speeds)]
        for variant, by_pair in speeds.items():
            ratios = [speed / first[pair] for pair, speed in by_pair.items() if pair in first]
            low, middle, high = np.quantile(ratios or [np.nan], [0.25, 0.5, 0.75])
            last = next(row for row in reversed(rows) if row["case"] == case and row["variant"] == variant)
            cells = [case, variant, f"{np.median(list(by_pair.values())):,.0f}", f"**{middle:.2f}** ({low:.2f} to {high:.2f})"]
            cells += [f"{last['gpu_allocated_mb']:.0f}, {last['gpu_reserved_mb']:.0f}", f"{last['host_mb']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def train_and_move(options: argparse.Namespace) -> str:
    """Train a pendulum on the device, save it, and evaluate it on a CPU."""
    from stable_baselines3.common.evaluation import evaluate_policy
    from tensor_envs import TensorPendulum

    from sb3_ano import ANO

    start = time.perf_counter()
    settings = {"n_steps": 32, "batch_size": 1024, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9}
    model = ANO(
        "MlpPolicy", TensorPendulum(1024, options.device), device=options.device, seed=0, torch_compile=True, **settings
    )
    steps = 2_000_000 if options.device == "cuda" else 500_000
    model.learn(50_000 if options.quick else steps)
    seconds = time.perf_counter() - start
    model.save(options.out / "pendulum")

    loaded = ANO.load(options.out / "pendulum", device="cpu")
    env = TensorPendulum(32, "cpu")
    env.seed(1)
    mean, deviation = evaluate_policy(loaded, env, n_eval_episodes=32)
    path = "on the device" if getattr(model.rollout_buffer, "held", None) else "in NumPy"
    return (
        f"Pendulum, {model.num_timesteps:,} steps {path} in {seconds:.1f} s; on a CPU: return {mean:.0f} +/- {deviation:.0f}"
    )


def main() -> None:
    """Measure, and write blocks and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device"), help="directory of the results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="only these variants of the cases")
    parser.add_argument("--pairs", type=int, default=3, help="blocks of each variant")
    parser.add_argument("--block-seconds", type=float, default=1.5, help="length of a block")
    parser.add_argument("--deadline", type=float, default=330.0, help="seconds after which no process is waited for")
    parser.add_argument("--threads", type=int, default=8, help="PyTorch's threads on the CPU")
    parser.add_argument(
        "--peers", type=lambda text: None if text == "None" else Path(text).resolve(), help="has LeanRL and site"
    )
    parser.add_argument("--quick", action="store_true", help="only try everything that this machine has")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options)
        return

    options.start = time.perf_counter()
    if options.quick:
        options.pairs, options.block_seconds, options.threads = 1, 0.5, 1
        CASES.update({"pendulum": ["rsl_rl", "ano"], "pong": ["leanrl"], "cheetah": ["leanrl"]})
    if options.cases is None:
        options.cases = ["pendulum"] if options.quick else list(CASES)
    options.out.mkdir(parents=True, exist_ok=True)

    rows, trained = measure(options)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    text = f"{name}, PyTorch {torch.__version__}\n\n{table(rows)}\n\n{trained}\n"
    (options.out / "device.md").write_text(text)
    print(text, f"{time.perf_counter() - options.start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
