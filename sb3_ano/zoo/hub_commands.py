"""``push_to_hub`` and ``load_from_hub`` of our algorithms, with the zoo's options and without its pickles."""

import argparse
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import rl_zoo3.load_from_hub
import rl_zoo3.utils
import torch
import yaml
from huggingface_sb3 import ModelName, ModelRepoId  # type: ignore[import-untyped]
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._io import replace_directory, write_file
from sb3_ano._registry import zoo_name
from sb3_ano.algorithms.loading import read_saved_model
from sb3_ano.hub import download_run, push_to_hub
from sb3_ano.zoo.packages import write_packages
from sb3_ano.zoo.search import no_empty_directories


def push(values: argparse.Namespace) -> None:
    """Push the agent of a run, in both formats.

    :param values: options of the zoo's ``push_to_hub``
    :raises ValueError: if there is no such agent
    :raises OSError: if the Hub cannot be reached or rejects the files
    """
    which = values.load_best, values.load_checkpoint, values.load_last_checkpoint
    _, model_path, log_path = rl_zoo3.utils.get_model_path(values.exp_id, values.folder, values.algo, values.env, *which)
    print(f"Loading {model_path}")
    if values.num_threads > 0:
        torch.set_num_threads(values.num_threads)
    settings = Path(log_path, values.env)
    hyperparams, stats_path = rl_zoo3.utils.get_saved_hyperparams(str(settings), test_mode=True)
    # The file has been checked, together with the hyperparameters.
    typed = yaml.unsafe_load(file.read_text())["env_kwargs"] if (file := settings / "args.yml").is_file() else None
    env_kwargs = {**(hyperparams.pop("env_kwargs", None) or {}), **(typed or {}), **(values.env_kwargs or {})}
    # Like the zoo, let Atari's agents sample.
    samples = values.stochastic or (ExperimentManager.is_atari(values.env.gym_id) and not values.deterministic)

    def make(renders: bool) -> VecEnv:
        return rl_zoo3.utils.create_test_env(
            values.env.gym_id,
            n_envs=values.n_envs,
            stats_path=stats_path,
            seed=values.seed,
            should_render=renders,
            hyperparams=dict(hyperparams),
            env_kwargs={"render_mode": "rgb_array", **env_kwargs} if renders else env_kwargs,
        )

    try:
        env = make(renders=not values.no_render)
    except TypeError:  # an environment without render_mode
        env = make(renders=False)
    try:
        model = rl_zoo3.ALGOS[values.algo].load(model_path, env=env, device=values.device)
        # Publish the number of environments of the training.
        model.n_envs = read_saved_model(model_path).attributes["n_envs"]
        set_random_seed(values.seed)  # loading has set the seed of the training
        url = push_to_hub(
            model,
            _repo_id(values),
            env,
            env_id=values.env.gym_id,
            env_kwargs=env_kwargs,
            seed=values.seed,
            run=log_path,
            deterministic=not samples,
            video=not values.no_render,
            video_length=values.n_timesteps,
            commit_message=values.commit_message,
            verbose=values.verbose,
        )
    finally:
        env.close()
    print(f"The agent is at {url}")


def load(values: argparse.Namespace) -> None:
    """Download an agent in the safe format, which holds no code, as a run for ``enjoy`` and the other commands.

    :param values: options of the zoo's ``load_from_hub``
    :raises OSError: if the Hub cannot be reached or lacks the agent
    :raises ValueError: if the repository has no safe format, the directory exists and ``--force`` is not given, or the agent
        would replace another one outside of a run
    """
    directory = Path(values.folder) / values.algo
    number = values.exp_id or rl_zoo3.get_latest_run_id(str(directory), values.env) + 1
    if number < 0:
        _load_without_run(values, directory)
        return
    run = directory / f"{values.env}_{number}"
    if run.exists() and not values.force:
        raise ValueError(f"the directory {run} exists; --force replaces it, --exp-id 0 makes a new one")
    with no_empty_directories(run), replace_directory(run) as new:
        _download(values, new)
    print(f"Saved to {run}")


def _load_without_run(values: argparse.Namespace, directory: Path) -> None:
    """Download an agent to a directory that has the runs of all tasks in it; replace nothing there."""
    settings = directory / values.env
    model = directory / f"{values.env}.zip"
    for path in (settings, model):
        if os.path.lexists(path):
            raise ValueError(
                f"{path} exists, and --exp-id {values.exp_id} replaces nothing in {directory}; remove it, or use --exp-id 0, "
                "which makes a new run"
            )

    with no_empty_directories(directory), replace_directory(settings) as new:
        run = new / "run"
        _download(values, run)
        for file in (run / values.env).iterdir():
            file.rename(new / file.name)
        write_file(model, (run / model.name).read_bytes())
        shutil.rmtree(run)
    print(f"Saved to {model}")


def _download(values: argparse.Namespace, run: Path) -> None:
    download_run(_repo_id(values), run, env_id=values.env.gym_id)
    trained_by = zoo_name(read_saved_model(run / f"{values.env}.zip").attributes["algorithm"])
    if trained_by != values.algo:
        raise ValueError(f"{_repo_id(values)} holds an agent of {trained_by}; use --algo {trained_by}")
    write_packages(run, values.env, values.gym_packages)


def load_pickle(values: argparse.Namespace) -> None:
    """Download an agent as the zoo does, as a pickle; Hugging Face's loader asks for trust in its author.

    :param values: options of the zoo's ``load_from_hub``
    :raises ValueError: if the author is not trusted, or the directory exists and ``--force`` is not given
    """
    with ExitStack() as stack:
        keep_replaced_run(stack, values)
        rl_zoo3.load_from_hub.download_from_hub(
            algo=values.algo,
            env_name=values.env,
            exp_id=values.exp_id,
            folder=values.folder,
            organization=values.organization,
            repo_name=values.repo_name,
            force=values.force,
        )


def keep_replaced_run(stack: ExitStack, values: argparse.Namespace) -> None:
    """Let the zoo's own ``load_from_hub`` download before the run that ``--force`` replaces is removed.

    :param stack: stack of the command
    :param values: options of the zoo's ``load_from_hub``, whose directory is changed
    :raises ValueError: if ``--force`` would remove other runs
    """
    directory = Path(values.folder) / values.algo
    if values.force and values.exp_id < 0 and directory.exists():
        raise ValueError(
            f"--exp-id {values.exp_id} --force would remove all runs in {directory}; use --exp-id 0, which makes a new run"
        )
    run = directory / f"{values.env}_{values.exp_id}"
    if not (values.force and values.exp_id > 0 and run.is_dir()):
        return

    new = stack.enter_context(replace_directory(run))
    download = new / ".download"
    values.folder = str(download)

    def move(error: object, *details: object) -> None:
        if error is None:
            for file in (download / values.algo / run.name).iterdir():
                file.rename(new / file.name)
            shutil.rmtree(download)
            print(f"Saved to {run}")

    stack.push(move)


def _repo_id(values: argparse.Namespace) -> str:
    return str(ModelRepoId(values.organization, values.repo_name or ModelName(values.algo, values.env)))
