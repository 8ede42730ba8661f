"""``benchmark``: evaluate the agents of a directory, one after another, and tabulate their returns."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import rl_zoo3.utils
from huggingface_sb3 import EnvironmentName  # type: ignore[import-untyped]
from stable_baselines3.common.monitor import LoadMonitorResultsError, load_results

from sb3_ano._io import write_file
from sb3_ano.zoo.agents import newest_run
from sb3_ano.zoo.fixes import start_command
from sb3_ano.zoo.hub_commands import load_from_sb3
from sb3_ano.zoo.settings import check_settings

_HEADER = """\
# Returns of trained agents

`{program}` has run each agent for about {steps} steps and averaged the returns of the episodes that ended. Actions
are deterministic, except in Atari games and MiniGrid. `n_timesteps` are the steps of the training, k is a thousand and M a
million. Each row is one agent, so the table says little about algorithms.

"""


class _Row(NamedTuple):
    """One row of the table; the names of the columns are the zoo's."""

    algo: str
    env_id: str
    mean_reward: float
    std_reward: float
    n_timesteps: str
    eval_timesteps: int
    eval_episodes: int


def benchmark(values: argparse.Namespace, program: str) -> None:
    """Evaluate agents and write the table.

    :param values: options of the zoo's ``benchmark``
    :param program: program and command as the user typed them
    :raises ValueError: if there is no agent, or if agents could not be evaluated; the others are in the table
    """
    agents = _agents(values)
    rows = []
    failed = []
    for number, (name, (algo, env_id)) in enumerate(agents.items(), start=1):
        if values.verbose > 0:
            print(f"{number}/{len(agents)}\nEvaluating {algo} on {env_id}...", flush=True)
        row = _evaluate(values, name, algo, env_id)
        if row is None:
            failed.append(f"{algo} on {env_id}")
            continue

        rows.append(row)
        if values.verbose > 0:
            print(f"{row.eval_episodes} episodes, mean return {row.mean_reward:.2f} +/- {row.std_reward:.2f}\n")

    if rows:
        file = Path(values.benchmark_dir, "benchmark.md")
        write_file(file, _HEADER.format(program=program, steps=values.n_timesteps) + _table(sorted(rows)))
        print(f"The table is in {file}")
        # The zoo's own place
        if not values.test_mode and file.absolute() != Path("benchmark.md").absolute():
            shutil.copy(file, "benchmark.md")
            print("and in benchmark.md")

    if failed:
        raise ValueError(f"{len(failed)} of {len(agents)} agents have no returns, as said above: {', '.join(failed)}")


def _agents(values: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return algorithm and environment of each agent to evaluate, by the name of its monitor files' directory."""
    directory = Path(values.log_dir)
    agents: dict[str, tuple[str, str]] = {}
    if directory.is_dir():
        # The zoo reads them with YAML's unsafe loader.
        for settings in directory.glob("*/*/*/args.yml"):
            check_settings(settings)
        agents.update(rl_zoo3.utils.get_trained_models(str(directory)))
    if not values.no_hub:
        agents.update(rl_zoo3.utils.get_hf_trained_models())

    # MuJoCo's tasks with goals need another package.
    for name, (_, env_id) in list(agents.items()):
        if "Fetch" in env_id and not values.with_mujoco:
            print(f"{name} is left out; --with-mujoco includes it")
            del agents[name]

    if not agents:
        raise ValueError(f"--log-dir {directory} holds no agents; allowed are directories that train has written")
    # One is enough to see whether it works.
    if values.test_mode:
        first = next(iter(agents))
        return {first: agents[first]}
    return agents


def _evaluate(values: argparse.Namespace, name: str, algo: str, env_id: str) -> _Row | None:
    """Evaluate one agent in a process, unless its monitor files are there; None after a printed reason if that fails."""
    trained_for = _training_steps(values, algo, env_id)
    log = Path(values.benchmark_dir, name)

    # An interrupted benchmark continues.
    episodes = _read_episodes(log)
    if episodes is not None:
        print(f"The returns of an earlier evaluation are in {log}, which can be deleted to evaluate again")
    elif _enjoy(values, algo, env_id, log) != 0:
        return None
    else:
        episodes = _read_episodes(log)
    if episodes is None:
        print(f"No episode of {algo} on {env_id} has ended within {values.n_timesteps} steps; use a larger -n")
        return None

    # Whole episodes only, so that there are fewer steps than were asked for.
    returns = episodes["r"].to_numpy()
    steps = int(episodes["l"].sum())
    return _Row(algo, env_id, float(np.mean(returns)), float(np.std(returns)), trained_for, steps, len(returns))


def _training_steps(values: argparse.Namespace, algo: str, env_id: str) -> str:
    """Return the steps of an agent's training in words; an agent that is not there is downloaded."""
    name = EnvironmentName(env_id)
    number = newest_run(Path(values.log_dir, algo), name)
    if number == 0:
        number = 1
        load_from_sb3(algo, name, values.log_dir, number, values.gym_packages)

    # A stranger may have written them.
    settings = Path(values.log_dir, algo, f"{name}_{number}", name)
    check_settings(settings / "config.yml")
    hyperparams, _ = rl_zoo3.utils.get_saved_hyperparams(str(settings))
    steps = float(hyperparams.get("n_timesteps", 0))

    if steps < 1e6:
        return f"{int(steps / 1e3)}k"
    return f"{int(steps / 1e6)}M"


def _enjoy(values: argparse.Namespace, algo: str, env_id: str, log: Path) -> int:
    options = {
        "-n": values.n_timesteps,
        "--n-envs": values.n_envs,
        "-f": values.log_dir,
        "--algo": algo,
        "--env": env_id,
        "--num-threads": values.num_threads,
        "--seed": values.seed,
        "--verbose": 0,
        "--reward-log": log,
    }
    # In a process of its own, because an agent's package can do anything to this one.
    arguments = ["enjoy", "--no-render"]
    for option, value in options.items():
        arguments += [option, str(value)]
    if values.gym_packages:  # in addition to those of the run
        arguments += ["--gym-packages", *values.gym_packages]
    return start_command(arguments)


def _read_episodes(log: Path) -> pd.DataFrame | None:
    """Return the episodes in monitor files, or None if there is none."""
    try:
        episodes = load_results(str(log))
    except (LoadMonitorResultsError, OSError, ValueError):  # no directory, no files, or an empty one of a killed process
        return None
    # Files with a header only
    if len(episodes) == 0:
        return None
    return episodes


def _table(rows: Sequence[_Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = ["|" + "|".join(_Row._fields) + "|", "|---|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        # More digits would say more than the episodes do.
        mean = round(row.mean_reward, 3)
        std = round(row.std_reward, 3)
        cells = [row.algo, row.env_id, mean, std, row.n_timesteps, row.eval_timesteps, row.eval_episodes]
        lines.append("|" + "|".join(map(str, cells)) + "|")
    return "\n".join(lines) + "\n"
