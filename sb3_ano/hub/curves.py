"""Learning curves of training runs."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from stable_baselines3.common.monitor import LoadMonitorResultsError, load_results

from sb3_ano.hub.documents import one_line


def read_returns(run: str | Path) -> pd.DataFrame:
    """Read the returns of a run's training episodes, in the order in which they ended.

    :param run: directory with monitor files, such as the zoo's ``logs/ano/HalfCheetah-v5_1``
    :return: columns ``timesteps`` (steps in this episode and those that ended before it) and ``episode_return``
    :raises ValueError: if the directory holds no finished episode, or a monitor file is damaged
    """
    try:
        episodes = load_results(str(run))
        lengths, returns = (pd.Series(episodes[column], dtype=float) for column in ("l", "r"))
    except LoadMonitorResultsError as error:
        raise ValueError(f"run={str(run)!r} holds no monitor files; a training run of the zoo writes them") from error
    except Exception as error:  # pandas and SB3 raise errors of any class for a damaged file
        raise ValueError(f"run={str(run)!r} holds a damaged monitor file: {one_line(error)}") from error
    if episodes.empty:
        raise ValueError(f"run={str(run)!r} holds no finished episode yet")
    return pd.DataFrame({"timesteps": lengths.cumsum(), "episode_return": returns})


def plot_learning_curve(run: str | Path, output: str | Path, title: str) -> Path:
    """Plot the returns of a run's training episodes, with a moving mean over a twentieth of them.

    :param run: directory with monitor files
    :param output: figure to write, PNG or SVG by its suffix
    :param title: title of the figure
    :return: path of the figure
    :raises ValueError: if the directory holds no finished episode, or a monitor file is damaged
    """
    returns = read_returns(run)
    window = max(1, len(returns) // 20)
    smooth = returns["episode_return"].rolling(window, min_periods=1).mean()
    thousands = np.asarray(returns["timesteps"]) / 1e3

    # Without pyplot, so that no backend with a window is chosen.
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(thousands, returns["episode_return"], s=8, color="#c2255c", alpha=0.25, linewidths=0, label="episode")
    axes.plot(thousands, smooth, color="#c2255c", linewidth=2, label=f"mean of {window} episodes")
    axes.set(title=title, xlabel="environment steps (thousands)", ylabel="return of training episodes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    return output
