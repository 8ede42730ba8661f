"""Answer the questions of docs/results/pooled/PLAN.md from committed rows: ``python benchmarks/pooled.py``.

It writes ``tables.md`` next to the rows, once at least three seeds are there of all tasks in all settings.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from sb3_ano.bench.statistics import Estimate, probability_of_improvement

SEEDS = range(20, 30)
#: Seeds that must be complete before anybody looks.
FEWEST_SEEDS = 3
SUITE = Path(__file__).with_name("pooled.yml")
#: Labels of the four settings in ``pooled.yml``, by the name that the tables give them.
SETTINGS = {
    "PPO": "ano:shaping=ppo",
    "SPO": "spo",
    "ANO": "ano",
    "ANO, 2.5 times the radius": "ano:shaping=ano",
}
#: Columns of the outcomes; more is better for each.
DETERMINISTIC = "last_evaluations"
SAMPLED = "training_return"
FALL = "largest fall"
#: Setting, setting that it is compared with, outcome.
PRIMARY = [
    ("ANO", "PPO", DETERMINISTIC),
    ("ANO, 2.5 times the radius", "PPO", DETERMINISTIC),
]
SECONDARY = [
    ("ANO", "PPO", SAMPLED),
    ("ANO, 2.5 times the radius", "PPO", SAMPLED),
    ("ANO", "SPO", DETERMINISTIC),
    ("ANO", "SPO", SAMPLED),
    ("ANO", "PPO", FALL),
    ("ANO, 2.5 times the radius", "PPO", FALL),
]
PERMUTATIONS = 100_000


def read(directory: Path) -> pd.DataFrame:
    """Read the rows of all runs, with the largest fall of each.

    :param directory: directory of ``runs.csv`` and ``curves.csv``
    :return: runs of the seeds that are complete on all tasks in all settings
    :raises SystemExit: if there are fewer than three such seeds
    """
    runs = pd.read_csv(directory / "runs.csv")
    curves = pd.read_csv(directory / "curves.csv")

    names = ["env", "algorithm", "seed"]
    tasks = yaml.safe_load(SUITE.read_text())["tasks"]
    present = pd.MultiIndex.from_frame(runs[names])
    complete = []
    for seed in SEEDS:
        of_seed = pd.MultiIndex.from_product([tasks, SETTINGS.values(), [seed]], names=names)
        if of_seed.isin(present).all():
            complete.append(seed)
    if len(complete) < FEWEST_SEEDS:
        raise SystemExit(f"error: {len(complete)} seeds are complete; the plan allows no look before there are {FEWEST_SEEDS}")

    wanted = pd.MultiIndex.from_product([tasks, SETTINGS.values(), complete], names=names)
    falls = curves.groupby(names)["evaluation_return"].agg(largest_fall)
    return runs.set_index(names).loc[wanted].assign(**{FALL: -falls})


def largest_fall(returns: pd.Series) -> float:
    """Return the largest difference between the best return so far and the current one.

    :param returns: returns of the evaluations of a run, in their order
    """
    return float((returns.cummax() - returns).max())


def outcomes(rows: pd.DataFrame, setting: str, column: str) -> np.ndarray:
    """Return an outcome of a setting as an array of shape ``(seeds, tasks)``."""
    of_setting = rows.xs(SETTINGS[setting], level="algorithm")[column]
    return of_setting.unstack("env").to_numpy()


def wins(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the probability that a run has more than another on the same task: the mean over tasks; a tie counts one half.

    :param ours: outcomes, shape ``(..., seeds, tasks)``
    :param theirs: outcomes of the other setting, shape ``(..., seeds, tasks)``
    """
    difference = ours[..., :, None, :] - theirs[..., None, :, :]
    return (0.5 + 0.5 * np.sign(difference)).mean(axis=(-3, -2, -1))


def permutation_test(ours: np.ndarray, theirs: np.ndarray, permutations: int = PERMUTATIONS) -> float:
    """Return the two-sided p-value of :func:`wins`, if settings are exchanged among the runs of each task.

    :param ours: outcomes, shape ``(seeds, tasks)``
    :param theirs: outcomes of the other setting, shape ``(seeds, tasks)``
    :param permutations: number of random exchanges
    """
    rng = np.random.default_rng(0)
    seeds = len(ours)
    both = np.concatenate([ours, theirs])
    observed = abs(wins(ours, theirs) - 0.5)

    as_extreme = 0
    for _ in range(permutations):
        shuffled = rng.permuted(both, axis=0)
        # Tiny differences of rounding are ties.
        as_extreme += abs(wins(shuffled[:seeds], shuffled[seeds:]) - 0.5) >= observed - 1e-12

    return (1 + as_extreme) / (1 + permutations)


def holm(p_values: list[float]) -> list[float]:
    """Return p-values with the correction of Holm (1979).

    :param p_values: p-values of a family of tests
    """
    corrected = np.empty(len(p_values))
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(1.0, largest)
    return list(corrected)


def answers(rows: pd.DataFrame, family: list[tuple[str, str, str]]) -> list[str]:
    """Return a Markdown table with a line per question of a family."""
    estimates: list[Estimate] = []
    p_values: list[float] = []
    for setting, other, column in family:
        ours = outcomes(rows, setting, column)
        theirs = outcomes(rows, other, column)
        estimates.append(probability_of_improvement(ours, theirs))
        p_values.append(permutation_test(ours, theirs))

    lines = [
        "| setting | compared with | outcome | P(better), 95 % interval | p | p, Holm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for question, estimate, p, corrected in zip(family, estimates, p_values, holm(p_values), strict=True):
        interval = f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
        lines.append(f"| {' | '.join(question)} | {interval} | {p:.4f} | {corrected:.4f} |")
    return lines


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results/pooled"), help="directory of runs.csv and curves.csv"
    )
    options = parser.parse_args()

    rows = read(options.results)
    title = ["# Pooled comparison: tables", "", "Written by `benchmarks/pooled.py`."]
    primary = ["", "## Primary questions", "", *answers(rows, PRIMARY)]
    secondary = ["", "## Secondary questions", "", *answers(rows, SECONDARY)]

    file = options.results / "tables.md"
    file.write_text("\n".join([*title, *primary, *secondary, ""]))
    print(file)


if __name__ == "__main__":
    main()
