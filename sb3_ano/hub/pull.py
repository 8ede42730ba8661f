"""Load an agent from the Hugging Face Hub."""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._io import read_json
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import DirectVecEnv, register_atari
from sb3_ano.hub.card import RESULTS, environment_name, write_settings
from sb3_ano.hub.connection import download
from sb3_ano.hub.documents import new_folder, shown, translate_errors
from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.safe_format import DOCUMENT, SAFE_FILES, describe, load_normalization, load_safe, open_document
from sb3_ano.shaping import ShapingLike

#: Bytes that the files of a download may have together.
MAX_BYTES = 2 * 1024**3


def load_from_hub(
    repo_id: str,
    env: str | gym.Env | VecEnv | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    device: torch.device | str = "auto",
    shaping: ShapingLike | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> ShapedPolicyAlgorithm:
    """Load an agent that :func:`~sb3_ano.hub.push_to_hub` pushed.

    Nothing in the repository is run: the agent is read from JSON and safetensors. With ``HF_HUB_OFFLINE=1``, or if the Hub
    cannot be reached, an agent that was loaded before is taken from the cache.

    :param repo_id: repository, ``"user/name"``
    :param env: environments for the agent, or an id. They are normalized as in training, with statistics that no longer
        change, unless they have a VecNormalize with statistics of its own
    :param revision: branch, tag or commit; a commit is the only one that its author cannot change later
    :param token: token of the Hub, for private repositories; None takes the one of ``hf auth login`` or ``HF_TOKEN``
    :param device: device of the networks
    :param shaping: shaping function of an agent that was trained with one that is not built in
    :param custom_objects: classes and functions of the agent that are not SB3's or this package's, as for ``load_safe``
    :raises ValueError: if the repository holds no agent in the safe format, or the agent is damaged
    :raises OSError: huggingface_hub's errors, if the repository or a file is missing, or the connection fails
    """
    with _downloaded(repo_id, revision, token) as agent:
        return load_safe(agent, env, device=device, shaping=shaping, custom_objects=custom_objects)


@contextlib.contextmanager
def _downloaded(repo_id: str, revision: str | None, token: str | None) -> Iterator[Path]:
    """Yield a temporary directory with the files that loading reads, by their fixed names."""
    paths = download(repo_id, (*SAFE_FILES, RESULTS), DOCUMENT, MAX_BYTES, revision, token)
    # An agent of SB3, or no agent
    if not paths:
        raise ValueError(
            f"{repo_id} holds no agent in the safe format (no {DOCUMENT}). An SB3 .zip runs any code that its author put in: "
            "if you trust the author, load it with huggingface_hub.hf_hub_download and ANO.load, or in the zoo use "
            "--trust-remote-code"
        )

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo_id  # errors name the repository
        folder.mkdir(parents=True)

        for name, path in paths.items():  # the cache holds links, which the safe format rejects
            shutil.copyfile(path, folder / name)
        yield folder


def download_run(
    repo_id: str,
    path: str | os.PathLike[str],
    *,
    env_id: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Download an agent as the directory that the zoo's training would have left, for its ``enjoy`` and ``record_video``.

    Nothing in the repository is run, no environment is made, and none of its pickles or YAML files is used: model,
    statistics and settings are written from the safe format, which does not know the wrappers of the environment. The
    author's settings of the environment are left out, with a warning.

    :param repo_id: repository, ``"user/name"``
    :param path: directory of the run, such as ``logs/ano/CartPole-v1_1``, which must be new or empty
    :param env_id: environment that the agent must have been trained in; None allows any that is registered
    :param revision: as for :func:`load_from_hub`
    :param token: as for :func:`load_from_hub`
    :return: the directory
    :raises ValueError: if the repository holds no agent in the safe format, the agent is damaged or has parts that only its
        author has, or its environment is not registered or is not ``env_id``
    :raises FileExistsError: if ``path`` is not new or empty
    :raises OSError: as for :func:`load_from_hub`, and if the directory cannot be written
    """
    with new_folder(path, ()) as run, _downloaded(repo_id, revision, token) as agent:
        trained_in = _read_env_id(agent)
        if env_id not in (None, trained_in):
            raise ValueError(f"{agent} holds an agent for {trained_in}, not for {env_id}")

        # On the CPU, because the agent does not act here.
        _write_run(agent, run, load_safe(agent, device="cpu"), Task(trained_in, {}))
    return Path(path)


def _read_env_id(agent: Path) -> str:
    """Read the environment of a downloaded agent; its id is only looked up, and its settings are left out."""
    path = agent / RESULTS
    with translate_errors(f"{path} does not name the agent's environment"):
        results = read_json(path)
        env_id: str = results["env_id"]
        env_kwargs = results.get("env_kwargs")
        # Of games, ids are registered late.
        register_atari(env_id)

    if env_id not in gym.registry:
        raise ValueError(
            f"{path} names the environment {shown(env_id)}, which is not registered here; allowed are registered ids, "
            "without a module, so import the package of the environment first if you trust it"
        )
    # A file name or a command among them could do harm.
    if env_kwargs:
        warnings.warn(
            f"the agent was trained with env_kwargs={shown(env_kwargs)}, which are left out; check them and pass them to the "
            "environment yourself",
            stacklevel=3,
        )
    return env_id


def _write_run(agent: Path, run: Path, model: ShapedPolicyAlgorithm, task: Task) -> None:
    name = environment_name(task.env_id)
    normalization = open_document(agent)["vec_normalize"]
    (run / name).mkdir()

    # A pickle of our own making, which the zoo loads
    model.save(run / f"{name}.zip")

    if normalization is not None:
        # VecNormalize needs the spaces only; the stranger's environment is not made.
        env: gym.Env = gym.Env()
        env.observation_space = model.observation_space
        env.action_space = model.action_space
        venv = load_normalization(agent, DirectVecEnv([lambda: env]))
        venv.save(str(run / name / "vecnormalize.pkl"))

    # Without environments, the model does not know its statistics.
    document = describe(model, {})
    document["vec_normalize"] = normalization
    write_settings(run / name, document, task)
