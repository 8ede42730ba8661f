"""An agent as a folder, ready to be pushed: everything is made, and tried out, before anything goes online."""

import io
import os
import types
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.hub.card import Agent, model_card, own_objects, versions
from sb3_ano.hub.evaluation import Evaluation, Task, evaluate, evaluation_env, task_of
from sb3_ano.hub.folders import new_folder
from sb3_ano.hub.names import CARD, CURVE, FIXED_FILES, RESULTS, VIDEO, model_file
from sb3_ano.hub.safe_format import load_safe, require_algorithm, save_safe
from sb3_ano.hub.schedules import dotted_name
from sb3_ano.hub.video import RenderError, record
from sb3_ano.hub.zoo_files import as_json, copy_run, write_settings


def package(
    model: ShapedPolicyAlgorithm,
    path: str | os.PathLike[str],
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
    verbose: int = 1,
) -> Path:
    """Write what :func:`~sb3_ano.hub.push.push_to_hub` would push into a folder, to be looked at first.

    The agent is evaluated, recorded, saved in both formats, and loaded again from both; its actions must be the same. It is
    evaluated in the environment that it was trained in: if the id alone does not make it, because of wrappers or another
    time limit, pass an environment that is built in the same way as ``env``.

    :param model: the agent
    :param path: a new folder, an empty one, or one that this function wrote, which is replaced
    :param repo_id: the repository that the card names, ``"user/name"``
    :param env: environments to evaluate in, which are left normalized as they were, or the id of one; None makes
        one by the id of the model's environment
    :param env_id: the id for the card, if the environment does not know it
    :param env_kwargs: settings of the task, if the environment does not know them
    :param n_eval_episodes: episodes of the evaluation
    :param deterministic: whether the evaluation and the video take the mode of the policy instead of a sample
    :param seed: seed of the environments in both
    :param video: whether to record; ``"auto"`` continues without a video, and says why, if the environment does not render
    :param video_length: steps in the video
    :param run: folder of the training; its monitor files, ``progress.csv`` and ``evaluations.npz`` are published, and
        the ``config.yml`` that the RL Zoo wrote
    :param license: license of the agent, as the Hub writes it; None states none
    :param tags: further words to be found by
    :param include_optimizer: whether the safe format holds the optimizer's state, to continue the training
    :param verbose: 0 for no output, 1 for a line per step
    :return: the folder
    :raises FileExistsError: if anything else is at ``path``
    :raises TypeError: if the model is not an ANO, SPO or PAPO
    :raises ValueError: if an argument is not allowed, or the environment is not what the agent was trained in
    :raises RenderError: if the environment does not render, and ``video`` is True
    """
    require_algorithm(model)
    task = task_of(model, env, env_id, env_kwargs)
    given = None if isinstance(env, str) else env
    training = None if run is None else Path(run)
    if training is not None and not training.is_dir():
        raise ValueError(f"run={str(training)!r} is no folder; allowed is the folder of a training run")
    with new_folder(path, (*FIXED_FILES, model_file(model.algorithm, task.env_id))) as work:
        _say(verbose, f"saving the {model.algorithm} agent for {task.env_id}")
        _save(model, work, task, include_optimizer)
        with evaluation_env(model, given, task, seed) as venv:
            _say(verbose, f"evaluating it over {n_eval_episodes} episodes")
            evaluation = evaluate(model, venv, n_eval_episodes, deterministic=deterministic, seed=seed)
            _say(verbose, f"mean return {evaluation.mean:.2f} +/- {evaluation.std:.2f}")
            has_video = _record(model, venv, work / VIDEO, video, video_length, deterministic, seed, verbose)
        has_curve = training is not None and _draw_curve(training, work / CURVE, f"{model.algorithm} on {task.env_id}")
        write_settings(work, model, task)
        copy_run(work, training, task)
        (work / RESULTS).write_text(as_json(_results(evaluation, task)))
        agent = Agent(model, repo_id, task, evaluation, has_video, has_curve, license, tuple(tags))
        (work / CARD).write_text(str(model_card(agent)))
    return Path(path)


