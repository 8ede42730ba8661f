"""The runs of an experiment: suite x algorithms x seeds x grid."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sb3_ano.bench.algorithms import Algorithm, Settings, canonical, parse_algorithm, parse_value, replaced
from sb3_ano.bench.suites import Suite
from sb3_ano.cli import check_names

#: The paper's search, for the grid ``paper``. Its delta is the ``target_kl`` of sb3-contrib's TRPO.
PAPER_GRID = (
    "ppo.clip_range=0.1,0.2,0.3",
    "spo.clip_range=0.1,0.2,0.3",
    "ano.clip_range=0.1,0.2,0.3",
    "trpo.target_kl=0.01,0.02,0.03",
    "papo.omega=0.001,0.005,0.01",
)
_IDENTITY_LETTERS = 10


@dataclass(frozen=True)
class Run:
    """Specify one training.

    :param suite: name of the suite
    :param env_id: id of the task
    :param algorithm: label of the algorithm, with its options
    :param seed: seed of model and environments
    :param total_timesteps: environment steps
    :param hyperparameters: all hyperparameters, those of environments and policy included
    :param evaluation: fields of :class:`~sb3_ano.bench.suites.Evaluation`
    :param env_kwargs: settings of the environments
    :param backend: backend of the environments, as requested
    :param imports: modules that register environments
    :param changed: hyperparameters that the grid set to another value than the suite's, and ``total_timesteps`` likewise
    """

    suite: str
    env_id: str
    algorithm: str
    seed: int
    total_timesteps: int
    hyperparameters: Settings = field(hash=False)
    evaluation: Settings = field(hash=False)
    env_kwargs: Settings = field(default_factory=dict, hash=False)
    backend: str = "auto"
    imports: tuple[str, ...] = ()
    changed: Settings = field(default_factory=dict, hash=False)

    @functools.cached_property
    def identity(self) -> str:
        """Return the hash of all settings that results depend on, except the seed.

        Hyperparameters at the constructor's defaults are left out. A run is therefore the same if a default is named, or if an
        algorithm gets a new argument.
        """
        algorithm = Algorithm(self.algorithm.partition(":")[0])
        hyperparameters = {}

        for name, value in self.hyperparameters.items():
            default = algorithm.default(name)
            # These two have no default of a constructor.
            if name in ("policy", "n_envs") or canonical(value) != canonical(default):
                hyperparameters[name] = value

        # Circumstances are left out: suite, seed, imports and changed.
        specification = {
            "env_id": self.env_id,
            "algorithm": algorithm.name,
            "total_timesteps": self.total_timesteps,
            "hyperparameters": hyperparameters,
            "evaluation": self.evaluation,
            "env_kwargs": self.env_kwargs,
            "backend": self.backend,
        }
        try:
            text = json.dumps(canonical(specification), sort_keys=True)
        except TypeError as error:
            raise ValueError(
                f"suite {self.suite!r} has a value for {self.env_id} that JSON lacks: {error}; "
                "write it as a number, a text, a list or a mapping"
            ) from error

        return hashlib.sha256(text.encode()).hexdigest()[:_IDENTITY_LETTERS]

    @property
    def name(self) -> str:
        """Return the name of the run's directory: task, algorithm, identity and seed."""
        name = f"{self.env_id}__{self.algorithm.partition(':')[0]}__{self.identity}__seed{self.seed}"
        # File systems and locales differ in what they take for other letters.
        return re.sub(r"[^\w.+-]", "-", name, flags=re.ASCII)


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """Parse the grid of the command line.

    :param texts: each ``[ALGORITHM.]NAME=VALUE,VALUE...`` or ``"paper"``
    :return: values by ``NAME`` or ``ALGORITHM.NAME``
    :raises ValueError: for any other text
    """
    axes: list[str] = []
    for text in texts:
        if text == "paper":
            axes += PAPER_GRID
        else:
            axes.append(text)

    grid = {}
    for text in axes:
        name, _, listed = text.partition("=")
        if name in grid:
            raise ValueError(f"grid has {name!r} twice; give all of its values at once")
        # Values that are given twice are one.
        values = dict.fromkeys(map(parse_value, listed.split(",")))
        if "" in values:
            raise ValueError(f"grid {text!r} is not allowed; allowed are [ALGORITHM.]NAME=VALUE,VALUE and paper")
        grid[name] = tuple(values)

    return grid


