"""The command ``demo``: all trainings on the small task, and a report; what is finished is kept."""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from sb3_ano.extras import missing_extra
from sb3_ano.llm.files import read_json, write_whole

try:
    from tqdm.auto import tqdm
except ImportError as error:
    raise missing_extra("llm", error.name or "tqdm") from error

#: What is compared, as settings of GANOConfig: grpo is TRL's loss with its clip; gano and spo differ from it in the shape
#: and in the place of the KL divergence, clip in the place alone.
CONTENDERS: dict[str, dict[str, str]] = {
    "grpo": {"shaping": "ppo", "kl_in": "loss"},
    "gano": {"shaping": "ano", "kl_in": "reward"},
    "spo": {"shaping": "spo", "kl_in": "reward"},
    "clip": {"shaping": "ppo", "kl_in": "reward"},
}
_BY_DEFAULT = ["grpo", "gano", "spo"]
_ON_A_CPU = {
    "bf16": "False",
    "use_cpu": "True",
    "gradient_checkpointing": "False",
    "gradient_accumulation_steps": "1",
    "save_strategy": "no",
    "dataloader_pin_memory": "False",
    "report_to": "none",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is trained, in updates unless it says otherwise.

    :param posts: examples for the supervised fine-tuning
    :param sft_steps: its updates, of 64 examples
    :param comparisons: pairs for the reward model, seen three times
    :param generations: of 64 completions, for each contender and seed
    :param iterations: updates with the same completions
    :param learning_rate: of the policy
    :param beta: coefficient of the KL divergence
    """

    posts: int = 20_000
    sft_steps: int = 1500
    comparisons: int = 3000
    generations: int = 250
    iterations: int = 3
    learning_rate: float = 1e-3
    beta: float = 0.05


QUICK = Plan(posts=256, sft_steps=4, comparisons=64, generations=2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def demo(arguments: Sequence[str]) -> int:
    """Compare GRPO, GANO and SPO's shape on a summarisation task of the package's own, without any download."""
    options = _options(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.run is not None:
        from sb3_ano.llm.demo_run import run_one

        run_one(options.out, _plan(options), *options.run)
        return 0
    from sb3_ano.llm.demo_report import write_report

    started = time.monotonic()
    plan = _plan(options)
    _check_folder(options.out, plan)
    _prepare(options.out, plan)
    runs = [(name, str(seed)) for seed in range(options.seeds) for name in options.algos]
    waiting = [run for run in runs if not run_file(options.out, *run).exists()]
    own = ["--quick"] if options.quick else []
    with tqdm(total=len(runs), initial=len(runs) - len(waiting), desc="trainings") as bar:
        for _ in _in_parallel(
            options.out, [["demo", "--out", str(options.out), *own, "--run", *run] for run in waiting], options.jobs
        ):
            bar.update()
            write_report(options.out, plan, options.algos)
    print(write_report(options.out, plan, options.algos))
    print(f"\n{time.monotonic() - started:.0f} s; report in {options.out}: report.md, report.png, report.json")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        "python -m sb3_ano.llm demo", description=demo.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("llm-demo"), help="folder of models, curves and report; the same one goes on")
    add("--algos", nargs="+", choices=list(CONTENDERS), default=_BY_DEFAULT, help="what is compared")
    add("--seeds", type=int, default=3, help="number of seeds, from 0")
    add("--jobs", type=int, default=_cores(), help="trainings at a time, each with one thread")
    add("--quick", action="store_true", help="try everything out; the numbers mean nothing")
    add("--run", nargs=2, metavar=("ALGO", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(list(arguments))
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} is not allowed; allowed are whole numbers from 1")
    options.out = options.out.absolute()
    return options


def _plan(options: argparse.Namespace) -> Plan:
    return QUICK if options.quick else Plan()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_file(out: Path, name: str, seed: str) -> Path:
    """Where the curve of a training is."""
    return out / "runs" / f"{name}_{seed}.json"


def _check_folder(out: Path, plan: Plan) -> None:
    """Insist that what is in the folder belongs to the same plan.

    :raises ValueError: if it was made with another
    """
    path, wanted = out / "plan.json", dataclasses.asdict(plan)
    found = read_json(path)
    if found is not None and found != wanted:
        raise ValueError(f"out={str(out)!r} holds results of other settings; name another folder")
    write_whole(path, wanted)


def _prepare(out: Path, plan: Plan) -> None:
    """Data, a fine-tuned model and a reward model, once for all contenders and seeds."""
    from sb3_ano.llm.demo_run import make_inputs

    make_inputs(out, plan)
    sft = {"model": out / "base", "dataset": out / "posts", "output_dir": out / "sft", "max_steps": plan.sft_steps}
    reward = {"model": out / "sft/final", "dataset": out / "comparisons", "output_dir": out / "reward", "num_train_epochs": 3}
    for command, settings in (
        ("sft", {**sft, "learning_rate": 3e-3, "per_device_train_batch_size": 64, "warmup_steps": 50}),
        ("reward", {**reward, "learning_rate": 1e-3, "per_device_train_batch_size": 32}),
    ):
        if not (out / command / "final").exists():
            print(f"{command} ...", flush=True)
            arguments = [part for key, value in {**_ON_A_CPU, **settings}.items() for part in (f"--{key}", str(value))]
            list(_in_parallel(out, [[command, *arguments]], 1))


def _in_parallel(out: Path, commands: list[list[str]], jobs: int) -> Iterator[None]:
    """Run commands of this package in processes of one thread each, and yield whenever one has finished.

    :raises ValueError: if one fails, with its last line
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    waiting = list(commands)
    running: dict[subprocess.Popen[bytes], Path] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                process, log = _start(out, waiting.pop(0))
                running[process] = log
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                log = running.pop(process)
                if process.returncode != 0:
                    lines = log.read_text().strip().splitlines()
                    raise ValueError(
                        f"{log.name} failed: {lines[-1] if lines else process.returncode} (all of it is in {log})"
                    )
                yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start(out: Path, command: list[str]) -> "tuple[subprocess.Popen[bytes], Path]":
    """Start a command, its output in a file named after it and the training that it runs."""
    run = command[command.index("--run") + 1 :] if "--run" in command else []
    log = out / "logs" / "_".join([command[0], *run])
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sb3_ano.llm", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return process, log
