"""The course of a search, and what mattered in it, as a picture."""

import warnings
from pathlib import Path

from sb3_ano.extras import missing_extra

try:
    import numpy as np
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from optuna.trial import TrialState
except ImportError as error:
    raise missing_extra("zoo", error.name or "matplotlib") from error

#: Complete trials below which importances would be noise.
MIN_TRIALS = 8
_COLOUR = "#c2255c"


def draw_search(study: optuna.Study, output: Path, title: str) -> None:
    """Draw returns over trials, the best so far, and beside them how much each parameter mattered, if that can be told.

    :param study: a study with a complete trial
    :param output: picture to write, PNG or SVG by its ending
    :param title: heading of the picture
    """
    shares = importances(study)
    figure = Figure(figsize=(11.0 if shares else 7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if shares else 1, squeeze=False)[0]
    _draw_history(panels[0], study)
    panels[0].set_title(title, fontsize="medium")
    if shares:
        _draw_importances(panels[1], shares)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of each parameter in what made trials good (PED-ANOVA), largest first; empty where trials are too few or equal.

    :param study: the study
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < MIN_TRIALS or len({trial.value for trial in complete}) == 1:
        return {}
    # A parameter with one value explains nothing.
    searched = [
        name
        for name in dict.fromkeys(name for trial in complete for name in trial.params)
        if any(not trial.distributions[name].single() for trial in complete if name in trial.distributions)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.importance.get_param_importances(study, params=searched)


def _draw_history(axes: Axes, study: optuna.Study) -> None:
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    for state, marker, label in ((TrialState.COMPLETE, "o", "complete"), (TrialState.PRUNED, "x", "pruned")):
        shown = [(trial.number, trial.value) for trial in trials if trial.state == state and trial.value is not None]
        if shown:
            numbers, values = zip(*shown, strict=True)
            axes.scatter(numbers, values, s=20, marker=marker, color=_COLOUR, alpha=0.5, label=label)
        if state == TrialState.COMPLETE:
            best = np.maximum.accumulate(values)
            axes.step(numbers, best, where="post", color=_COLOUR, linewidth=2, label="best so far")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="trial", ylabel="mean return of the last evaluation")
    axes.legend(frameon=False)


def _draw_importances(axes: Axes, shares: dict[str, float]) -> None:
    names = list(shares)
    axes.barh(names, [shares[name] for name in names], color=_COLOUR, alpha=0.7)
    axes.invert_yaxis()
    axes.set_title("what made trials good", fontsize="medium")
    axes.set(xlabel="share (PED-ANOVA)")
