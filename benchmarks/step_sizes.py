"""Compare algorithms at equal step size from committed rows: ``python benchmarks/step_sizes.py``.

It writes ``tables.md`` next to the rows, and a figure with the name of their directory: the score against the KL divergence
per update, and what the updates look like at each learning rate. The tasks held out: ``--results docs/results/held_out``.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

from sb3_ano._io import write_figure, write_file
from sb3_ano.bench.looks import looks
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import Estimate, estimate, interquartile_mean, mean

#: Mean of the last three evaluations of ten episodes.
RETURN = "last_evaluations"
DIAGNOSTICS = {
    "kl_after": "KL per update",
    "clip_range_mean": "radius",
    "ratio_max_after": "largest ratio",
    "ppo_discarded_gradient": "gradient discarded",
}
# Chance to find a difference that is there.
_POWER = 0.8
_LOW, _HIGH = 3e-4, 1e-3
#: Targets of about 0.003 per action dimension, written down in docs/results/held_out/README.md.
TARGETS = {
    "Swimmer-v4": 0.01,
    "Hopper-v4": 0.01,
    "HalfCheetah-v4": 0.02,
    "Walker2d-v4": 0.02,
    "Ant-v4": 0.02,
    "Humanoid-v4": 0.05,
}
BY_ACTIONS = "ANO, KL by actions"
_PPO = "PPO, radius 0.2"


def name_of(algorithm: str, radius: float, target: float) -> str:
    """Return what a row's setting is called in tables, such as ``"ANO, KL 0.01"``."""
    name, _, options = algorithm.partition(":")
    family = "PPO" if name == "ppo" or "shaping=ppo" in options else name.upper()
    return f"{family}, radius {radius:g}" if np.isnan(target) else f"{family}, KL {target:g}"


def read(file: Path) -> pd.DataFrame:
    """Read the rows of ``runs.csv``, with columns for the setting and the TD3-normalized score.

    Rows of ANO whose target is that of their task in ``TARGETS`` come a second time, with the name of this choice.
    """
    rows, references = pd.read_csv(file), ReferenceScores()
    labels = rows[["algorithm", "clip_range", "desired_kl"]].itertuples(index=False)
    scores = [float(references.normalize(env, np.array(final))) for env, final in zip(rows["env"], rows[RETURN], strict=True)]
    rows = rows.assign(setting=list(itertools.starmap(name_of, labels)), score=scores)
    chosen = rows[rows["setting"].str.startswith("ANO") & (rows["desired_kl"] == rows["env"].map(TARGETS))]
    # Where all are 0.01 or a task is missing, there is nothing to add.
    whole = chosen.groupby("learning_rate").filter(lambda part: part["env"].nunique() == rows["env"].nunique() > 1)
    return pd.concat([rows, whole.assign(setting=BY_ACTIONS)])


def blocks_of(rows: pd.DataFrame) -> dict[tuple[str, float], pd.DataFrame]:
    """Return the scores of each setting at each learning rate, a row per seed that has all tasks."""
    blocks: dict[tuple[str, float], pd.DataFrame] = {}
    for (setting, rate), part in rows.groupby(["setting", "learning_rate"], sort=False):
        block = part.pivot(index="seed", columns="env", values="score").dropna()
        if len(block) > 1 and len(block.columns) == rows["env"].nunique():
            blocks[str(setting), float(str(rate))] = block
    return blocks


def shared(*blocks: pd.DataFrame) -> list[np.ndarray]:
    """Return the scores of the seeds that all blocks have, ``(seeds, tasks)`` each."""
    seeds = sorted(set.intersection(*(set(block.index) for block in blocks)))
    return [block.loc[seeds].to_numpy() for block in blocks]


def text(found: Estimate, digits: int = 3) -> str:
    """Return an estimate with its interval."""
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the difference of the mean scores."""
    return mean(ours) - mean(theirs)


def noise(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the spread of PPO's returns, and the difference that a t-test of two settings finds in four of five cases."""
    ppo = rows[rows["setting"] == _PPO]
    for (rate, env), returns in ppo.groupby(["learning_rate", "env"])[RETURN]:
        if len(returns) < 2:
            continue
        deviation = returns.std()
        row = {"rate": f"{rate:g}", "task": env, "seeds": len(returns), "mean": returns.mean(), "deviation": deviation}
        for n in (3, 5, 10):
            quantiles = stats.t.ppf(0.975, 2 * n - 2) + stats.t.ppf(_POWER, 2 * n - 2)
            row[f"found with {n}"] = quantiles * deviation * np.sqrt(2 / n)
        yield {key: f"{value:.0f}" if isinstance(value, float) else value for key, value in row.items()}


