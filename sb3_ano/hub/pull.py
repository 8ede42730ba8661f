"""Load an agent from the Hugging Face Hub."""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_ano.algorithms import ANO, PAPO, SPO, ShapedPolicyAlgorithm
from sb3_ano.algorithms.saving import read_saved_model
from sb3_ano.envs import make_env, register_atari
from sb3_ano.extras import missing_extra
from sb3_ano.hub.documents import MAX_DOCUMENT_BYTES, shown, size_of
from sb3_ano.hub.errors import HubError, explained
from sb3_ano.hub.folders import new_folder
from sb3_ano.hub.names import RESULTS, is_model_file
from sb3_ano.hub.push import require_repo_id
from sb3_ano.hub.safe_format import SAFE_FILES, load_safe
from sb3_ano.shaping import ShapingLike

try:
    from huggingface_hub import HfApi
except ImportError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error

_ALGORITHMS: dict[str, type[ShapedPolicyAlgorithm]] = {"ANO": ANO, "SPO": SPO, "PAPO": PAPO}
#: Bytes that a download may have unless more is asked for.
MAX_BYTES = 2 * 1024**3


class Repository:
    """One revision of a repository, from which files are taken by name.

    :param repo_id: ``"user/name"``
    :param revision: branch, tag or commit; None is the newest state
    :param token: of the Hub
    :param cache_dir: where downloads are kept; None is huggingface_hub's cache
    :param max_bytes: bytes that all files together may have
    :raises HubError: if it cannot be reached
    """

    def __init__(
        self, repo_id: str, revision: str | None, token: str | None, cache_dir: str | None, max_bytes: int = MAX_BYTES
    ) -> None:
        require_repo_id(repo_id)
        self.repo_id = repo_id
        self._cache_dir = cache_dir
        self._bytes_left = max_bytes
        self._api = HfApi(token=token)
        with explained(f"download {repo_id}"):
            info = self._api.model_info(repo_id, revision=revision, files_metadata=True)
        #: All files are those of one commit, whatever is pushed meanwhile.
        self.commit = info.sha
        #: Names come from strangers: they are compared with known ones, and never become paths.
        self.sizes = {file.rfilename: file.size for file in info.siblings or []}

    def copy(self, name: str, folder: Path) -> Path:
        """Download a file into a folder.

        :param name: of a file at the top of the repository
        :param folder: where to
        :raises HubError: if it is not there, is larger than allowed, or cannot be downloaded or written
        """
        doing = f"download {name} of {self.repo_id}"
        size = self.sizes.get(name, 0)  # the download itself fails if there is no such file
        if size is None:
            raise HubError(f"cannot {doing}: the Hub does not say how large it is")
        if size > self._bytes_left:
            raise HubError(f"cannot {doing}: it has {size:,} bytes; allowed are {self._bytes_left:,} more, see max_bytes=")
        self._bytes_left -= size
        with explained(doing):
            cached = self._api.hf_hub_download(self.repo_id, name, revision=self.commit, cache_dir=self._cache_dir)
            if os.path.getsize(cached) != size:
                raise HubError(f"cannot {doing}: it has {os.path.getsize(cached):,} bytes, not {size:,} as the Hub says")
            # The cache links to its blobs; a model is only loaded from files that are its own.
            return Path(shutil.copyfile(cached, folder / name))

    def model_file(self) -> str | None:
        """The only saved model at the top of the repository; None without one.

        :raises ValueError: if there are several
        """
        found = sorted(filter(is_model_file, self.sizes))
        if len(found) > 1:
            raise ValueError(f"{self.repo_id} holds several saved models, {_some(found)}; choose one with filename=")
        return found[0] if found else None


def _some(names: list[str]) -> str:
    """The first names, because a repository may hold hundreds."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_from_hub(
    repo_id: str,
    env: str | gym.Env | VecEnv | None = None,
    *,
    revision: str | None = None,
    filename: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "auto",
    shaping: ShapingLike | None = None,
    custom_objects: dict[str, Any] | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> ShapedPolicyAlgorithm:
    """Load an agent that was pushed by :func:`~sb3_ano.hub.push.push_to_hub`.

    Nothing in the repository is run: the agent is read from JSON and safetensors. With ``trust_remote_code=True`` it is
    read from the file that SB3 saved, which is a pickle and can run any code its author chose.

    :param repo_id: ``"user/name"``
    :param env: environments for the agent, or an id; they are normalised as in training, with statistics that no longer change
    :param revision: branch, tag or commit; a commit is the one thing that its author cannot change later
    :param filename: of the saved model, with ``trust_remote_code``, where the repository holds several
    :param trust_remote_code: load SB3's file instead of the safe format
    :param device: for the networks
    :param shaping: the shaping function, for an agent that was trained with one that is not built in
    :param custom_objects: classes and functions of the agent that are not SB3's or this package's, as for ``load_safe``
    :param token: of the Hub, for private repositories; None takes the one of ``hf auth login`` or ``HF_TOKEN``
    :param cache_dir: where downloads are kept; None is huggingface_hub's cache
    :param max_bytes: bytes that all files together may have
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds nothing that may be loaded, or it is not sound
    """
    repository = Repository(repo_id, revision, token, None if cache_dir is None else str(cache_dir), max_bytes)
    with tempfile.TemporaryDirectory() as temporary, quiet_about_batches():
        folder = Path(temporary)
        if trust_remote_code:
            return _load_zip(repository, folder, filename, env, device, shaping, custom_objects)
        _copy_safe_files(repository, folder)
        try:
            return load_safe(folder, env, device=device, shaping=shaping, custom_objects=custom_objects)
        except ValueError as error:  # it names a folder that will be gone
            raise type(error)(str(error).replace(temporary, repo_id)) from None


@contextlib.contextmanager
def quiet_about_batches() -> Iterator[None]:
    """Minibatches of odd sizes, because there are fewer environments than in training, do not matter for acting."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
        yield


