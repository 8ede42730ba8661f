"""``push_to_hub`` and ``load_from_hub`` with the zoo's options; our algorithms come back without pickles."""

import argparse
import importlib
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import huggingface_sb3  # type: ignore[import-untyped]
import rl_zoo3.utils
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName, ModelName, ModelRepoId
from stable_baselines3.common.utils import set_random_seed

from sb3_ano._io import no_empty_directories, replace_directory, write_file
from sb3_ano._registry import ALGORITHMS, zoo_name
from sb3_ano.algorithms.loading import read_saved_model
from sb3_ano.hub import download_run, push_to_hub
from sb3_ano.zoo.agents import Agent, load_agent
from sb3_ano.zoo.fixes import missing_metadata
from sb3_ano.zoo.packages import write_packages


def push(values: argparse.Namespace) -> None:
    """Push the agent of a run; those of our algorithms in both formats.

    :param values: options of the zoo's ``push_to_hub``
    :raises ValueError: if there is no such agent
    :raises OSError: if the Hub cannot be reached or rejects the files
    """
    render_mode: str | None = "rgb_array"
    if values.no_render:
        render_mode = None
    try:
        agent = load_agent(values, render_mode=render_mode, for_acting=False)
    except TypeError:  # an environment without render_mode
        agent = load_agent(values, render_mode=None, for_acting=False)

    set_random_seed(values.seed)  # loading has set the seed of the training
    try:
        if values.algo in ALGORITHMS:
            _push_ours(values, agent)
        else:
            _push_the_zoos(values, agent)
    finally:
        agent.env.close()


def _push_ours(values: argparse.Namespace, agent: Agent) -> None:
    """Push an agent of this package in both formats."""
    # Publish the number of environments of the training.
    agent.model.n_envs = read_saved_model(agent.file).attributes["n_envs"]
    url = push_to_hub(
        agent.model,  # type: ignore[arg-type]
        _repo_id(values),
        agent.env,
        env_id=values.env.gym_id,
        env_kwargs=agent.env_kwargs,
        seed=values.seed,
        run=agent.run,
        deterministic=agent.is_deterministic,
        video=not values.no_render,
        video_length=values.n_timesteps,
        commit_message=values.commit_message,
        verbose=values.verbose,
    )
    print(f"The agent is at {url}")


def _push_the_zoos(values: argparse.Namespace, agent: Agent) -> None:
    """Push an agent as the zoo does."""
    # The zoo's code imports a name that has been renamed.
    with missing_metadata():
        package_to_hub = importlib.import_module("rl_zoo3.push_to_hub").package_to_hub
        package_to_hub(
            agent.model,
            ModelName(values.algo, values.env),
            values.algo,
            rl_zoo3.ALGOS[values.algo].__name__,
            agent.run,
            agent.hyperparams,
            agent.env_kwargs,
            values.env,
            agent.env,
            repo_id=ModelRepoId(*_repo_id(values).split("/")),
            commit_message=values.commit_message,
            is_deterministic=agent.is_deterministic,
            n_eval_episodes=10,
            token=None,
            local_repo_path="hub",
            video_length=values.n_timesteps,
            generate_video=not values.no_render,
        )


def load(values: argparse.Namespace, *, is_safe: bool) -> None:
    """Download an agent as a run for ``enjoy`` and the other commands.

    :param values: options of the zoo's ``load_from_hub``
    :param is_safe: whether to download the safe format, which holds no code, instead of a pickle
    :raises OSError: if the Hub cannot be reached or lacks the agent
    :raises ValueError: if the repository has no safe format, the author of a pickle is not trusted, the directory exists and
        ``--force`` is not given, or the agent would replace another one outside of a run
    """
    repo_id = _repo_id(values)

    def download(run: Path) -> None:
        if is_safe:
            _download_safe(repo_id, run, values.algo, values.env)
        else:
            download_pickle(repo_id, run, values.algo, values.env)
        write_packages(run, values.env, values.gym_packages)

    # A new run has the next number, whether the newest one has an agent or not.
    directory = Path(values.folder) / values.algo
    number = values.exp_id or rl_zoo3.get_latest_run_id(str(directory), values.env) + 1
    if number < 0:
        _load_without_run(values, directory, download)
        return

    run = directory / f"{values.env}_{number}"
    if run.exists() and not values.force:
        raise ValueError(f"the directory {run} exists; --force replaces it, --exp-id 0 makes a new one")
    with no_empty_directories(run), replace_directory(run) as new:
        download(new)
    print(f"Saved to {run}")


