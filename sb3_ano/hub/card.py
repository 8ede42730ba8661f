"""Write what a repository says about its agent: names of files, the model card, and the settings that the RL Zoo reads."""

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import gymnasium as gym
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sb3_ano._io import strict, write_file
from sb3_ano._registry import zoo_name
from sb3_ano._system import versions
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.hub.documents import Document
from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.recipe import Part, hyperparameters, import_path, is_plain, literal, without_paths
from sb3_ano.hub.safe_format import PACKAGES, SAFE_FILES

CARD = "README.md"
RESULTS = "results.json"
LOGS = "train_eval_metrics.zip"
STATISTICS = "vec_normalize.pkl"
VIDEO = "replay.mp4"
#: Names of files that do not depend on the agent. Together with the saved model, nothing else is read or written.
FIXED_FILES = (*SAFE_FILES, CARD, RESULTS, VIDEO, LOGS, STATISTICS, "args.yml", "config.yml", "env_kwargs.yml")
_REPOSITORY = "https://github.com/sb3-ano/sb3-ano"
_ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# Extra and package that contain environments, by the beginning of the environments' entry points.
_ENVIRONMENTS = {
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("zoo", "box2d"),
    "ale_py": ("atari", "ale-py"),
    "rl_zoo3": ("zoo", "rl_zoo3"),
}
# Environments of these packages are registered without an import, or by a script that nobody else has.
_SHIPPED = ("", "__main__", "gymnasium", "ale_py", "sb3_ano", "shimmy")


def environment_name(env_id: str) -> str:
    """Return the RL Zoo's name of an environment's files, which has no module and no slash.

    >>> environment_name("ALE/Pong-v5")
    'ALE-Pong-v5'
    """
    return env_id.rpartition(":")[2].replace("/", "-")


def model_file(algorithm: str, env_id: str) -> str:
    """Return the RL Zoo's name of a saved model.

    :param algorithm: name of the class
    :param env_id: id of the environment
    """
    return f"{zoo_name(algorithm)}-{environment_name(env_id)}.zip"


