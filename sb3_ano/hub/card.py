"""Write what a repository says about its agent: names of files, the model card, and the settings that the RL Zoo reads."""

import json
import platform
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sb3_ano._io import versions, write_file
from sb3_ano._registry import zoo_name
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.hub.codec import dotted_name, is_built_in, readable
from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.safe_format import PACKAGES, SAFE_FILES

CARD, RESULTS, LOGS, STATISTICS = "README.md", "results.json", "train_eval_metrics.zip", "vec_normalize.pkl"
VIDEO = "replay.mp4"
#: Names of files that do not depend on the agent. Together with the saved model, nothing else is read or written.
FIXED_FILES = (*SAFE_FILES, CARD, RESULTS, VIDEO, LOGS, STATISTICS, "args.yml", "config.yml", "env_kwargs.yml")
_REPOSITORY = "https://github.com/sb3-ano/sb3-ano"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# Extra and package that contain environments, by the beginning of the environments' entry points.
_ENVIRONMENTS = {
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("zoo", "box2d"),
    "ale_py": ("atari", "ale-py"),
    "rl_zoo3": ("zoo", "rl_zoo3"),
}
# Environments of these packages are registered without an import, or by a script that nobody else has.
_SHIPPED = ("", "__main__", "gymnasium", "ale_py", "shimmy")
_ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
# Arguments that say how and where a model runs, not what it learns from.
_NOT_HYPERPARAMETERS = ("stats_window_size", "verbose", "seed", "torch_compile")
# Arguments of VecNormalize that the RL Zoo writes.
_NORMALIZATION = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


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
    document: dict[str, Any],
    objects: dict[str, Any],
    repo_id: str,
    task: Task,
    results: dict[str, Any],
    has_video: bool,
    license: str | None,
) -> ModelCard:
    """Fill in the card: metadata by which the Hub finds the agent, and how to install, run and judge it.

    :param model: agent
    :param document: its description from :func:`~sb3_ano.hub.safe_format.describe`
    :param objects: its parts that only the reader can supply, by dotted name
    :param repo_id: repository, ``"user/name"``
    :param task: environment that it was trained in
    :param results: evaluation from :func:`~sb3_ano.hub.evaluation.evaluate`
    :param has_video: whether there is a video next to the card
    :param license: license of the agent, an SPDX identifier in lower case; None states none
    """
    name, env_id = model.algorithm, task.env_id
    words = [env_id, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-ano", name.lower()]
    evaluation: dict[str, Any] = {"task_type": "reinforcement-learning", "task_name": "reinforcement-learning"}
    evaluation |= {"dataset_type": env_id, "dataset_name": env_id}
    arguments = {"deterministic": results["is_deterministic"], **{key: results[key] for key in ("n_eval_episodes", "seed")}}
    metrics = [
        EvalResult(**evaluation, metric_type=key, metric_name=key, metric_value=results[key], metric_args=arguments)
        for key in ("mean_reward", "std_reward")
    ]
    metadata = ModelCardData(
        model_name=f"{name}-{env_id}",
        library_name="stable-baselines3",
        pipeline_tag="reinforcement-learning",
        license=license,
        tags=words,
        eval_results=metrics,
    )
    return ModelCard.from_template(
        metadata,
        str(_TEMPLATE),
        model=model,
        repo_id=repo_id,
        task=task,
        results=results,
        video=VIDEO if has_video else None,
        repository=_REPOSITORY,
        install_line=install_line(task),
        package=_package(env_id),
        custom=_custom_parts(document, objects),
        model_file=model_file(name, env_id),
        hyperparameters=json.dumps(hyperparameters(document), indent=2),
        versions=task_versions(task),
    )


def hyperparameters(document: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the algorithm, the number of environments, and how they were normalized.

    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :return: numbers, names, and lists and dictionaries of those
    """
    settings = {name: document[name] for name in ("policy", "n_envs")} | {"n_timesteps": document["progress"]["num_timesteps"]}
    settings |= {name: value for name, value in document["arguments"].items() if name not in _NOT_HYPERPARAMETERS}
    if document["shaping"] is not None:
        settings["shaping"] = document["shaping"]["name"]
    stored = document["vec_normalize"]
    settings["normalize"] = {name: stored[name] for name in _NORMALIZATION} if stored else False
    return readable(settings)


def write_settings(folder: Path, document: dict[str, Any], task: Task) -> None:
    """Write ``config.yml``, ``args.yml`` and ``env_kwargs.yml``, as a training of the zoo would have left them.

    :param folder: directory to write to
    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param task: environment that it was trained in
    """
    atari = {"env_wrapper": [_ATARI_WRAPPER], "frame_stack": 4} if "NoFrameskip" in task.env_id else {}
    seed, settings = document["arguments"]["seed"], hyperparameters(document)
    arguments = {
        "algo": zoo_name(document["algorithm"]),
        "env": task.env_id,
        "env_kwargs": task.env_kwargs,
        "n_timesteps": settings["n_timesteps"],
        "seed": -1 if seed is None else seed,
    }
    contents = {"config": settings | atari, "args": arguments, "env_kwargs": task.env_kwargs}
    for name, content in contents.items():
        write_file(folder / f"{name}.yml", yaml.safe_dump(content, sort_keys=False))


def task_versions(task: Task) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that an agent and its task depend on."""
    packages = [*PACKAGES, _package(task.env_id) or "gymnasium", *(package for _, package in _requirements(task))]
    return {"python": platform.python_version(), **versions(packages)}


def install_line(task: Task) -> str:
    """Return the command that installs what the agent needs."""
    extras = ["hub", *(extra for extra, _ in _requirements(task))]
    return f'pip install "sb3-ano[{",".join(extras)}] @ git+{_REPOSITORY}"'


def _custom_parts(document: dict[str, Any], objects: dict[str, Any]) -> dict[str, str]:
    """Return the arguments that a reader has to pass to ``load_from_hub``, and their values in words."""
    parts = {}
    if document["shaping"] and not is_built_in(names := document["shaping"]["name"]):
        parts["shaping"] = names if isinstance(names, str) else ", ".join(names)
    if objects:
        parts["custom_objects"] = str({name: dotted_name(value) for name, value in objects.items()})
    return parts


def _entry_point(env_id: str) -> str:
    """Return where an environment is made, ``"module:class"``, or ``"module"`` for a function; empty if it is not known."""
    if atari_protocol(env_id) is not None:
        return "ale_py"
    spec = gym.registry.get(env_id.rpartition(":")[2])
    entry_point = "" if spec is None else spec.entry_point or ""
    return entry_point if isinstance(entry_point, str) else entry_point.__module__


def _package(env_id: str) -> str:
    """Return what has to be imported to register an environment, a package or a function's module; or an empty string."""
    module, _, name = _entry_point(env_id).partition(":")
    package = module.partition(".")[0]
    if package in _SHIPPED:
        return ""
    return package if name else module


def _requirements(task: Task) -> list[tuple[str, str]]:
    """Return the extras, and the packages in them, that the task's environment needs."""
    entry_point = _entry_point(task.env_id)
    needed = [requirement for start, requirement in _ENVIRONMENTS.items() if entry_point.startswith(start)]
    return [*needed, ("envpool", "envpool")] if task.backend == "envpool" else needed
