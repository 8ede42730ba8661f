"""Evaluate, record and describe an agent, and push it to the Hugging Face Hub.

Everything is made, and tried out, in a directory before anything goes online.
"""

import dataclasses
import io
import math
import os
import tempfile
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._io import strict, write_file, write_json
from sb3_ano._registry import ALGORITHMS
from sb3_ano._secrets import hide, is_surely_secret, remember
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.hub import card
from sb3_ano.hub.connection import require_no_secrets, safe_errors, without_login
from sb3_ano.hub.documents import Document, new_folder, one_line
from sb3_ano.hub.evaluation import Task, evaluate, loaded_agent, task_of
from sb3_ano.hub.recipe import custom_parts, without_machine
from sb3_ano.hub.safe_format import DOCUMENT, SAFE_FILES, describe, require_algorithm, save_safe
from sb3_ano.hub.video import record

_LOGS = ("*monitor.csv", "progress.csv", "evaluations.npz")
# Names of files that package wrote, and may replace.
_OWN = (*card.FIXED_FILES, *(f"{name}-*.zip" for name in ALGORITHMS))


def package(
    model: ShapedPolicyAlgorithm,
    path: str | os.PathLike[str],
    repo_id: str,
    env: gym.Env | VecEnv | None = None,
    *,
    revision: str | None = None,
    env_id: str | None = None,
    env_kwargs: Document | None = None,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    seed: int = 0,
    video: bool = True,
    video_length: int = 1000,
    run: str | os.PathLike[str] | None = None,
    license: str | None = None,
    verbose: int = 1,
) -> Path:
    """Write the files that :func:`push_to_hub` would push into a directory, to look at them first.

    The agent is saved in both formats, loaded from the safe one, evaluated and recorded. It is evaluated in the environment
    that it was trained in: if the id alone does not make it, because of wrappers or another time limit, pass an environment
    that is built in the same way as ``env``.

    :param model: agent
    :param path: new directory, empty directory, or directory that this function wrote, which is replaced
    :param repo_id: repository that the card names, ``"user/name"``
    :param env: environments to evaluate in, which are left normalized as they were; None makes one by the id of the model's
        environment
    :param revision: branch that the card names; None is ``main``
    :param env_id: id for the card, if the environment does not know it
    :param env_kwargs: settings of the task, if the environment does not know them
    :param n_eval_episodes: number of episodes of the evaluation
    :param deterministic: whether the evaluation and the video take the mode of the policy instead of a sample
    :param seed: seed of the environments of the evaluation and the video
    :param video: whether to record; if the environment does not render, this is printed, and there is no video
    :param video_length: number of steps in the video
    :param run: directory of the training. Its monitor files, ``progress.csv`` and ``evaluations.npz`` are published, and the
        ``config.yml`` that the RL Zoo wrote
    :param license: license of the agent, as the Hub writes it; None states none
    :param verbose: 0 for no output, 1 for one line per step
    :return: the directory
    :raises OSError: if ``path`` holds anything else, or ``run`` is not a directory
    :raises TypeError: if the model is not an algorithm of this package, or its settings cannot be written as JSON
    :raises ValueError: if an argument is invalid, or the environment is not what the agent was trained in
    """
    require_algorithm(model)
    task = task_of(model, env, env_id, env_kwargs)
    files = []
    if run is not None:
        files = sorted(Path(run).iterdir())
    task = dataclasses.replace(task, packages=_packages_of_run(files, task))
    for name, value in task.env_kwargs.items():
        # So that no file has a password of the environment.
        kind = ""
        if is_surely_secret(name):
            kind = name
        remember(value, kind)

    objects: Document = {}
    document = describe(model, objects)
    parts = custom_parts(document, objects)

    # Only next to our card are archives and settings ours: a user's own files may have such names.
    replaced: tuple[str, ...] = SAFE_FILES
    if (Path(path) / card.CARD).is_file() and (Path(path) / DOCUMENT).is_file():
        replaced = _OWN

    with new_folder(path, replaced) as work:
        save_safe(model, work)
        _save_for_sb3(model, work, task)

        # As a reader would: what is published is what was evaluated.
        with loaded_agent(model, objects, work, env, task, seed) as agent:
            _say(verbose, f"evaluating the {type(model).__name__} agent for {task.env_id} over {n_eval_episodes} episodes")
            results = evaluate(agent, n_eval_episodes, deterministic=deterministic, seed=seed)
            _say(verbose, f"mean return {results['mean_reward']:.2f} +/- {results['std_reward']:.2f}")
            if video:
                _record(agent, work / card.VIDEO, video_length, deterministic, seed)

        config = card.write_settings(work, document, task, model.device.type)
        _copy_run(files, work, task)
        _write_results(work / card.RESULTS, results, task)
        has_video = (work / card.VIDEO).exists()
        page = card.model_card(model, config, parts, repo_id, task, results, has_video, license, revision)
        write_file(work / card.CARD, str(page))
    return Path(path)


