"""An agent from the Hub as a training run of the RL Zoo, made from the safe format."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import DirectVecEnv
from sb3_ano.hub.documents import shown
from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.folders import new_folder
from sb3_ano.hub.names import environment_name
from sb3_ano.hub.pull import MAX_BYTES, download, read_task
from sb3_ano.hub.safe_format import load_normalization, load_safe
from sb3_ano.hub.stored_agent import NORMALIZATION, open_document
from sb3_ano.hub.zoo_files import write_settings
from sb3_ano.shaping import ShapingLike


def download_run(
    repo_id: str,
    path: str | os.PathLike[str],
    *,
    env_id: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    token: str | None = None,
    shaping: ShapingLike | None = None,
    custom_objects: dict[str, Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download an agent as the folder that the zoo's training would have left, for its ``enjoy`` and ``record_video``.

    Nothing of the repository is run, no environment is made, and none of its pickles or YAML files is used: model,
    statistics and settings are written anew from what the safe format says. What it does not know are wrappers of the
    environment.

    :param repo_id: ``"user/name"``
    :param path: the run's folder, such as ``logs/ano/CartPole-v1_1``, which must be new or empty
    :param env_id: the environment that the agent must have been trained in; None takes any that is registered
    :param revision: branch, tag or commit
    :param trust_remote_code: whether the run keeps the author's settings of the environment (``env_kwargs``), which ``enjoy``
        then passes to its constructor; without it they are left out, with a warning
    :param token: of the Hub, for private repositories
    :param shaping: as for ``load_from_hub``
    :param custom_objects: as for ``load_from_hub``
    :param max_bytes: bytes that all files together may have
    :return: the folder
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds no sound agent in the safe format, or its environment is not registered, or
        is not ``env_id``
    :raises FileExistsError: if ``path`` is not new or empty
    """
    with new_folder(path, ()) as work, tempfile.TemporaryDirectory() as temporary:
        agent = download(repo_id, Path(temporary) / "agent", revision=revision, token=token, max_bytes=max_bytes)
        try:
            task = _task(agent, env_id, trust_remote_code)
            _write_run(agent, work, task, shaping, custom_objects)
        except ValueError as error:  # it names a folder that will be gone
            raise type(error)(str(error).replace(str(agent), repo_id)) from None
    return Path(path)


def _task(agent: Path, env_id: str | None, trust_remote_code: bool) -> Task:
    trained_in, env_kwargs = read_task(agent)
    if env_id not in (None, trained_in):
        raise ValueError(f"{agent} holds an agent for {trained_in}, not for {env_id}")
    if env_kwargs and not trust_remote_code:
        warnings.warn(
            f"the agent was trained with env_kwargs={shown(env_kwargs)}, which are left out; check them and pass them to the "
            "environment yourself, or keep them with trust_remote_code=True",
            stacklevel=3,
        )
        env_kwargs = {}
    return Task(trained_in, env_kwargs)


def _write_run(agent: Path, run: Path, task: Task, shaping: ShapingLike | None, custom_objects: dict[str, Any] | None) -> None:
    name = environment_name(task.env_id)
    settings = run / name
    settings.mkdir()
    model = load_safe(agent, device="cpu", shaping=shaping, custom_objects=custom_objects)
    env = _with_spaces_of(model)
    if (agent / NORMALIZATION).exists():
        normalized = load_normalization(agent, env)
        normalized.save(str(settings / "vecnormalize.pkl"))
        env = normalized
    model.n_envs = 1
    model.set_env(env)  # so that the settings tell how observations are normalised
    model.n_envs = open_document(agent)["n_envs"]  # those of the training
    model.save(run / f"{name}.zip")
    write_settings(settings, model, task)


def _with_spaces_of(model: ShapedPolicyAlgorithm) -> VecEnv:
    """Make an environment that cannot be stepped: it only has the agent's spaces."""
    env: gym.Env = gym.Env()
    env.observation_space, env.action_space = model.observation_space, model.action_space
    return DirectVecEnv([lambda: env])
