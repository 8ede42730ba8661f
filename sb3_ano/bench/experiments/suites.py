"""Suites: which tasks are trained on, with which hyperparameters. All of them are YAML files of one format."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sb3_ano.bench.experiments.algorithms import NAMES, Algorithm, algorithm
from sb3_ano.bench.experiments.checks import as_mapping, as_strings, hint, require_known, require_whole, with_numbers
from sb3_ano.envs import BACKENDS
from sb3_ano.extras import missing_extra

try:
    import yaml
except ImportError as error:
    raise missing_extra("bench", "pyyaml") from error

FOLDER = Path(__file__).resolve().parents[1] / "suites"
_VERSION = re.compile(r"v\d+")


@dataclass(frozen=True)
class Evaluation:
    """When and how a policy is evaluated, with deterministic actions.

    :param points: so many times, evenly over the training, the last one at its end
    :param episodes: each time
    """

    points: int = 20
    episodes: int = 10

    def __post_init__(self) -> None:
        require_whole("evaluation: points", self.points)
        require_whole("evaluation: episodes", self.episodes)


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    :param env_id: its id
    :param total_timesteps: environment steps of a training
    :param hyperparameters: of all algorithms, as far as they have them
    :param algorithms: hyperparameters of single algorithms, by name
    :param env_kwargs: settings of the environments
    """

    env_id: str
    total_timesteps: int
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, of: Algorithm) -> dict[str, Any]:
        """Hyperparameters of one algorithm on this task."""
        shared = {name: value for name, value in self.hyperparameters.items() if name in of.hyperparameters}
        own = {of.canonical(name): value for name, value in self.algorithms.get(of.name, {}).items()}
        return {"policy": "MlpPolicy", "n_envs": 1, **shared, **own}


@dataclass(frozen=True)
class Suite:
    """Tasks that belong together.

    :param name: as in tables
    :param tasks: in the order of tables
    :param backend: of the environments, see :func:`sb3_ano.envs.make_vec_env`
    :param evaluation: during training
    :param imports: modules that register environments when they are imported
    :param steps_per_second: of each algorithm's trainings, by name, for estimates before anything has been run
    """

    name: str
    tasks: tuple[Task, ...]
    backend: str = "auto"
    evaluation: Evaluation = Evaluation()
    imports: tuple[str, ...] = ()
    steps_per_second: Mapping[str, float] = field(default_factory=dict)

    def with_version(self, version: str) -> "Suite":
        """The same tasks in another version.

        :param version: such as ``"v5"``
        :raises ValueError: if it is no version
        """
        if not _VERSION.fullmatch(version):
            raise ValueError(f"version={version!r} is not allowed; allowed are v and a number, such as v5")
        tasks = [dataclasses.replace(task, env_id=re.sub(r"v\d+$", version, task.env_id)) for task in self.tasks]
        return dataclasses.replace(self, tasks=tuple(tasks))

    def with_tasks(self, env_ids: Iterable[str]) -> "Suite":
        """Some of the tasks, in the order of the suite.

        :param env_ids: with or without their version
        :raises ValueError: for a task that is not in the suite
        """
        known = {name: task.env_id for task in self.tasks for name in (task.env_id, re.sub(r"-v\d+$", "", task.env_id))}
        wanted = set()
        for env_id in env_ids:
            if env_id not in known:
                raise ValueError(
                    f"suite {self.name!r} has no task {env_id!r}{hint(env_id, known)} "
                    f"(tasks are {', '.join(task.env_id for task in self.tasks)})"
                )
            wanted.add(known[env_id])
        return dataclasses.replace(self, tasks=tuple(task for task in self.tasks if task.env_id in wanted))