def model_card(
    model: ShapedPolicyAlgorithm,
    config: Document,
    parts: Sequence[Part],
    repo_id: str,
    task: Task,
    results: Document,
    has_video: bool,
    license: str | None,
    revision: str | None = None,
) -> ModelCard:
    """Fill in the card: metadata by which the Hub finds the agent, and how to install, run and judge it.

    :param model: agent
    :param config: settings of its training, from :func:`write_settings`
    :param parts: its parts that are not built in
    :param repo_id: repository, ``"user/name"``
    :param task: environment that it was trained in
    :param results: evaluation from :func:`~sb3_ano.hub.evaluation.evaluate`
    :param has_video: whether there is a video next to the card
    :param license: license of the agent, an SPDX identifier in lower case; None states none
    :param revision: branch of the agent; None is ``main``
    """
    name = type(model).__name__
    env_id = task.env_id
    metrics = []
    how = {
        "deterministic": results["is_deterministic"],
        "n_eval_episodes": results["n_eval_episodes"],
        "seed": results["seed"],
    }
    for key in ("mean_reward", "std_reward"):
        # The Hub rejects NaN and Inf.
        if not math.isfinite(results[key]):
            continue
        metric = EvalResult(
            task_type="reinforcement-learning",
            task_name="reinforcement-learning",
            dataset_type=env_id,
            dataset_name=env_id,
            metric_type=key,
            metric_name=key,
            metric_value=results[key],
            metric_args=how,
        )
        metrics.append(metric)

    # The Hub's search finds the agent by these.
    words = [env_id, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-ano", name.lower()]
    metadata = ModelCardData(
        # Metrics and a name go together.
        model_name=f"{name}-{env_id}" if metrics else None,
        library_name="stable-baselines3",
        pipeline_tag="reinforcement-learning",
        license=license,
        tags=words,
        eval_results=metrics or None,
    )
    page: ModelCard = ModelCard.from_template(
        metadata,
        str(_TEMPLATE),
        model=model,
        algorithm=name,
        repo_id=repo_id,
        task=task,
        results=results,
        video=VIDEO if has_video else None,
        repository=_REPOSITORY,
        install_line=install_line(task),
        branch=quote(revision or "main", safe=""),
        setup=_setup(task, parts),
        env_kwargs=literal(task.published_kwargs),
        load=_load_call(repo_id, revision, parts),
        brought=_brought(task, parts),
        stand_ins=[part for part in parts if part.is_stand_in],
        model_file=model_file(name, env_id),
        hyperparameters=json.dumps(strict(config), indent=2, allow_nan=False),
        versions=task_versions(task),
    )
    return page


def write_settings(folder: Path, document: Document, task: Task, device: str = "auto") -> Document:
    """Write ``config.yml``, ``args.yml`` and ``env_kwargs.yml``, as a training of the zoo would have left them.

    :param folder: directory to write to
    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param task: environment that it was trained in
    :param device: device of the training
    :return: content of ``config.yml``
    """
    settings = task.settings
    if "backend" not in settings and "NoFrameskip" in task.env_id:
        # As in the zoo's own files
        settings = {"env_wrapper": [_ATARI_WRAPPER], "frame_stack": 4, **settings}
    config = hyperparameters(document, settings, task.published_kwargs)

    # The zoo draws a seed for -1.
    seed = document["arguments"]["seed"]
    arguments = {
        "algo": zoo_name(document["algorithm"]),
        "device": device,
        "env": task.env_id,
        "env_kwargs": task.published_kwargs,
        "n_timesteps": config["n_timesteps"],
        "seed": -1 if seed is None else seed,
    }
    packages = _packages(task)
    if packages:
        arguments["gym_packages"] = packages

    comment = ""
    if task.additions:
        # A line break would end the comment.
        named = " ".join(", ".join(task.additions).split())
        described = "of these, this file has frame_stack, max_episode_steps and AtariWrapper at most"
        comment = f"# The environment had {named}; {described}.\n"
    write_file(folder / "config.yml", comment + _yaml(config))
    write_file(folder / "args.yml", _yaml(arguments))
    write_file(folder / "env_kwargs.yml", _yaml(task.published_kwargs))
    return config


class _Dumper(yaml.SafeDumper):
    """Write a value that occurs twice twice, and not as an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(content: Document) -> str:
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


def task_versions(task: Task) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that an agent and its task depend on."""
    # Of an environment that gymnasium has, its version is listed anyway.
    packages = [*PACKAGES, _package(task.env_id).partition(".")[0] or "gymnasium"]
    packages += [package for _, package in _requirements(task)]
    return {"python": platform.python_version(), **versions(packages)}


def install_line(task: Task) -> str:
    """Return the command that installs what the agent needs."""
    extras = ["hub"]
    for extra, _ in _requirements(task):
        extras.append(extra)
    # From the source, because there is no release.
    return f'pip install "sb3-ano[{",".join(extras)}] @ git+{_REPOSITORY}"'


def _load_call(repo_id: str, revision: str | None, parts: Sequence[Part]) -> str:
    """Write the call that loads the agent."""
    arguments = [repr(repo_id)]
    if revision is not None:
        arguments.append(f"revision={revision!r}")
    arguments.append("env=env")

    # A shape has an argument of its own.
    objects = []
    for part in parts:
        if part.name == "shaping":
            arguments.append(f"shaping={part.expression}")
        else:
            objects.append(f"{part.name!r}: {part.expression}")
    if objects:
        arguments.append(f"custom_objects={{{', '.join(objects)}}}")
    return f"load_from_hub({', '.join(arguments)})"


def _setup(task: Task, parts: Sequence[Part]) -> list[str]:
    """Write the lines that import the author's code, and register the environment if importing does not."""
    modules = set(_packages(task))
    for part in parts:
        if part.module is not None:
            modules.add(part.module)
    lines = [f"import {module}" for module in sorted(modules)]

    # An environment with additions is made by the reader.
    registration = ""
    if not task.additions:
        registration = _registration(task.env_id)
    if registration:
        lines += ["import gymnasium as gym", "", f"if {task.env_id!r} not in gym.registry:", f"    {registration}"]
    return lines


def _packages(task: Task) -> list[str]:
    """List the modules that register the environment; those that everybody has are left out."""
    # What the author has typed comes before a guess.
    if task.packages:
        return list(task.packages)
    package = _package(task.env_id)
    if package:
        return [package]
    return []


def _registration(env_id: str) -> str:
    """Write the call that registers an environment of the author's; empty if importing its package has to do."""
    spec = gym.registry.get(env_id)
    if not _package(env_id) or spec is None or spec.additional_wrappers or not is_plain(spec.kwargs):
        return ""

    # A class or a function stands for itself.
    entry_point = spec.entry_point
    if not isinstance(entry_point, str):
        path = import_path(entry_point)
        if path is None:
            return ""
        entry_point = ":".join(path)

    # The defaults of gym.register are left out.
    arguments = [repr(env_id), repr(entry_point)]
    if spec.max_episode_steps is not None:
        arguments.append(f"max_episode_steps={spec.max_episode_steps}")
    if spec.kwargs:
        arguments.append(f"kwargs={literal(without_paths(spec.kwargs, set()))}")
    return f"gym.register({', '.join(arguments)})"


def _brought(task: Task, parts: Sequence[Part]) -> list[tuple[str, str]]:
    """List what the reader has to bring before the card's code runs: what, and what it is for."""
    brought = []
    for module in _packages(task):
        if module != "rl_zoo3.import_envs":  # the extra installs it
            brought.append((f"import {module}", f"the module of the environment {task.env_id}"))

    for part in parts:
        if part.is_stand_in:
            continue
        if part.module is not None:
            brought.append((f"import {part.module}", f"the author's module with {part.shown}, for {part.name}"))
        else:
            owner = f"{part.shown} of the author's code, for {part.name}"
            brought.append((part.expression, f"{owner}, which cannot be imported by name: define it first"))

    for file in task.files:
        brought.append((f"./{file}", "the author's file, in the current directory"))
    return brought


def _entry_point(env_id: str) -> str:
    """Return where an environment is made, ``"module:class"``, or ``"module"`` for a function; empty if it is not known."""
    # EnvPool's ids of games are not registered.
    if atari_protocol(env_id) is not None:
        return "ale_py"

    spec = gym.registry.get(env_id.rpartition(":")[2])
    if spec is None or spec.entry_point is None:
        return ""
    if isinstance(spec.entry_point, str):
        return spec.entry_point
    return spec.entry_point.__module__


def _package(env_id: str) -> str:
    """Return the module that has an environment, which its import registers in most packages; or an empty string."""
    module = _entry_point(env_id).partition(":")[0]
    if module.partition(".")[0] in _SHIPPED:
        return ""
    return module


def _requirements(task: Task) -> list[tuple[str, str]]:
    """Return the extras, and the packages in them, that the task's environment needs."""
    entry_point = _entry_point(task.env_id)
    needed = []
    for start, requirement in _ENVIRONMENTS.items():
        if entry_point.startswith(start):
            needed.append(requirement)
    # Its environments have no entry point.
    if task.backend == "envpool":
        needed.append(("envpool", "envpool"))
    return needed
