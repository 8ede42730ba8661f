"""Suites of tasks. Their hyperparameters come from the zoo's files; a suite names tasks, steps and evaluation."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from sb3_ano._registry import ALGORITHMS
from sb3_ano.bench.algorithms import CLASSES, Algorithm, Settings, evaluated, parse_algorithm
from sb3_ano.cli import check_names, hint
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.zoo.hyperparameters import general_entry, hyperparameter_file

_DIRECTORY = Path(__file__).parent / "suites"
# File of the algorithms that have none, so that PPO and TRPO are compared at equal settings.
_SHARED_FILE = "ano"
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

    def of_algorithm(self, algorithm: Algorithm) -> Settings:
        """Return the changes for one algorithm; those for its options come after those for its name.

        :param algorithm: algorithm with its options
        """
        changes: dict[str, Settings] = {}
        for label, values in self.algorithms.items():
            # Options are in any order and spelling.
            changes[parse_algorithm(label).label] = values
        return {**changes.get(algorithm.name, {}), **changes.get(algorithm.label, {})}


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
    def _named_tasks(cls, tasks: object) -> object:
        """Take a list of names, and names without settings."""
        if isinstance(tasks, list) and all(isinstance(task, str) for task in tasks):
            tasks = dict.fromkeys(tasks)
        # YAML has None for a name without settings.
        if isinstance(tasks, dict):
            tasks = {name: settings or {} for name, settings in tasks.items()}
        return tasks

    def model_post_init(self, context: object) -> None:
        """Check the names that pydantic does not know.

        :param context: context of the validation, unused
        :raises ValueError: for an unknown algorithm or hyperparameter
        """
        # A hyperparameter that one algorithm has may be given for all.
        known = set()
        for name in CLASSES:
            known |= Algorithm(name).hyperparameters

        for settings in (self, *self.tasks.values()):
            check_names("hyperparameter", settings.hyperparameters, known)
            for label, values in settings.algorithms.items():
                check_names(
                    f"hyperparameter of {label}",
                    values,
                    parse_algorithm(label).hyperparameters,
                )

    def select(self, env_ids: Sequence[str]) -> "Suite":
        """Return the suite with some of its tasks.

        :param env_ids: environment ids, with their version, or without it for all versions
        :raises ValueError: for a task that is not in the suite
        """
        known = set(self.tasks)
        for task in self.tasks:
            known.add(_VERSION.sub("", task))
        check_names(f"task of suite {self.name!r}:", env_ids, known)

        selected = {}
        for task, settings in self.tasks.items():
            if task in env_ids or _VERSION.sub("", task) in env_ids:
                selected[task] = settings
        return self.model_copy(update={"tasks": selected})

    def resolve(
        self,
        env_id: str,
        algorithm: Algorithm,
    ) -> dict[str, Any]:
        """Return all settings of one algorithm on one task.

        :param env_id: task of the suite
        :param algorithm: algorithm to train, with its options
        :return: ``hyperparameters``, ``env_kwargs``, ``backend``, ``total_timesteps``, ``evaluation``
        :raises ValueError: if the zoo's file asks for what experiments do not support, or the number of steps is unknown
        """
        task = self.tasks[env_id]

        # The task's own length comes before the suite's, and that before the zoo's.
        entry, is_atari = zoo_settings(algorithm.name, env_id)
        steps = task.total_timesteps or self.total_timesteps or entry.get("n_timesteps")
        if steps is None:
            raise ValueError(f"suite {self.name!r}: total_timesteps of {env_id} is missing")

        # Left out in silence, they would make another task.
        unsupported = [key for key in _UNSUPPORTED if entry.get(key) is not None]
        if unsupported:
            raise ValueError(f"{env_id} needs {', '.join(unsupported)} of the zoo's file, which experiments do not support")

        # From the most general settings to the most special ones. An algorithm takes those that it has.
        shared = {**entry, **self.hyperparameters, **task.hyperparameters}
        known = algorithm.hyperparameters
        hyperparameters: dict[str, Any] = {"policy": "MlpPolicy", "n_envs": 1}
        for name, value in shared.items():
            if name in known:
                hyperparameters[name] = value
        hyperparameters |= self.of_algorithm(algorithm)
        hyperparameters |= task.of_algorithm(algorithm)

        # Python as text, as the zoo's files have it
        if isinstance(hyperparameters.get("normalize"), str):
            hyperparameters["normalize"] = evaluated(hyperparameters["normalize"])
        # What the user typed comes last.
        hyperparameters |= dict(algorithm.options)

        env_kwargs = dict(entry.get("env_kwargs") or {})
        env_kwargs |= self.env_kwargs
        env_kwargs |= task.env_kwargs

        evaluation = self.evaluation.model_dump()
        if evaluation["deterministic"] is None:
            # As in the RL Zoo and in CleanRL.
            evaluation["deterministic"] = not is_atari
        return {
            "hyperparameters": hyperparameters,
            "env_kwargs": env_kwargs,
            "backend": self.backend or entry.get("backend") or "auto",
            "total_timesteps": int(steps),
            "evaluation": evaluation,
        }


def zoo_settings(algorithm: str, env_id: str) -> tuple[Settings, bool]:
    """Look up a task in the zoo's file, as the zoo does; also return whether the task is an Atari game.

    :param algorithm: name of the algorithm; one without a file, or whose file lacks the task, takes ANO's settings
    :param env_id: id of the task
    """
    # Tasks that the algorithm's own file lacks are ANO's.
    content = dict(_zoo_file(_SHARED_FILE))
    if algorithm in ALGORITHMS:
        content |= _zoo_file(algorithm)

    is_atari = env_id not in content and atari_protocol(env_id) is not None
    general = general_entry(content, env_id, is_atari)
    settings = dict(content.get(env_id) or content.get(general) or {})

    if is_atari:
        # The protocol has both.
        settings |= {"env_wrapper": None, "frame_stack": None}

    # Policies with an LSTM have the name of the same policy without one.
    recurrent = str(settings.get("policy")).replace("Policy", "LstmPolicy")
    if recurrent in CLASSES[algorithm].policy_aliases:
        settings["policy"] = recurrent
    return settings, is_atari


# A plan reads them for each of its runs.
@functools.cache
def _zoo_file(algorithm: str) -> dict[str, Settings]:
    return yaml.safe_load(hyperparameter_file(algorithm).read_bytes())


def load_suite(name: str) -> Suite:
    """Read a suite of this package, or one from a file.

    :param name: ``"mujoco"``, ``"atari"``, ``"classic"``, one of these with a version such as ``"mujoco-v5"``, or a YAML file
    :raises ValueError: if there is no such suite, or the file is invalid
    """
    version = _VERSION.search(name)
    path = _DIRECTORY / f"{_VERSION.sub('', name)}.yml"

    # A file of the user's, whose name may end like a version
    if not path.is_file():
        version = None
        path = Path(name)
    if not path.is_file():
        suites = sorted(file.stem for file in _DIRECTORY.glob("*.yml"))
        raise ValueError(f"unknown suite {name!r}{hint(name, suites)} (allowed are {', '.join(suites)}, and YAML files)")

    try:
        content = yaml.safe_load(path.read_bytes())
        suite = Suite.model_validate({"name": name if version else path.stem} | content)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{path} is not a suite in YAML: {error}") from error

    # The suites of this package have one version of each task.
    if version is None:
        return suite
    tasks = {}
    for task, settings in suite.tasks.items():
        tasks[_VERSION.sub(version[0], task)] = settings
    return suite.model_copy(update={"tasks": tasks})


def describe(error: ValidationError) -> str:
    """Return the errors of a validation in one line, each with its place.

    :param error: error of pydantic
    """
    messages = []
    for part in error.errors():
        place = ".".join(map(str, part["loc"]))
        messages.append(f"{place} {part['msg']}".strip())
    return "; ".join(messages)