def returns(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the returns of each setting on each task, with the number of seeds."""
    for (rate, setting), part in rows.groupby(["learning_rate", "setting"], sort=False):
        cells: dict[str, object] = {}
        for env, of in part.groupby("env"):
            spread = f" ± {of[RETURN].std():.0f}" if len(of) > 1 else ""
            cells[str(env)] = f"{of[RETURN].mean():.0f}{spread} ({len(of)})"
        yield {"rate": f"{rate:g}", "setting": setting, **cells}


def scores(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the aggregate score of each setting, and its difference from PPO's with radius 0.2 on the same seeds."""
    blocks = blocks_of(rows)
    for (setting, rate), block in sorted(blocks.items(), key=lambda item: item[0][1]):
        score = estimate(interquartile_mean, block.to_numpy())
        base = blocks.get((_PPO, rate))
        change = {} if base is None or base is block else compared(block, base)
        change = {key.replace("difference", "difference from PPO"): value for key, value in change.items()}
        yield {"rate": f"{rate:g}", "setting": setting, "seeds": len(block), "IQM": text(score), **change}


def updates(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield what the updates of each setting look like: means over its runs."""
    for (rate, setting), part in rows.groupby(["learning_rate", "setting"]):
        means = {title: part[column].mean() for column, title in DIAGNOSTICS.items()}
        cells = {title: "not logged" if np.isnan(value) else f"{value:.3g}" for title, value in means.items()}
        yield {"rate": f"{rate:g}", "setting": setting, **cells}


def steps(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the KL divergence per update of each setting on each task: the same radius is a larger step with more actions."""
    for (rate, setting), part in rows.groupby(["learning_rate", "setting"]):
        means = part.groupby("env")["kl_after"].mean()
        yield {"rate": f"{rate:g}", "setting": setting, **{str(env): f"{kl:.3g}" for env, kl in means.items()}}


def of_tasks(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield how returns on each task differ from PPO's with radius 0.2, and from those of PPO and SPO with the same target."""
    for (rate, env), part in rows[rows["setting"] != BY_ACTIONS].groupby(["learning_rate", "env"]):
        blocks = {str(setting): runs.set_index("seed")[[RETURN]] for setting, runs in part.groupby("setting")}
        for (setting, block), (base, other) in itertools.product(blocks.items(), blocks.items()):
            digits = 0 if float(other[RETURN].abs().max()) >= 100 else 1
            compares = base != setting and base in (_PPO, *same_targets(setting))
            if compares and (change := compared(block, other, digits)):
                yield {"rate": f"{rate:g}", "task": env, "setting": setting, "minus": base, **change}


def compared(ours: pd.DataFrame, theirs: pd.DataFrame, digits: int = 3) -> dict[str, object]:
    """Return the difference of the means on the seeds that both have, and the p-value of the exact sign-flip test."""
    pair = shared(ours, theirs)
    if len(pair[0]) < 2:
        return {}
    gap = (pair[0] - pair[1]).mean(axis=1)
    test = stats.permutation_test((gap, np.zeros_like(gap)), lambda x, y: np.mean(x - y), permutation_type="samples")
    change = estimate(difference, *pair, paired=True)
    return {"difference": text(change, digits), "p": f"{test.pvalue:.3f} ({len(gap)} seeds)"}


def same_steps(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the comparison of ANO with PPO, and with SPO, at the same target of the KL divergence."""
    blocks = blocks_of(rows)
    for (setting, rate), block in blocks.items():
        for base in same_targets(setting):
            if (base, rate) in blocks and (change := compared(block, blocks[base, rate])):
                yield {"rate": f"{rate:g}", "setting": setting, "minus": base, **change}


def same_targets(setting: str) -> list[str]:
    """Return the settings of PPO and SPO with the target of a setting of ANO."""
    return [setting.replace("ANO", name) for name in ("PPO", "SPO") if setting.startswith("ANO, KL 0")]


def gain_over_other(low: np.ndarray, high: np.ndarray, other_low: np.ndarray, other_high: np.ndarray) -> np.ndarray:
    """Return by how much more the IQM gains from the higher learning rate than that of another setting."""
    gain = interquartile_mean(high) - interquartile_mean(low)
    return gain - (interquartile_mean(other_high) - interquartile_mean(other_low))


def interactions(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield by how much more each setting gains from the higher learning rate than PPO, on the seeds that all four have."""
    blocks = blocks_of(rows)
    for setting in dict.fromkeys(setting for setting, _ in blocks):
        keys = [(name, rate) for name in (setting, _PPO) for rate in (_LOW, _HIGH)]
        if setting != _PPO and all(key in blocks for key in keys):
            low, high, other_low, other_high = shared(*(blocks[key] for key in keys))
            if len(low) > 1:
                change = estimate(difference, high, low, paired=True)
                more = estimate(gain_over_other, low, high, other_low, other_high, paired=True)
                yield {"setting": setting, "seeds": len(low), "change of mean": text(change), "IQM, more than PPO": text(more)}


def table(frame: pd.DataFrame) -> str:
    """Return rows as a Markdown table."""
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.fillna("").astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(rows: pd.DataFrame) -> plt.Figure:
    """Draw the score against the KL divergence, a line per algorithm and learning rate, and diagnostics of each setting."""
    # A setting at one of two rates has no line.
    rows = rows.groupby("setting").filter(lambda part: part["learning_rate"].nunique() == rows["learning_rate"].nunique())
    drawn, panels = plt.subplots(2, 2, figsize=(8.0, 6.4), layout="constrained")
    styles, blocks = looks(["ppo", "spo", "ano"]), blocks_of(rows)
    lines: dict[tuple[str, float], list[tuple[float, Estimate]]] = {}
    for (setting, rate), block in blocks.items():
        kl = rows.loc[(rows["setting"] == setting) & (rows["learning_rate"] == rate), "kl_after"].mean()
        score = estimate(interquartile_mean, block.to_numpy())
        lines.setdefault((setting.partition(",")[0], rate), []).append((kl, score))
    for (family, rate), dots in lines.items():
        kls, scores = zip(*sorted(dots, key=lambda dot: dot[0]), strict=True)
        color, _, marker = styles[family.lower()]
        low, value, high = np.array([[score.low, score.value, score.high] for score in scores]).T
        face = {"fillstyle": "full" if rate == _HIGH else "none", "linestyle": "-" if rate == _HIGH else "--"}
        panels[0, 0].errorbar(
            kls, value, [value - low, high - value], color=color, marker=marker, label=f"{family} at {rate:g}", **face
        )
    panels[0, 0].set(xlabel="KL divergence per update", ylabel="IQM, TD3-normalized")
    for axes, column in zip(panels.flat[1:], ("clip_range_mean", "ratio_max_after", "ppo_discarded_gradient"), strict=True):
        for name, part in rows.groupby("setting", sort=False):
            color, _, marker = styles[str(name).partition(",")[0].lower()]
            means = part.groupby("learning_rate")[column].mean()
            face = {"linestyle": "-", "fillstyle": "full"} if "KL" in str(name) else {"linestyle": ":", "fillstyle": "none"}
            axes.plot(means.index, means, color=color, marker=marker, label=name, **face)
        axes.set(xlabel="learning rate", ylabel=DIAGNOSTICS[column])
        axes.set_xticks([_LOW, _HIGH], [f"{_LOW:g}", f"{_HIGH:g}"])
    panels[1, 1].set_yscale("symlog", linthresh=1e-4)
    panels[1, 1].set_ylim(-2e-5, 0.05)
    for axis, ticks in ((panels[0, 0].xaxis, [0.001, 0.002, 0.005, 0.01, 0.02]), (panels[0, 1].yaxis, [0.2, 0.5, 1.0, 2.0])):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_ticks(ticks)
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    if lines:
        panels[0, 0].legend(fontsize=8)
    drawn.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return drawn


def main() -> None:
    """Write the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results/step_size"), help="directory of runs.csv")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="directory of the figure")
    options = parser.parse_args()
    if not (options.results / "runs.csv").is_file():
        parser.error(f"{options.results / 'runs.csv'} is missing; python -m sb3_ano.bench export writes it")
    rows = read(options.results / "runs.csv")
    parts = {"Scores": scores, "Same step size": same_steps, "Updates": updates, "KL of each task": steps, "Returns": returns}
    parts |= {"Difference on each task": of_tasks, "Learning rate": interactions, "Noise": noise}
    written = {title: pd.DataFrame(part(rows)) for title, part in parts.items()}
    tables = "\n\n".join(f"## {title}\n\n{table(frame)}" for title, frame in written.items() if len(frame))
    text = f"# Step sizes: tables\n\nWritten by `benchmarks/step_sizes.py`.\n\n{tables}\n"
    write_file(options.results / "tables.md", text)
    drawn = options.out / f"{options.results.resolve().name}.png"
    write_figure(drawn, figure(rows), dpi=110)
    print(options.results / "tables.md", drawn, sep="\n")


if __name__ == "__main__":
    main()
