"""What comes out of a search: a table, a figure, the best hyperparameters as a file, and the command that trains with them."""

import contextlib
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.tuning.figure import draw_search
from sb3_ano.zoo.tuning.studies import report_folder
from sb3_ano.zoo.tuning.trials import hyperparameters_of
from sb3_ano.zoo.tuning.workers import SURPLUS

try:
    import optuna
    import pandas as pd
    import yaml
    from optuna.trial import FrozenTrial, TrialState
    from rl_zoo3.exp_manager import ExperimentManager
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER
except ImportError as error:
    raise missing_extra("zoo", error.name or "pandas") from error

#: Trials in the printed table.
SHOWN = 5

# What a table shows rather as it was drawn than as the hyperparameter that it became.
_AS_SAMPLED = ("learning_rate", "lr_schedule", "net_arch", "activation_fn")


def write_report(study: optuna.Study, manager: ExperimentManager, base: Mapping[str, Any]) -> None:
    """Write the table, the figure and the best trial's hyperparameters of a study, and print what matters.

    :param study: the study, with trials of all its processes
    :param manager: the search's
    :param base: hyperparameters in which a trial puts its own
    """
    folder = report_folder(manager.log_folder, manager.algo, study.study_name)
    folder.mkdir(parents=True, exist_ok=True)
    trials = trials_table(study, manager.algo)
    with _replaced(folder / "trials.csv") as file:
        trials.to_csv(file, index=False)
    counts = Counter(trials["state"])
    print(f"{len(trials)} trials: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    print(f"table: {folder / 'trials.csv'}")
    if not counts["complete"]:
        print("no trial is complete, so there is no best one")
        return
    if not manager.no_optim_plots:
        with _replaced(folder / "search.png") as file:
            draw_search(study, file, title=f"{manager.algo} on {manager.env_name.gym_id}: {study.study_name}")
        print(f"figure: {folder / 'search.png'}")
    print(f"\nthe best trials\n{_best_trials(trials)}\n")

    best = study.best_trial
    hyperparameters = hyperparameters_of(best, manager.algo, base)
    with _replaced(folder / "best.yml") as file:
        file.write_text(yaml.safe_dump({manager.env_name.gym_id: hyperparameters}))
    print(f"trial {best.number} is the best, with a return of {best.value:.2f}; this trains with its hyperparameters:")
    print(train_command(manager, folder / "best.yml"))


def trials_table(study: optuna.Study, algo: str) -> pd.DataFrame:
    """One row a trial: number, state, return, seconds, evaluations, and the hyperparameters that were searched.

    The return is that of the last evaluation. Trials that were begun where none was left are not in it.

    :param study: the study
    :param algo: the zoo's name of the algorithm
    """
    trials = [trial for trial in study.get_trials(deepcopy=False) if SURPLUS not in trial.user_attrs]
    columns = ["trial", "state", "return", "seconds", "evaluations"]
    return pd.DataFrame([_row(trial, algo) for trial in trials], columns=None if trials else columns)


def train_command(manager: ExperimentManager, file: Path) -> str:
    """The command that trains with the hyperparameters of a file as the search did, but for the budget, which is the file's.

    :param manager: the search's
    :param file: hyperparameters in the zoo's format
    """
    args = manager.args
    words = ["train", "--algo", manager.algo, "--env", manager.env_name.gym_id, "-conf", str(file)]
    for option, value, default in (
        ("--log-folder", args.log_folder, "logs"),
        ("--vec-env", args.vec_env, "dummy"),
        ("--device", args.device, "auto"),
        ("--num-threads", args.num_threads, -1),
    ):
        if value != default:
            words += [option, str(value)]
    if args.gym_packages:
        words += ["--gym-packages", *args.gym_packages]
    for option, values in (("--env-kwargs", args.env_kwargs), ("--eval-env-kwargs", args.eval_env_kwargs)):
        if values:
            words += [option, *(f"{name}:{value!r}" for name, value in values.items())]
    return f"python -m sb3_ano.zoo {shlex.join(words)}"


def _row(trial: FrozenTrial, algo: str) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": "failed" if trial.state == TrialState.FAIL else trial.state.name.lower(),
        "return": trial.value,
        "seconds": None if trial.duration is None else round(trial.duration.total_seconds(), 1),
        "evaluations": len(trial.intermediate_values),
        **_searched(trial, algo),
    }


def _searched(trial: FrozenTrial, algo: str) -> dict[str, Any]:
    try:
        searched = HYPERPARAMS_CONVERTER[algo](trial.params)
    except KeyError:  # its process died while the trial was sampled
        searched = {}
    searched.pop("policy_kwargs", None)
    return {**searched, **{name: trial.params[name] for name in _AS_SAMPLED if name in trial.params}}


def _best_trials(trials: pd.DataFrame) -> str:
    """The best trials side by side, because there are more hyperparameters than a line holds."""
    best = trials[trials["state"] == "complete"].sort_values("return", ascending=False).head(SHOWN)
    shown = best.drop(columns=["state", "seconds", "evaluations"]).set_index("trial").T
    return shown.to_string(float_format="{:.4g}".format, na_rep="none")


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of ``path`` once it is whole; other processes write the same report."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