def _save(model: ShapedPolicyAlgorithm, work: Path, task: Task, include_optimizer: bool) -> None:
    """Save the model in both formats, and compare what each brings back with it."""
    save_safe(model, work, include_optimizer=include_optimizer)
    zip_file = work / model_file(model.algorithm, task.env_id)
    model.save(zip_file, exclude=["tensorboard_log"])  # a path on the author's machine
    _warn_of_code(model, zip_file.name)
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        statistics.save(str(work / "vec_normalize.pkl"))
    own: dict[str, Any] = {"shaping": model.shaping} if isinstance(model, ANO) else {}
    # The size of a rollout is the author's own, which load_safe would bound.
    safe = load_safe(work, device=model.device, custom_objects={"n_steps": model.n_steps, **own_objects(model)}, **own)
    _require_same_actions(model, safe, "safe format")
    _require_same_actions(model, type(model).load(zip_file, device=model.device, **own), zip_file.name)


def _require_same_actions(model: ShapedPolicyAlgorithm, loaded: ShapedPolicyAlgorithm, what: str) -> None:
    space = model.observation_space
    samples = [space.sample() for _ in range(32)]
    if isinstance(space, spaces.Dict):
        observations: Any = {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    else:
        observations = np.stack(samples)
    expected, found = (one.predict(observations, deterministic=True)[0] for one in (model, loaded))
    if not np.array_equal(expected, found):
        raise ValueError(f"the agent does not act as before once it is loaded from its {what}; nothing was written")


def _warn_of_code(model: ShapedPolicyAlgorithm, file_name: str) -> None:
    """Warn of functions and classes that SB3's file holds as code, because no module can be asked for them."""
    names: set[str] = set()

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented and isinstance(obj, types.FunctionType | type) and obj.__module__ != "builtins":
                names.add(dotted_name(obj))
            return reduced

    for name in vars(model).keys() - {*model._excluded_save_params(), "policy"}:
        Pickler(io.BytesIO()).dump(vars(model)[name])
    if names:
        warnings.warn(
            f"{file_name} holds the code of {', '.join(sorted(names))}, the path of its file and the values of the globals "
            "that it uses, because it cannot be imported by name; if any of this is private, move it to a module and train "
            "with what is imported from there",
            stacklevel=4,
        )


def _record(
    model: ShapedPolicyAlgorithm,
    venv: VecEnv,
    path: Path,
    video: bool | Literal["auto"],
    length: int,
    deterministic: bool,
    seed: int,
    verbose: int,
) -> bool:
    if not video:
        return False
    _say(verbose, f"recording {length} steps")
    try:
        record(model, venv, path, length, deterministic=deterministic, seed=seed)
    except RenderError as error:
        if video != "auto":
            raise
        _say(1, f"no video: the environment does not render: {error}")
        return False
    return True


def _draw_curve(run: Path, path: Path, title: str) -> bool:
    # Monitor files are read with pandas, which pushing alone does not need.
    from sb3_ano.zoo.curves import plot_learning_curve

    if not list(run.glob("*monitor.csv")):
        return False
    try:
        plot_learning_curve(run, path, title)
    except ValueError:  # no episode has ended, as in short trainings of Atari games
        return False
    return True


def _results(evaluation: Evaluation, task: Task) -> dict[str, Any]:
    """The zoo's keys, and what is needed to repeat the evaluation."""
    return {
        "mean_reward": evaluation.mean,
        "std_reward": evaluation.std,
        "is_deterministic": evaluation.deterministic,
        "n_eval_episodes": len(evaluation.returns),
        "eval_datetime": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": evaluation.seed,
        "episode_returns": evaluation.returns,
        "episode_lengths": evaluation.lengths,
        "env_id": task.env_id,
        "env_kwargs": task.env_kwargs,
        "versions": versions(task),
    }


def _say(verbose: int, line: str) -> None:
    if verbose >= 1:
        print(line, flush=True)
