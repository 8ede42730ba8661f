"""What a user of the zoo types, one command after the other, and what each leaves: the table in docs/zoo.md."""

import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.zoo.clean_environment import ROOT

ALGORITHMS = ("ano", "spo", "papo", "ppo", "trpo")
ENVIRONMENTS = ("CartPole-v1", "Hopper-v4", "BreakoutNoFrameskip-v4")
RUN = "logs/{algo}/{env}_1"


@dataclasses.dataclass(frozen=True)
class Step:
    """A command and its promise.

    :param command: after ``python -m sb3_ano.zoo``, with ``{algo}`` and ``{env}``
    :param leaves: the file it promises, which may hold ``*``; empty if it only prints
    :param prints: what it says, if it only prints
    """

    command: str
    leaves: str = ""
    prints: str = ""


ONE = "--algo {algo} --env {env}"
STEPS = (
    Step(f"train {ONE}", f"{RUN}/{{env}}.zip"),
    Step(f"enjoy {ONE} -f logs --no-render", prints="Loading logs/"),
    Step(f"record_video {ONE} -f logs -n 20 -o video", "video/final-model-*.mp4"),
    Step(f"record_training {ONE} -f logs -n 20", f"{RUN}/videos/training.mp4"),
    Step("benchmark --log-dir logs --benchmark-dir benchmarks --no-hub -n 600", "benchmarks/benchmark.md"),
    Step("plot_train -a {algo} -e {env} -f logs -w 1 --figure curves.png", "curves.png"),
    Step("all_plots -a {algo} -e {env} -f logs -o results --figure evaluations.svg", "results.pkl"),
    Step("plot_from_file -i results.pkl --figure results.pdf", "results.pdf"),
    Step(f"push_to_hub {ONE} -f logs -orga me -n 20"),
    Step(f"load_from_hub {ONE} -f downloads -orga me --trust-remote-code", "downloads/{algo}/{env}_1/{env}.zip"),
)
OWN_STEPS = (Step(f"load_from_hub {ONE} -f safe -orga me", "safe/{algo}/{env}_1/{env}.zip"),)
# What makes a training short, and the same for all algorithms.
SHORT = {
    "CartPole-v1": "-n 512 --eval-freq 128 --eval-episodes 2 -params n_envs:2 n_steps:64 batch_size:64",
    "Hopper-v4": "-n 512 --eval-freq 128 --eval-episodes 2 -params n_envs:2 n_steps:64 batch_size:64",
    "BreakoutNoFrameskip-v4": "-n 512 --eval-freq 256 --eval-episodes 1 -params n_envs:1 n_steps:256 batch_size:64",
}
# The zoo has no settings for TRPO on Atari.
TRPO_ON_ATARI = """\
atari:
  env_wrapper: [stable_baselines3.common.atari_wrappers.AtariWrapper]
  frame_stack: 4
  policy: CnnPolicy
  n_timesteps: !!float 1e7
"""


def steps_of(algo: str) -> tuple[Step, ...]:
    """The commands that there are for an algorithm."""
    return STEPS + (OWN_STEPS if algo in ("ano", "spo", "papo") else ())


def run_all(
    python: str | Path, algo: str, env: str, folder: Path, variables: Mapping[str, str], steps: tuple[Step, ...] = STEPS
) -> Iterator[tuple[Step, subprocess.CompletedProcess]]:
    """Run the commands in a folder, and check of each that it ends with 0 and keeps its promise.

    :param python: interpreter
    :param variables: of the environment of the processes, beside this process's own
    """
    # No display and no ffmpeg, whatever machine this is.
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = {**inherited, "PATH": str(folder / "no_programs"), "OMP_NUM_THREADS": "1", **variables}
    for step in steps:
        line = step.command.format(algo=algo, env=env)
        if line.startswith("train"):
            line = f"{line} --seed 1 {SHORT[env]}"
            if algo == "trpo" and "NoFrameskip" in env:
                (folder / "trpo.yml").write_text(TRPO_ON_ATARI)
                line += " -conf trpo.yml"
        command = [str(python), str(ROOT / "zoo_runner.py"), *line.split()]
        finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert finished.returncode == 0, f"{line}\n{finished.stdout[-1500:]}\n{finished.stderr[-1500:]}"
        assert step.prints in finished.stdout, line
        if step.leaves:
            found = list(folder.glob(step.leaves.format(algo=algo, env=env)))
            assert found, f"{line} left no {step.leaves}\n{finished.stdout[-1500:]}\n{finished.stderr[-1500:]}"
            assert all(file.stat().st_size > 0 for file in found), line
        yield step, finished


def table() -> str:
    """The table of the documentation."""
    lines = ["| `python -m sb3_ano.zoo` ... | what is there afterwards |", "|---|---|"]
    for step in (*STEPS, *OWN_STEPS):
        promise = step.leaves or ("the agent's returns, printed" if step.prints else "the repository `me/ALGO-ENV`")
        left = f"`{promise}`" if step.leaves else promise
        lines.append(f"| `{step.command}` | {left} |".replace("{algo}", "ALGO").replace("{env}", "ENV"))
    return "\n".join(lines)