def _write_results(path: Path, results: Document, task: Task) -> None:
    """Write the evaluation as JSON, which has no NaN and no infinity: they become their names in settings, and else null."""
    content: Document = strict(results, named=False)
    if not math.isfinite(results["mean_reward"]):
        warnings.warn(
            f"the mean return is {results['mean_reward']}; results.json has null in its place, and the Hub lists no result",
            stacklevel=4,
        )

    # What download_run reads, and what a reader compares
    content["env_id"] = task.env_id
    content["env_kwargs"] = strict(task.published_kwargs)
    content["versions"] = card.task_versions(task)
    write_json(path, content)


class _Anonymous(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickle functions that cannot be imported by name without the path of the file that defines them."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, types.FunctionType):
            # What cloudpickle notes of a function's module, which has the path in __file__.
            noted = {}
            for name in ("__package__", "__name__"):
                if name in obj.__globals__:
                    noted[name] = obj.__globals__[name]
            self.globals_ref.setdefault(id(obj.__globals__), noted)

        # Tracebacks would show the path.
        elif isinstance(obj, types.CodeType):
            return self.dispatch_table[types.CodeType](obj.replace(co_filename=f"<{obj.co_name}>"))
        return super().reducer_override(obj)


def _anonymous_pickle(value: object, protocol: int | None = None, buffer_callback: object = None) -> bytes:
    """Do what ``cloudpickle.dumps`` does, without paths of this machine."""
    with io.BytesIO() as file:
        _Anonymous(file, protocol=protocol, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()


def _save_for_sb3(model: ShapedPolicyAlgorithm, work: Path, task: Task) -> None:
    """Save a model with its statistics in SB3's formats, and warn of code in it."""
    name = card.model_file(type(model).__name__, task.env_id)
    # SB3 calls it when it saves.
    with mock.patch.object(cloudpickle, "dumps", _anonymous_pickle):
        # A path on the author's machine, and what its Monitor has logged of the last episodes.
        model.save(work / name, exclude=["tensorboard_log", "ep_info_buffer", "ep_success_buffer"])

    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        statistics.save(str(work / card.STATISTICS))

    # cloudpickle writes the code of what it cannot import by name.
    code = []
    for part in sorted(vars(model).keys() - {*model._excluded_save_params(), "policy"}):
        content = cloudpickle.dumps(vars(model)[part])
        if b"_make_function" in content or b"_make_skeleton_class" in content:
            code.append(part)

    if code:
        warnings.warn(
            f"{name} holds the code of {', '.join(code)} and the values of the globals that it uses, because it cannot be "
            "imported by name; if any of this is private, move it to a module",
            stacklevel=3,
        )


def _record(agent: ShapedPolicyAlgorithm, path: Path, length: int, deterministic: bool, seed: int) -> None:
    try:
        record(agent, path, length, deterministic=deterministic, seed=seed)
    except Exception as error:  # graphics drivers and their bindings raise errors of any class
        # A video that was begun
        path.unlink(missing_ok=True)
        print(f"no video: the environment does not render: {one_line(error)}")


def _say(verbose: int, line: str) -> None:
    # At once, because what follows takes minutes.
    if verbose >= 1:
        print(hide(line), flush=True)


def _copy_run(files: list[Path], work: Path, task: Task) -> None:
    """Archive the logs of the training, without which the zoo loads no agent, and copy the zoo's hyperparameters.

    The zoo's ``args.yml`` and other files of the run are left out, because they hold paths of the author's machine.
    """
    with zipfile.ZipFile(work / card.LOGS, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            # Nothing else of the directory is published.
            if any(map(file.match, _LOGS)):
                archive.write(file, file.name)

    config = _zoo_file(files, task, "config.yml")
    if config is not None:
        write_file(work / "config.yml", without_machine(config.read_text()))


def _zoo_file(files: list[Path], task: Task, name: str) -> Path | None:
    """Return a file of settings that the zoo wrote into a run, or None."""
    for directory in files:
        is_settings = directory.name == card.environment_name(task.env_id)
        if is_settings and (directory / name).is_file():
            return directory / name
    return None


def _packages_of_run(files: list[Path], task: Task) -> tuple[str, ...]:
    """Return the packages that registered the environment in a training of the zoo."""
    arguments = _zoo_file(files, task, "args.yml")
    if arguments is None:
        return ()
    # The author's own. The zoo writes an ordered dictionary into it, which a plain loader rejects.
    packages = []
    for name in yaml.unsafe_load(arguments.read_text()).get("gym_packages") or ():
        # It becomes an import in the card.
        if isinstance(name, str) and all(map(str.isidentifier, name.split("."))):
            packages.append(name)
    return tuple(packages)


def push_to_hub(
    model: ShapedPolicyAlgorithm,
    repo_id: str,
    env: gym.Env | VecEnv | None = None,
    *,
    revision: str | None = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    env_id: str | None = None,
    env_kwargs: Document | None = None,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    seed: int = 0,
    video: bool = True,
    video_length: int = 1000,
    run: str | os.PathLike[str] | None = None,
    license: str | None = None,
    verbose: int = 1,
) -> str:
    """Evaluate an agent, record it, and push it to the Hub with a model card, in one commit.

    An existing repository is updated: files of an earlier push that this one does not have are removed, all others stay.
    The arguments from ``env_id`` on are those of :func:`package`.

    :param model: agent
    :param repo_id: repository, ``"user/name"``, which is created first if it does not exist
    :param env: as for :func:`package`
    :param revision: branch to push to, which is created if it does not exist; None pushes to ``main``
    :param commit_message: message of the commit; None names the algorithm
    :param private: whether a new repository is private; None takes the default of its owner, which is public unless an
        organization has set another
    :param token: token of the Hub; None takes the one of ``hf auth login`` or of the variable ``HF_TOKEN``
    :return: address of the agent's page
    :raises TypeError: if the model is not an algorithm of this package
    :raises ValueError: as for :func:`package`
    :raises OSError: huggingface_hub's errors, if the Hub or the connection fails; the repository is then as it was, or new
        and empty
    """
    require_algorithm(model)
    api = HfApi(token=token)
    with safe_errors(token):
        url = api.create_repo(repo_id, private=private, exist_ok=True)  # before minutes are spent on evaluation and video
    repo_id = url.repo_id  # with the user's name
    message = commit_message or f"{type(model).__name__} agent"

    with tempfile.TemporaryDirectory() as temporary:
        folder = package(
            model,
            Path(temporary) / "agent",
            repo_id,
            env,
            revision=revision,
            env_id=env_id,
            env_kwargs=env_kwargs,
            n_eval_episodes=n_eval_episodes,
            deterministic=deterministic,
            seed=seed,
            video=video,
            video_length=video_length,
            run=run,
            license=license,
            verbose=verbose,
        )

        # Nothing has gone online so far.
        require_no_secrets(folder)
        with safe_errors(token):
            _commit(api, repo_id, folder, revision, hide(message))

    page = without_login(str(url))
    if revision is not None:
        # The name of a branch may have slashes.
        page += f"/tree/{quote(revision, safe='')}"
    return page


def _commit(api: HfApi, repo_id: str, folder: Path, revision: str | None, message: str) -> None:
    """Replace the files of an earlier push with those of a directory, in one commit."""
    # Pull requests exist already.
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)

    before = api.model_info(repo_id, revision=revision)
    files = {path.name: path for path in sorted(folder.iterdir())}
    former = {file.rfilename for file in before.siblings or []}.intersection(card.FIXED_FILES)

    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    # A video or statistics of another agent
    for name in sorted(former - files.keys()):
        operations.append(CommitOperationDelete(name))
    for name, path in files.items():
        operations.append(CommitOperationAdd(name, str(path)))

    # upload_folder would make several commits if hf_xet is installed.
    api.create_commit(repo_id, operations, commit_message=message, revision=revision, parent_commit=before.sha)
