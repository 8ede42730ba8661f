"""Load an agent from the Hugging Face Hub."""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

import gymnasium as gym
import torch
from huggingface_hub import HfApi
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._io import read_json
from sb3_ano._registry import ALGORITHMS, zoo_name
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.algorithms.loading import read_saved_model
from sb3_ano.envs import DirectVecEnv, VecNormalize, register_atari
from sb3_ano.hub import repository
from sb3_ano.hub.card import write_settings
from sb3_ano.hub.documents import new_folder, shown, translate_errors
from sb3_ano.hub.evaluation import Task, quiet_about_batches
from sb3_ano.hub.safe_format import NORMALIZATION, SAFE_FILES, load_normalization, load_safe, open_document
from sb3_ano.hub.state import with_statistics
from sb3_ano.shaping import ShapingLike

#: Bytes that a download may have unless ``max_bytes`` allows more.
MAX_BYTES = 2 * 1024**3


class Source(TypedDict, total=False):
    """Options of every download.

    - ``revision``: branch, tag or commit; a commit is the only one that its author cannot change later
    - ``token``: token of the Hub, for private repositories; None takes the one of ``hf auth login`` or ``HF_TOKEN``
    - ``cache_dir``: directory of downloads; None is huggingface_hub's cache
    - ``max_bytes``: bytes that all files together may have, 2 GiB by default
    """

    revision: str | None
    token: str | None
    cache_dir: str | Path | None
    max_bytes: int


def load_from_hub(
    repo_id: str,
    env: str | gym.Env | VecEnv | None = None,
    *,
    filename: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "auto",
    shaping: ShapingLike | None = None,
    custom_objects: dict[str, Any] | None = None,
    **source: Unpack[Source],
) -> ShapedPolicyAlgorithm:
    """Load an agent that :func:`~sb3_ano.hub.push.push_to_hub` pushed.

    Nothing in the repository is run: the agent is read from JSON and safetensors. With ``trust_remote_code=True`` it is
    read from the file that SB3 saved, which is a pickle and can run any code its author chose.

    :param repo_id: repository, ``"user/name"``
    :param env: environments for the agent, or an id. They are normalized as in training, with statistics that no longer
        change, unless they have a VecNormalize with statistics of its own
    :param filename: name of the saved model, with ``trust_remote_code``, if the repository holds several
    :param trust_remote_code: whether to load SB3's file instead of the safe format
    :param device: device of the networks
    :param shaping: shaping function of an agent that was trained with one that is not built in
    :param custom_objects: classes and functions of the agent that are not SB3's or this package's, as for ``load_safe``
    :param source: ``revision``, ``token``, ``cache_dir`` and ``max_bytes``, see :class:`Source`
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds no agent that may be loaded, or the agent is damaged
    """
    load: Callable[..., ShapedPolicyAlgorithm] = _load_pickles if trust_remote_code else load_safe
    with quiet_about_batches(), _downloaded(repo_id, trust_remote_code, filename, **source) as agent:
        return load(agent, env, device=device, shaping=shaping, custom_objects=custom_objects)


def _load_pickles(agent: Path, env: Any, *, shaping: ShapingLike | None, **options: Any) -> ShapedPolicyAlgorithm:
    """Load SB3's files, which run what their author put in."""
    (saved,), statistics = agent.glob("*.zip"), agent / repository.STATISTICS
    entry = ALGORITHMS.get(zoo_name(str(read_saved_model(saved).attributes.get("algorithm"))))
    if entry is None:
        raise ValueError(f"{saved.name} was not saved by sb3_ano; load it with the class that saved it")
    if env is not None and statistics.exists():
        try:
            env = with_statistics(entry.algorithm._wrap_env(env), lambda venv: VecNormalize.load(str(statistics), venv))
        except AssertionError as error:  # SB3's check of the observations' shape
            raise ValueError(f"env does not fit the agent's statistics: {error}") from None
    if shaping is not None:
        options["shaping"] = shaping
    return entry.algorithm.load(saved, env, **options)


def download(repo_id: str, path: str | os.PathLike[str], **source: Unpack[Source]) -> Path:
    """Download the safe format of an agent, for :func:`~sb3_ano.hub.safe_format.load_safe`.

    :param repo_id: repository, ``"user/name"``
    :param path: new directory, empty directory, or directory that this function wrote, which is replaced; if the download
        fails, its content stays
    :param source: ``revision``, ``token``, ``cache_dir`` and ``max_bytes``, see :class:`Source`
    :return: the directory
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository does not hold the safe format
    """
    with repository.explained(f"download {repo_id}"), new_folder(path, (*SAFE_FILES, repository.RESULTS)) as work:
        _fetch(repo_id, work, **source)
    return Path(path)


@contextlib.contextmanager
def _downloaded(repo_id: str, trusted: bool = False, filename: str | None = None, **source: Unpack[Source]) -> Iterator[Path]:
    """Download an agent to a temporary directory, instead of which errors name the repository."""
    with tempfile.TemporaryDirectory() as temporary:
        _fetch(repo_id, Path(temporary), trusted, filename, **source)
        try:
            yield Path(temporary)
        except ValueError as error:
            if temporary not in str(error):
                raise
            raise type(error)(str(error).replace(temporary, repo_id)) from None