def load_from_sb3(algo: str, name: EnvironmentName, folder: str, number: int, packages: Sequence[str]) -> None:
    """Download an agent of the zoo's authors, as ``enjoy`` and ``benchmark`` do if there is no agent.

    :param algo: zoo name of the algorithm
    :param name: directory name of the environment
    :param folder: directory of all runs
    :param number: number of the run, or 0 for a new one
    :param packages: modules of the user that register environments
    """
    print("There is no such agent here; it is downloaded from https://huggingface.co/sb3")
    options = {"algo": algo, "env": name, "folder": folder, "exp_id": number, "gym_packages": packages}
    load(argparse.Namespace(**options, organization="sb3", repo_name=None, force=False), is_safe=False)


def _load_without_run(values: argparse.Namespace, directory: Path, download: Callable[[Path], None]) -> None:
    """Download an agent to a directory that has the runs of all tasks in it; replace nothing there."""
    settings = directory / values.env
    model = directory / f"{values.env}.zip"
    for path in (settings, model):
        if os.path.lexists(path):
            raise ValueError(
                f"{path} exists, and --exp-id {values.exp_id} replaces nothing in {directory}; remove it, or use --exp-id 0, "
                "which makes a new run"
            )

    # The model comes last: without it, there is no agent.
    with no_empty_directories(directory), replace_directory(settings) as new:
        run = new / "run"
        download(run)
        # Settings are in a directory of their own, next to the model.
        for file in (run / values.env).iterdir():
            file.rename(new / file.name)
        write_file(model, (run / model.name).read_bytes())
        shutil.rmtree(run)
    print(f"Saved to {model}")


def _download_safe(repo_id: str, run: Path, algo: str, name: EnvironmentName) -> None:
    download_run(repo_id, run, env_id=name.gym_id)
    # Otherwise the agent would be among those of another algorithm.
    trained_by = zoo_name(read_saved_model(run / f"{name}.zip").attributes["algorithm"])
    if trained_by != algo:
        raise ValueError(f"{repo_id} holds an agent of {trained_by}; use --algo {trained_by}")


def download_pickle(repo_id: str, run: Path, algo: str, name: EnvironmentName) -> None:
    """Download the zoo's files of an agent, among them pickles.

    :param repo_id: repository on the Hub
    :param run: directory to write
    :param algo: zoo name of the algorithm
    :param name: directory name of the environment
    :raises ValueError: if the author is not trusted
    :raises OSError: if the Hub cannot be reached or lacks a file
    """
    fetch = huggingface_sb3.load_from_hub  # which asks for trust in the author
    print(f"Downloading from https://huggingface.co/{repo_id}")
    # Nothing is made for an agent that is not there.
    model = fetch(repo_id, ModelName(algo, name).filename)
    settings = run / name
    settings.mkdir(parents=True, exist_ok=True)
    shutil.copy(model, run / f"{name}.zip")
    for file in ("config.yml", "args.yml", "env_kwargs.yml"):
        shutil.copy(fetch(repo_id, file), settings / file)

    # Only agents with normalized observations have it.
    # A lost connection is another error, because the agent would act without its normalization.
    missing = EntryNotFoundError if is_offline_mode() else RemoteEntryNotFoundError
    try:
        shutil.copy(fetch(repo_id, "vec_normalize.pkl"), settings / "vecnormalize.pkl")
    except missing:
        print("No normalization file")

    # The zoo loads no agent without its logs.
    with zipfile.ZipFile(fetch(repo_id, "train_eval_metrics.zip")) as metrics:
        metrics.extractall(run)


def _repo_id(values: argparse.Namespace) -> str:
    return str(ModelRepoId(values.organization, values.repo_name or ModelName(values.algo, values.env)))
