"""Push an agent to the Hugging Face Hub."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.extras import missing_extra
from sb3_ano.hub.errors import explained
from sb3_ano.hub.names import CARD, is_own
from sb3_ano.hub.packaging import package
from sb3_ano.hub.safe_format import require_algorithm

try:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import validate_repo_id
except ImportError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error


def push_to_hub(
    model: ShapedPolicyAlgorithm,
    repo_id: str,
    env: str | gym.Env | VecEnv | None = None,
    *,
    env_id: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    seed: int = 0,
    video: bool | Literal["auto"] = "auto",
    video_length: int = 1000,
    run: str | os.PathLike[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    include_optimizer: bool = False,
    commit_message: str | None = None,
    private: bool = False,
    token: str | None = None,
    verbose: int = 1,
) -> str:
    """Evaluate an agent, record it, and put it on the Hub with a model card, all in one commit.

    A repository that exists is updated: files of an earlier push that this one does not have are removed, all others stay.
    The arguments up to ``include_optimizer`` are those of :func:`~sb3_ano.hub.packaging.package`, and

    :param repo_id: ``"user/name"``; the repository is made if it is not there
    :param commit_message: None says what was pushed
    :param private: whether a new repository is private
    :param token: of the Hub; None takes the one of ``hf auth login`` or of the variable ``HF_TOKEN``
    :return: the address of the agent's page
    :raises HubError: if the Hub, the connection or the disk refuses; nothing is left half done
    :raises TypeError: if the model is not an ANO, SPO or PAPO
    :raises ValueError: as for ``package``
    """
    require_algorithm(model)
    require_repo_id(repo_id)
    with explained(f"push to {repo_id}"):
        HfApi(token=token).whoami()  # before minutes go into evaluation and video
        with tempfile.TemporaryDirectory() as temporary:
            folder = package(
                model, Path(temporary) / "agent", repo_id, env,
                env_id=env_id, env_kwargs=env_kwargs, n_eval_episodes=n_eval_episodes, deterministic=deterministic, seed=seed,
                video=video, video_length=video_length, run=run, license=license, tags=tags,
                include_optimizer=include_optimizer, verbose=verbose,
            )  # fmt: skip
            if verbose >= 1:
                print(f"pushing it to {repo_id}", flush=True)
            return push_folder(
                folder, repo_id, commit_message=commit_message or f"{model.algorithm} agent", private=private, token=token
            )


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str = "Agent",
    private: bool = False,
    token: str | None = None,
) -> str:
    """Put a folder that :func:`~sb3_ano.hub.packaging.package` made on the Hub, in one commit.

    :param folder: the folder
    :param repo_id: ``"user/name"``; the repository is made if it is not there
    :param commit_message: what was done
    :param private: whether a new repository is private
    :param token: as for :func:`push_to_hub`
    :return: the address of the agent's page
    :raises HubError: if the Hub, the connection or the disk refuses; the repository is then as it was, or new and empty
    :raises ValueError: if the folder holds no model card
    """
    require_repo_id(repo_id)
    files = {path.name: path for path in sorted(Path(folder).iterdir()) if path.is_file()}
    if CARD not in files:
        raise ValueError(f"folder={str(folder)!r} holds no {CARD}; sb3_ano.hub.packaging.package makes a folder to push")
    api = HfApi(token=token)
    with explained(f"push to {repo_id}"):
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.model_info(repo_id)
        outdated = [file.rfilename for file in before.siblings or [] if is_own(file.rfilename) and file.rfilename not in files]
        # upload_folder would make several commits where hf_xet is installed.
        api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(name) for name in outdated),
                *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
            ],
            commit_message=commit_message,
            parent_commit=before.sha,
        )
    return str(url)


def require_repo_id(repo_id: str) -> None:
    """Complain of a name that the Hub would not take.

    :raises ValueError: if it is not of the form ``"user/name"``
    """
    with explained(f"use repo_id={repo_id!r}"):
        validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id={repo_id!r} is not allowed; allowed is 'user/name'")