def _fetch(
    repo_id: str,
    folder: Path,
    trusted: bool = False,
    filename: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Download the files of an agent, all of one commit, whatever is pushed meanwhile."""
    repository.check_repo_id(repo_id)
    api = HfApi(token=token)
    with repository.explained(f"download {repo_id}"):
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    for name in _choose(repo_id, sizes.keys(), trusted, filename):
        doing = f"download {name} of {repo_id}"
        size = sizes.get(name, 0)  # the download itself fails if there is no such file
        if size is None:
            raise repository.HubError(f"cannot {doing}: the Hub does not say how large it is")
        if size > max_bytes:
            raise repository.HubError(f"cannot {doing}: it has {size:,} bytes; allowed are {max_bytes:,} more, see max_bytes=")
        max_bytes -= size
        with repository.explained(doing):
            cached = Path(api.hf_hub_download(repo_id, name, revision=info.sha, cache_dir=cache_dir))
            if (found := cached.stat().st_size) != size:
                raise repository.HubError(f"cannot {doing}: it has {found:,} bytes, not {size:,} as the Hub says")
            shutil.copyfile(cached, folder / name)  # the cache holds links, which the safe format rejects


def _choose(repo_id: str, names: Collection[str], trusted: bool, filename: str | None) -> list[str]:
    """Choose the files to download.

    The names in a repository come from strangers: they are compared with known ones, and never become paths.
    """
    if filename is not None and not repository.is_model_file(filename):
        raise ValueError(f"filename={filename!r} is not allowed; allowed is the name of a .zip at the top of the repository")
    if SAFE_FILES[0] in names and not trusted:
        return [name for name in (*SAFE_FILES, repository.RESULTS) if name in names]
    saved = sorted(filter(repository.is_model_file, names)) if filename is None else [filename]
    if not saved:
        raise ValueError(f"{repo_id} holds no agent: neither {SAFE_FILES[0]} nor a saved model (.zip)")
    if not trusted:
        raise ValueError(
            f"{repo_id} holds no safe format, only {saved[0]}, which is a pickle: loading it runs any code that its "
            "author put in. If you trust the author with your machine, pass trust_remote_code=True"
        )
    if len(saved) > 1:
        more = f" and {len(saved) - 5} more" if len(saved) > 5 else ""
        raise ValueError(f"{repo_id} holds several saved models, {', '.join(saved[:5])}{more}; choose one with filename=")
    return [*saved, *({repository.STATISTICS} & set(names))]


def download_run(
    repo_id: str,
    path: str | os.PathLike[str],
    *,
    env_id: str | None = None,
    trust_remote_code: bool = False,
    shaping: ShapingLike | None = None,
    custom_objects: dict[str, Any] | None = None,
    **source: Unpack[Source],
) -> Path:
    """Download an agent as the directory that the zoo's training would have left, for its ``enjoy`` and ``record_video``.

    Nothing in the repository is run, no environment is made, and none of its pickles or YAML files is used: model,
    statistics and settings are written from the safe format, which does not know the wrappers of the environment.

    :param repo_id: repository, ``"user/name"``
    :param path: directory of the run, such as ``logs/ano/CartPole-v1_1``, which must be new or empty
    :param env_id: environment that the agent must have been trained in; None allows any that is registered
    :param trust_remote_code: whether the run keeps the author's settings of the environment (``env_kwargs``), which ``enjoy``
        then passes to its constructor; otherwise they are left out, with a warning
    :param shaping: as for :func:`load_from_hub`
    :param custom_objects: as for :func:`load_from_hub`
    :param source: ``revision``, ``token``, ``cache_dir`` and ``max_bytes``, see :class:`Source`
    :return: the directory
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds no agent in the safe format, or the agent is damaged, or its environment is
        not registered or is not ``env_id``
    :raises FileExistsError: if ``path`` is not new or empty
    """
    with new_folder(path, ()) as run, _downloaded(repo_id, **source) as agent:
        task = _read_task(agent, env_id)
        if task.env_kwargs and not trust_remote_code:
            warnings.warn(
                f"the agent was trained with env_kwargs={shown(task.env_kwargs)}, which are left out; check them and pass "
                "them to the environment yourself, or keep them with trust_remote_code=True",
                stacklevel=2,
            )
            task = Task(task.env_id, {})
        model = load_safe(agent, device="cpu", shaping=shaping, custom_objects=custom_objects)
        _write_run(agent, run, model, task)
    return Path(path)


def _read_task(agent: Path, env_id: str | None) -> Task:
    """Read the environment of a downloaded agent; its id is only looked up, and its settings are a stranger's."""
    path = agent / repository.RESULTS
    with translate_errors(f"{path} does not name the agent's environment"):
        results = read_json(path)
        trained_in, env_kwargs = results["env_id"], dict(results.get("env_kwargs") or {})
        if not isinstance(trained_in, str):
            raise TypeError("env_id is not a string")
    register_atari(trained_in)
    if trained_in not in gym.registry:
        raise ValueError(
            f"{path} names the environment {shown(trained_in)}, which is not registered here; allowed are registered ids, "
            "without a module, so import the package of the environment first if you trust it"
        )
    if env_id not in (None, trained_in):
        raise ValueError(f"{agent} holds an agent for {trained_in}, not for {env_id}")
    return Task(trained_in, env_kwargs)


def _write_run(agent: Path, run: Path, model: ShapedPolicyAlgorithm, task: Task) -> None:
    name = repository.environment_name(task.env_id)
    settings = run / name
    settings.mkdir()
    space: gym.Env = gym.Env()  # it has the agent's spaces, and cannot be stepped
    space.observation_space, space.action_space = model.observation_space, model.action_space
    env: VecEnv = DirectVecEnv([lambda: space])
    if (agent / NORMALIZATION).exists():
        env = load_normalization(agent, env)
        env.save(str(settings / "vecnormalize.pkl"))
    model.n_envs = 1
    model.set_env(env)  # so that the settings contain the normalization
    model.n_envs = open_document(agent)["n_envs"]
    model.save(run / f"{name}.zip")
    write_settings(settings, model, task)