def suite_names() -> list[str]:
    """The suites that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yml"))


def load_suite(name: str, version: str | None = None) -> Suite:
    """A suite of the package, or of a file.

    :param name: such as ``"mujoco"``, ``"mujoco-v5"``, or the path of a YAML file
    :param version: of the tasks, such as ``"v5"``; None leaves them as they are
    :raises ValueError: if there is none, or the file is not as it should be
    :raises OSError: if the file cannot be read
    """
    if name.endswith((".yml", ".yaml")):
        suite = read_suite(Path(name))
    else:
        base, separator, ending = name.rpartition("-")
        if separator and _VERSION.fullmatch(ending) and version is None:
            name, version = base, ending
        if name not in suite_names():
            raise ValueError(
                f"unknown suite {name!r}{hint(name, suite_names())} (suites are {', '.join(suite_names())}, each also with "
                "a version, such as mujoco-v5, or a file that ends in .yml)"
            )
        suite = read_suite(FOLDER / f"{name}.yml")
    return suite if version is None else suite.with_version(version)


def read_suite(file: Path) -> Suite:
    """Read a suite from YAML; ``docs/experiments.md`` describes the format.

    :param file: its path
    :raises ValueError: naming the file and what is wrong in it
    :raises OSError: if it cannot be read
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    try:
        return _suite(as_mapping("the file", with_numbers(content)), file.stem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _suite(content: dict[str, Any], stem: str) -> Suite:
    fields = {one.name for one in dataclasses.fields(Suite)} | {"total_timesteps", "hyperparameters", "algorithms"}
    require_known("key", content, fields)
    for key in ("tasks", "total_timesteps"):
        if key not in content:
            raise ValueError(f"the key {key!r} is missing")
    tasks = content["tasks"] if isinstance(content["tasks"], dict) else dict.fromkeys(as_strings("tasks", content["tasks"]))
    if not tasks:
        raise ValueError("tasks is empty; allowed are one or more ids")
    backend = content.get("backend", BACKENDS[0])
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not allowed; allowed are {', '.join(BACKENDS)}")
    evaluation = as_mapping("evaluation", content.get("evaluation"))
    require_known("key of evaluation", evaluation, {one.name for one in dataclasses.fields(Evaluation)})
    speeds = as_mapping("steps_per_second", content.get("steps_per_second"))
    require_known("algorithm in steps_per_second", speeds, NAMES)
    for name, speed in speeds.items():
        if not isinstance(speed, int | float) or not 0.0 < speed < math.inf:
            raise ValueError(f"steps_per_second: {name}={speed!r} is not allowed; allowed are numbers above 0")
    return Suite(
        name=str(content.get("name", stem)),
        tasks=tuple(_task(str(env_id), as_mapping(str(env_id), task), content) for env_id, task in tasks.items()),
        backend=backend,
        evaluation=Evaluation(**evaluation),
        imports=tuple(as_strings("imports", content.get("imports", []))),
        steps_per_second=speeds,
    )


def _task(env_id: str, content: dict[str, Any], suite: dict[str, Any]) -> Task:
    require_known(f"key of {env_id}", content, {one.name for one in dataclasses.fields(Task)} - {"env_id"})
    steps = content.get("total_timesteps", suite["total_timesteps"])
    steps = int(steps) if isinstance(steps, float) and steps.is_integer() else steps  # 1e6
    require_whole("total_timesteps", steps)
    shared: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for level, where in ((suite, ""), (content, f" of {env_id}")):
        shared |= as_mapping(f"hyperparameters{where}", level.get("hyperparameters"))
        for name, values in as_mapping(f"algorithms{where}", level.get("algorithms")).items():
            own[name] = own.get(name, {}) | as_mapping(f"algorithms{where}: {name}", values)
    _check_hyperparameters(shared, own)
    return Task(env_id, steps, shared, own, as_mapping(f"env_kwargs of {env_id}", content.get("env_kwargs")))


def _check_hyperparameters(shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    require_known("algorithm", own, NAMES)
    everything = {name: algorithm(name) for name in NAMES}
    require_known("hyperparameter", shared, set().union(*(one.hyperparameters for one in everything.values())))
    for name, values in own.items():
        known = everything[name].hyperparameters
        require_known(f"hyperparameter of {name}", {everything[name].canonical(key): None for key in values}, known)
    for values in (shared, *own.values()):
        if "n_envs" in values:
            require_whole("n_envs", values["n_envs"])
        if not isinstance(values.get("normalize", False), bool | dict):
            raise ValueError(f"normalize={values['normalize']!r} is not allowed; allowed are true, false and a mapping")
        as_mapping("policy_kwargs", values.get("policy_kwargs"))
        if not isinstance(values.get("policy", ""), str):
            raise ValueError(f"policy={values['policy']!r} is not allowed; allowed is the name of a policy class")