def download(
    repo_id: str,
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download the safe format of an agent, for :func:`~sb3_ano.hub.safe_format.load_safe`.

    :param repo_id: ``"user/name"``
    :param path: where to: a new folder, an empty one, or one that this function wrote, which is replaced; if the
        download fails, what was there stays
    :param revision: branch, tag or commit
    :param token: of the Hub, for private repositories
    :param cache_dir: where downloads are kept; None is huggingface_hub's cache
    :param max_bytes: bytes that all files together may have
    :return: the folder
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds no safe format
    """
    repository = Repository(repo_id, revision, token, None if cache_dir is None else str(cache_dir), max_bytes)
    with explained(f"download {repo_id}"), new_folder(path, (*SAFE_FILES, RESULTS)) as work:
        _copy_safe_files(repository, work)
    return Path(path)


def _copy_safe_files(repository: Repository, folder: Path) -> None:
    """Download the files of the safe format, and the small one that names the environment.

    :raises ValueError: if the repository has none
    """
    if SAFE_FILES[0] not in repository.sizes:
        saved = repository.model_file()
        if saved is None:
            raise ValueError(f"{repository.repo_id} holds no agent: neither {SAFE_FILES[0]} nor a saved model (.zip)")
        raise ValueError(
            f"{repository.repo_id} holds no safe format, only {saved}, which is a pickle: loading it runs any code that its "
            "author put in. If you trust the author with your machine, pass trust_remote_code=True"
        )
    for name in (*SAFE_FILES, RESULTS):
        if name in repository.sizes:
            repository.copy(name, folder)


def _load_zip(
    repository: Repository,
    folder: Path,
    filename: str | None,
    env: str | gym.Env | VecEnv | None,
    device: torch.device | str,
    shaping: ShapingLike | None,
    custom_objects: dict[str, Any] | None,
) -> ShapedPolicyAlgorithm:
    """Load SB3's file, which runs what its author put in."""
    if filename is not None and not is_model_file(filename):
        raise ValueError(f"filename={filename!r} is not allowed; allowed is the name of a .zip at the top of the repository")
    name = filename or repository.model_file()
    if name is None:
        raise ValueError(f"{repository.repo_id} holds no saved model (.zip)")
    if isinstance(env, str):
        env = make_env(env)
    path = repository.copy(name, folder)
    algorithm = read_saved_model(path).attributes.get("algorithm")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{name} of {repository.repo_id} was not saved by sb3_ano; load it with the class that saved it")
    if env is not None and "vec_normalize.pkl" in repository.sizes:
        env = _normalised(_ALGORITHMS[algorithm], env, repository.copy("vec_normalize.pkl", folder))
    arguments: dict[str, Any] = {} if shaping is None else {"shaping": shaping}
    return _ALGORITHMS[algorithm].load(path, env, device=device, custom_objects=custom_objects, **arguments)


def _normalised(algorithm: type[ShapedPolicyAlgorithm], env: gym.Env | VecEnv, statistics: Path) -> VecEnv:
    venv = algorithm._wrap_env(env)
    if unwrap_vec_normalize(venv) is not None:
        return venv
    normalised = VecNormalize.load(str(statistics), venv)
    normalised.training = False
    normalised.norm_reward = False
    return normalised


def read_task(folder: Path) -> tuple[str, dict[str, Any]]:
    """Read what ``results.json`` says of the environment that a downloaded agent was trained in.

    The environment is not made: the id is only looked up, and the settings are for the caller to judge.

    :return: an id that is registered here, and settings
    :raises ValueError: if the file does not name such an environment
    """
    path = folder / RESULTS
    try:
        if size_of(path) > MAX_DOCUMENT_BYTES:
            raise ValueError
        content = json.loads(path.read_bytes())
        env_id, env_kwargs = content["env_id"], content.get("env_kwargs") or {}
        if not isinstance(env_id, str) or not isinstance(env_kwargs, dict):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} does not name the agent's environment") from error
    register_atari(env_id)
    if env_id not in gym.registry:
        raise ValueError(
            f"{path} names the environment {shown(env_id)}, which is not registered here; allowed are registered ids, "
            "without a module, so import the package of the environment first if you trust it"
        )
    return env_id, env_kwargs
