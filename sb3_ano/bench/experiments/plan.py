"""What is to be run: suite x algorithms x grid x seeds."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sb3_ano.bench.experiments.algorithms import NAMES, Algorithm, Value, algorithm, is_linear, number, replaced
from sb3_ano.bench.experiments.checks import hint
from sb3_ano.bench.experiments.suites import Evaluation, Suite, Task

#: The values that the paper searched, and the two learning rates of its robustness figure.
PAPER_VALUES: dict[str, tuple[float, ...]] = {
    "clip_range": (0.1, 0.2, 0.3),
    "learning_rate": (3e-4, 1e-3),
    "delta": (0.01, 0.02, 0.03),
    "omega": (0.001, 0.005, 0.01),
}
#: ``--grid paper``: each algorithm's own trust region.
PAPER_GRID = ("ppo.clip_range", "spo.clip_range", "ano.clip_range", "trpo.delta", "papo.omega")


@dataclass(frozen=True)
class Axis:
    """Values of one hyperparameter.

    :param name: of the hyperparameter
    :param values: to be tried
    :param only: name of the one algorithm that is meant, or None for all that have the hyperparameter
    """

    name: str
    values: tuple[Value, ...]
    only: str | None = None

    def concerns(self, one: Algorithm) -> bool:
        """Whether it varies the runs of an algorithm."""
        return self.only in (None, one.name) and one.canonical(self.name) in one.hyperparameters


@dataclass(frozen=True)
class Run:
    """One training.

    :param suite: name of the suite
    :param env_id: the task
    :param algorithm: label of the algorithm
    :param settings: the hyperparameters that tell it from other runs, as numbers
    :param seed: of model and environments
    :param total_timesteps: environment steps
    :param hyperparameters: all that the suite and the grid say
    :param env_kwargs: settings of the environments
    :param backend: of the environments
    :param evaluation: during training
    :param imports: modules that register environments
    """

    suite: str
    env_id: str
    algorithm: str
    settings: Mapping[str, Value] = field(hash=False)
    seed: int
    total_timesteps: int
    hyperparameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    env_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    backend: str = "auto"
    evaluation: Evaluation = field(default_factory=Evaluation)
    imports: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """Its name, for readers and as a folder."""
        settings = ",".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        name = f"{self.env_id}__{self.algorithm}__{settings}__seed{self.seed}"
        return name.replace("/", "-").replace(":", "-")

    def specification(self) -> dict[str, Any]:
        """Everything that its results depend on, as JSON has it."""
        return {
            "env_id": self.env_id,
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
            "seed": self.seed,
            "total_timesteps": self.total_timesteps,
            "hyperparameters": dict(self.hyperparameters),
            "env_kwargs": dict(self.env_kwargs),
            "backend": self.backend,
            "evaluation": asdict(self.evaluation),
            "imports": list(self.imports),
        }

    @classmethod
    def from_specification(cls, suite: str, specification: Mapping[str, Any]) -> "Run":
        """The opposite of :meth:`specification`."""
        evaluation, imports = Evaluation(**specification["evaluation"]), tuple(specification["imports"])
        return cls(**{**specification, "suite": suite, "evaluation": evaluation, "imports": imports})


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """The grid of the command line.

    :param texts: each ``[ALGORITHM.]NAME[=VALUE,VALUE...]``, or ``"paper"``; without values, the paper's
    :raises ValueError: if one is none of these
    """
    axes: list[Axis] = []
    for text in itertools.chain.from_iterable(PAPER_GRID if text == "paper" else [text] for text in texts):
        name, separator, values = text.partition("=")
        only, dot, rest = name.partition(".")
        if dot:
            name = rest
            if only not in NAMES:
                raise ValueError(f"grid {text!r}: unknown algorithm {only!r} (algorithms are {', '.join(NAMES)})")
        found = tuple(_value(one) for one in values.split(",")) if separator else PAPER_VALUES.get(name, ())
        if not name or not found or "" in found:
            raise ValueError(
                f"grid {text!r} is not allowed; allowed are NAME=VALUE,VALUE, ALGORITHM.NAME=VALUE,VALUE, 'paper', and "
                f"without values {', '.join(PAPER_VALUES)}"
            )
        axes.append(Axis(name, tuple(dict.fromkeys(found)), only if dot else None))
    return axes


def _value(text: str) -> Value:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_plan(
    suite: Suite, labels: Iterable[str], seeds: int, grid: Sequence[Axis] = (), total_timesteps: int | None = None
) -> list[Run]:
    """All runs, seed by seed, so that an interrupted comparison has whole seeds.

    :param suite: the tasks
    :param labels: of the algorithms
    :param seeds: number of seeds, from 0
    :param grid: hyperparameters that are varied; a combination that several axes give is there once
    :param total_timesteps: of each run, in place of the suite's
    :raises ValueError: for an unknown algorithm, or an axis that varies nothing
    """
    chosen = [algorithm(label) for label in dict.fromkeys(labels)]
    for axis in grid:
        if not any(axis.concerns(one) for one in chosen):
            known = sorted({name for one in chosen for name in one.hyperparameters})
            raise ValueError(
                f"grid: no algorithm of this plan ({', '.join(one.label for one in chosen)}) has the hyperparameter "
                f"{axis.name!r}" + (f" and is {axis.only!r}" if axis.only else hint(axis.name, known))
            )
    runs = [
        _run(suite, task, one, dict(values), seed, total_timesteps or task.total_timesteps)
        for seed in range(seeds)
        for task in suite.tasks
        for one in chosen
        for values in _combinations(one, grid)
    ]
    return list({run.run_id: run for run in runs}.values())


def _combinations(one: Algorithm, grid: Sequence[Axis]) -> Iterable[tuple[tuple[str, Value], ...]]:
    axes = [[(one.canonical(axis.name), value) for value in axis.values] for axis in grid if axis.concerns(one)]
    return itertools.product(*axes)


def _run(suite: Suite, task: Task, one: Algorithm, values: Mapping[str, Value], seed: int, total_timesteps: int) -> Run:
    hyperparameters = task.resolve(one)
    for name in one.settings:
        hyperparameters.setdefault(name, one.default(name))
    hyperparameters |= {name: replaced(hyperparameters.get(name), value) for name, value in values.items()}
    # One spelling of each schedule, because results made with "lin_3e-4" are those of "lin_0.0003".
    hyperparameters = {
        name: replaced(value, number(value)) if is_linear(value) else value for name, value in hyperparameters.items()
    }
    told = dict.fromkeys([*one.settings, *values])
    return Run(
        suite=suite.name,
        env_id=task.env_id,
        algorithm=one.label,
        settings={name: _number_or_itself(hyperparameters[name]) for name in told},
        seed=seed,
        total_timesteps=total_timesteps,
        hyperparameters=hyperparameters,
        env_kwargs=task.env_kwargs,
        backend=suite.backend,
        evaluation=suite.evaluation,
        imports=suite.imports,
    )


def _number_or_itself(value: Any) -> Value:
    found = number(value)
    return value if found is None else found
