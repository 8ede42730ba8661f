"""Suites of tasks. Their hyperparameters come from the zoo's files; a suite names tasks, steps and evaluation."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from sb3_ano._registry import ALGORITHMS
from sb3_ano.bench.algorithms import CLASSES, Algorithm, evaluated, parse_algorithm
from sb3_ano.cli import check_names, hint
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.zoo.hyperparameters import hyperparameter_file

_DIRECTORY = Path(__file__).parent / "suites"
#: File whose settings are shared by the algorithms without a file, so that PPO and TRPO are compared at equal settings.
SHARED_FILE = "ano"
# Keys of the zoo's files that experiments do not know.
_UNSUPPORTED = ("callback", "monitor_kwargs", "vec_env_wrapper")
_VERSION = re.compile(r"-v\d+$")


class Evaluation(BaseModel, extra="forbid", frozen=True):
    """Specify when and how policies are evaluated.

    :param points: number of evaluations, evenly spaced over the training, the last one at its end
    :param episodes: episodes per evaluation
    :param deterministic: whether actions are the mode of the policy; None: True for all tasks but Atari games
    """

    points: int = Field(20, ge=1, le=10_000)
    episodes: int = Field(10, ge=1, le=10_000)
    deterministic: bool | None = None


class Task(BaseModel, extra="forbid", frozen=True):
    """Specify the settings of a task, or those that all tasks of a suite share.

    :param total_timesteps: environment steps of a training; None takes ``n_timesteps`` of the zoo's file
    :param hyperparameters: changes for all algorithms that have the hyperparameter
    :param algorithms: changes for single algorithms, by name, or by name and options as in ``ano:shaping=ppo``
    :param env_kwargs: settings of the environments
    """

    total_timesteps: int | None = Field(None, ge=1)
    hyperparameters: dict[str, Any] = {}
    algorithms: dict[str, dict[str, Any]] = {}
    env_kwargs: dict[str, Any] = {}


class Suite(Task, frozen=True):
    """Group tasks that are trained together.

    :param name: name of the suite
    :param tasks: settings of each task by environment id
    :param evaluation: evaluation during training
    :param backend: backend of the environments, see :func:`sb3_ano.envs.make_vec_env`; None takes that of the zoo's file
    :param imports: modules that register environments
    """

    name: str
    tasks: dict[str, Task] = Field(min_length=1)
    evaluation: Evaluation = Field(default_factory=lambda: Evaluation.model_validate({}))
    backend: str | None = None
    imports: list[str] = []

    @field_validator("tasks", mode="before")
    @classmethod
    def _named_tasks(cls, tasks: Any) -> Any:
        tasks = dict.fromkeys(tasks) if isinstance(tasks, list) and all(isinstance(task, str) for task in tasks) else tasks
        return {name: settings or {} for name, settings in tasks.items()} if isinstance(tasks, dict) else tasks

    def model_post_init(self, context: Any) -> None:
        """Check the names that pydantic does not know.

        :param context: context of the validation, unused
        :raises ValueError: for an unknown algorithm or hyperparameter
        """
        known = set().union(*(Algorithm(name).hyperparameters for name in CLASSES))
        for settings in (self, *self.tasks.values()):
            check_names("hyperparameter", settings.hyperparameters, known)
            for label, values in settings.algorithms.items():
                check_names(f"hyperparameter of {label}", values, parse_algorithm(label).hyperparameters)

    def select(self, env_ids: Sequence[str]) -> "Suite":
        """Return the suite with some of its tasks.

        :param env_ids: environment ids, with their version, or without it for all versions
        :raises ValueError: for a task that is not in the suite
        """
        names = {task: {task, _VERSION.sub("", task)} for task in self.tasks}
        check_names(f"task of suite {self.name!r}:", env_ids, set().union(*names.values()))
        wanted = {task: settings for task, settings in self.tasks.items() if not names[task].isdisjoint(env_ids)}
        return self.model_copy(update={"tasks": wanted})

    def resolve(self, env_id: str, algorithm: Algorithm) -> dict[str, Any]:
        """Return all settings of one algorithm on one task.

        :param env_id: task of the suite
        :param algorithm: algorithm to train, with its options
        :return: ``hyperparameters``, ``env_kwargs``, ``backend``, ``total_timesteps``, ``evaluation``
        :raises ValueError: if the zoo's file asks for what experiments do not support, or the number of steps is unknown
        """
        task = self.tasks[env_id]
        entry, is_atari = zoo_settings(algorithm.name, env_id)
        steps = task.total_timesteps or self.total_timesteps or entry.get("n_timesteps")
        if steps is None:
            raise ValueError(f"suite {self.name!r}: total_timesteps of {env_id} is missing")
        if unsupported := [key for key in _UNSUPPORTED if entry.get(key) is not None]:
            raise ValueError(f"{env_id} needs {', '.join(unsupported)} of the zoo's file, which experiments do not support")
        shared = {**entry, **self.hyperparameters, **task.hyperparameters}
        known = algorithm.hyperparameters
        hyperparameters = {name: value for name, value in shared.items() if name in known}
        for settings in (self, task):
            own = {parse_algorithm(label).label: values for label, values in settings.algorithms.items()}
            hyperparameters |= own.get(algorithm.name, {}) | own.get(algorithm.label, {})
        if isinstance(hyperparameters.get("normalize"), str):
            hyperparameters["normalize"] = evaluated(hyperparameters["normalize"])
        evaluation = self.evaluation.model_dump()
        if evaluation["deterministic"] is None:
            evaluation["deterministic"] = not is_atari
        return {
            "hyperparameters": {"policy": "MlpPolicy", "n_envs": 1, **hyperparameters, **dict(algorithm.options)},
            "env_kwargs": {**(entry.get("env_kwargs") or {}), **self.env_kwargs, **task.env_kwargs},
            "backend": self.backend or entry.get("backend") or "auto",
            "total_timesteps": int(steps),
            "evaluation": evaluation,
        }


def zoo_settings(algorithm: str, env_id: str) -> tuple[dict[str, Any], bool]:
    """Look up a task in the zoo's file, as the zoo does; also return whether the task is an Atari game.

    :param algorithm: name of the algorithm; one without a file, or whose file lacks the task, takes ANO's settings
    :param env_id: id of the task
    """
    content = _zoo_file(SHARED_FILE) | (_zoo_file(algorithm) if algorithm in ALGORITHMS else {})
    is_atari = env_id not in content and atari_protocol(env_id) is not None
    settings = dict(content.get(env_id) or content.get("atari" if is_atari else "default") or {})
    settings |= dict.fromkeys(("env_wrapper", "frame_stack") if is_atari else ())  # the protocol has them
    recurrent = str(settings.get("policy")).replace("Policy", "LstmPolicy")
    return settings | ({"policy": recurrent} if recurrent in CLASSES[algorithm].policy_aliases else {}), is_atari


@functools.cache
def _zoo_file(algorithm: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(hyperparameter_file(algorithm).read_bytes())


def load_suite(name: str) -> Suite:
    """Read a suite of this package, or one from a file.

    :param name: ``"mujoco"``, ``"atari"``, ``"classic"``, one of these with a version such as ``"mujoco-v5"``, or a YAML file
    :raises ValueError: if there is no such suite, or the file is invalid
    """
    path, version = _DIRECTORY / f"{_VERSION.sub('', name)}.yml", _VERSION.search(name)
    if not path.is_file():
        path, version = Path(name), None
    if not path.is_file():
        suites = sorted(file.stem for file in _DIRECTORY.glob("*.yml"))
        raise ValueError(f"unknown suite {name!r}{hint(name, suites)} (allowed are {', '.join(suites)}, and YAML files)")
    try:
        content = yaml.safe_load(path.read_bytes())
        suite = Suite.model_validate({"name": name if version else path.stem} | content)
    except ValidationError as error:
        messages = [f"{'.'.join(map(str, part['loc']))} {part['msg']}".strip() for part in error.errors()]
        raise ValueError(f"{path}: {'; '.join(messages)}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{path} is not a suite in YAML: {error}") from error
    tasks = {_VERSION.sub(version[0], task) if version else task: settings for task, settings in suite.tasks.items()}
    return suite.model_copy(update={"tasks": tasks})