def parse_seeds(text: str) -> list[int]:
    """Parse ``"5"`` (seeds 0 to 4), ``"3-5"`` (3, 4, 5) or ``"0,3-5"``.

    :param text: value of ``--seeds``
    :raises ValueError: for any other text
    """
    parts = text.split(",")
    # A number alone is a count.
    if re.fullmatch(r"\d{1,6}", text):
        parts = [f"0-{int(text) - 1}"]
    seeds: list[int] = []

    for part in parts:
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        span = range(0)

        if match:
            first = int(match[1])
            last = int(match[2] or first)
            span = range(first, last + 1)

        # Also for ranges that end before they begin
        if not span:
            raise ValueError(f"seeds={text!r} is not allowed; allowed are a number such as 5, ranges such as 3-5, and 0,3-5")
        seeds += span

    return list(dict.fromkeys(seeds))


def make_plan(
    suite: Suite,
    labels: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[object]] | None = None,
    total_timesteps: int | None = None,
) -> list[Run]:
    """Return all runs, seed by seed, so that an interrupted experiment has complete seeds.

    :param suite: tasks and their settings
    :param labels: labels of the algorithms
    :param seeds: seeds of every configuration
    :param grid: values of hyperparameters to vary, see :func:`parse_grid`; equal configurations are trained once
    :param total_timesteps: environment steps of each run instead of the suite's
    :raises ValueError: for an unknown algorithm, or a hyperparameter that no algorithm of the plan has
    """
    grid = grid or {}
    # A label that is given twice is one.
    algorithms = [parse_algorithm(label) for label in dict.fromkeys(labels)]
    axes = [_axes(algorithm, grid) for algorithm in algorithms]
    _require_used(grid, algorithms)

    runs: dict[str, Run] = {}
    varied_algorithms = list(zip(algorithms, axes, strict=True))

    # Seeds are the outermost loop.
    for seed, env_id, (algorithm, varied) in itertools.product(seeds, suite.tasks, varied_algorithms):
        for values in itertools.product(*varied.values()):
            changes = dict(zip(varied, values, strict=True))
            run = _make_run(suite, env_id, algorithm, seed, total_timesteps, changes)
            # Another value of the grid, or another label, can be the same configuration.
            runs.setdefault(run.name, run)

    return list(runs.values())


def _axes(algorithm: Algorithm, grid: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
    """Return the part of a grid that concerns an algorithm, by hyperparameter."""
    axes = {}
    for key, values in grid.items():
        # A name without an algorithm concerns all that have it.
        name = key.removeprefix(f"{algorithm.name}.")
        if name in algorithm.hyperparameters:
            axes[name] = values

    return axes


def _require_used(grid: Mapping[str, Sequence[object]], algorithms: Sequence[Algorithm]) -> None:
    """Reject hyperparameters of a grid that no algorithm has."""
    known = set()
    allowed = set()

    for algorithm in algorithms:
        names = algorithm.hyperparameters
        known |= names
        allowed |= names | {f"{algorithm.name}.{name}" for name in names}

    # The paper's grid is for five algorithms, not all of which need to be in a plan.
    paper = parse_grid(["paper"])
    unknown = [name for name in grid if name not in allowed and grid[name] != paper.get(name)]
    check_names("hyperparameter of this plan", unknown, known)


def _make_run(
    suite: Suite,
    env_id: str,
    algorithm: Algorithm,
    seed: int,
    total_timesteps: int | None,
    changes: Settings,
) -> Run:
    settings = suite.resolve(env_id, algorithm)
    hyperparameters = settings["hyperparameters"]
    changed = {}

    for name, value in changes.items():
        # A value that equals the suite's or the default is no change, however it is written.
        before = hyperparameters.get(name, algorithm.default(name))
        hyperparameters[name] = replaced(before, value)
        if canonical(hyperparameters[name]) != canonical(before):
            changed[name] = hyperparameters[name]

    # Reports do not compare runs of different length.
    if total_timesteps is not None and total_timesteps != settings["total_timesteps"]:
        settings["total_timesteps"] = total_timesteps
        changed["total_timesteps"] = total_timesteps

    return Run(
        suite=suite.name,
        env_id=env_id,
        algorithm=algorithm.label,
        seed=seed,
        imports=tuple(suite.imports),
        changed=changed,
        **settings,
    )
