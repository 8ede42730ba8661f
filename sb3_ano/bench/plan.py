"""The runs of an experiment: suite x algorithms x seeds x grid."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sb3_ano.bench.algorithms import Algorithm, number, parse_algorithm, parse_value, replaced
from sb3_ano.bench.suites import Suite
from sb3_ano.cli import check_names

#: The paper's search, for the grid ``paper``. Its delta is the ``target_kl`` of sb3-contrib's TRPO.
PAPER_GRID = (
    *(f"{name}.clip_range=0.1,0.2,0.3" for name in ("ppo", "spo", "ano")),
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
    hyperparameters: Mapping[str, Any] = field(hash=False)
    evaluation: Mapping[str, Any] = field(hash=False)
    env_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    backend: str = "auto"
    imports: tuple[str, ...] = ()
    changed: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @functools.cached_property
    def identity(self) -> str:
        """Return the hash of all settings that results depend on, except the seed.

        Hyperparameters at the constructor's defaults are left out. A run is therefore the same if a default is named, or if an
        algorithm gets a new argument.
        """
        algorithm = Algorithm(self.algorithm.partition(":")[0])
        specification = dataclasses.asdict(self) | {"algorithm": algorithm.name}
        for circumstance in ("suite", "seed", "imports", "changed"):
            del specification[circumstance]
        for name, value in self.hyperparameters.items():
            if name not in ("policy", "n_envs") and _canonical(value) == _canonical(algorithm.default(name)):
                del specification["hyperparameters"][name]
        try:
            text = json.dumps(_canonical(specification), sort_keys=True)
        except TypeError as error:
            advice = "write it as a number, a text, a list or a mapping"
            raise ValueError(
                f"suite {self.suite!r} has a value for {self.env_id} that JSON lacks: {error}; {advice}"
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()[:_IDENTITY_LETTERS]

    @property
    def name(self) -> str:
        """Return the name of the run's directory: task, algorithm, identity and seed."""
        name = f"{self.env_id}__{self.algorithm.partition(':')[0]}__{self.identity}__seed{self.seed}"
        # File systems and locales differ in what they take for other letters.
        return re.sub(r"[^\w.+-]", "-", name, flags=re.ASCII)


def _canonical(value: Any) -> Any:
    """Return one spelling for equal values: 1.0 is 1, and ``"lin_3e-4"`` is ``"lin_0.0003"``."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, str) and (start := number(value)) is not None:
        return replaced(value, start)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Parse the grid of the command line.

    :param texts: each ``[ALGORITHM.]NAME=VALUE,VALUE...`` or ``"paper"``
    :return: values by ``NAME`` or ``ALGORITHM.NAME``
    :raises ValueError: for any other text
    """
    grid = {}
    for text in itertools.chain.from_iterable(PAPER_GRID if text == "paper" else [text] for text in texts):
        name, _, listed = text.partition("=")
        if name in grid:
            raise ValueError(f"grid has {name!r} twice; give all of its values at once")
        grid[name] = tuple(dict.fromkeys(parse_value(value) for value in listed.split(",")))
        if "" in grid[name]:
            raise ValueError(f"grid {text!r} is not allowed; allowed are [ALGORITHM.]NAME=VALUE,VALUE and paper")
    return grid


def parse_seeds(text: str) -> list[int]:
    """Parse ``"5"`` (seeds 0 to 4), ``"3-5"`` (3, 4, 5) or ``"0,3-5"``.

    :param text: value of ``--seeds``
    :raises ValueError: for any other text
    """
    matches = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part) for part in text.split(",")]
    spans = [range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0) for match in matches]
    spans = [range(int(text))] if re.fullmatch(r"\d{1,6}", text) else spans
    if not all(spans):
        raise ValueError(f"seeds={text!r} is not allowed; allowed are a number such as 5, ranges such as 3-5, and 0,3-5")
    return list(dict.fromkeys(itertools.chain(*spans)))


def parse_shard(text: str) -> slice:
    """Parse ``"1/4"``, the first of four parts of a plan.

    :param text: value of ``--shard``
    :return: slice of the runs
    :raises ValueError: for any other text
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard={text!r} is not allowed; allowed are 1/N to N/N")
    return slice(int(match[1]) - 1, None, int(match[2]))


def make_plan(
    suite: Suite,
    labels: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]] | None = None,
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
    algorithms = [parse_algorithm(label) for label in dict.fromkeys(labels)]
    known = [
        {prefix + name: name for prefix in ("", f"{algorithm.name}.") for name in algorithm.hyperparameters}
        for algorithm in algorithms
    ]
    of_the_paper = parse_grid(["paper"]).items()  # for five algorithms, not all of which need to be in a plan
    unknown = [
        name
        for name, values in (grid or {}).items()
        if not any(name in names for names in known) and (name, values) not in of_the_paper
    ]
    check_names("hyperparameter of this plan", unknown, {name for names in known for name in names.values()})
    runs: dict[str, Run] = {}
    for seed, env_id, (algorithm, names) in itertools.product(seeds, suite.tasks, zip(algorithms, known, strict=True)):
        axes = {names[name]: values for name, values in (grid or {}).items() if name in names}
        for values in itertools.product(*axes.values()):
            run = _run(suite, env_id, algorithm, seed, total_timesteps, dict(zip(axes, values, strict=True)))
            runs.setdefault(run.name, run)
    return list(runs.values())


def _run(
    suite: Suite, env_id: str, algorithm: Algorithm, seed: int, total_timesteps: int | None, asked: Mapping[str, Any]
) -> Run:
    settings = suite.resolve(env_id, algorithm)
    hyperparameters, changed = settings["hyperparameters"], {}
    for name, value in asked.items():
        before = hyperparameters.get(name, algorithm.default(name))
        hyperparameters[name] = replaced(before, value)
        if _canonical(hyperparameters[name]) != _canonical(before):
            changed[name] = hyperparameters[name]
    if total_timesteps is not None and total_timesteps != settings["total_timesteps"]:
        settings["total_timesteps"] = changed["total_timesteps"] = total_timesteps
    return Run(suite.name, env_id, algorithm.label, seed, imports=tuple(suite.imports), changed=changed, **settings)
