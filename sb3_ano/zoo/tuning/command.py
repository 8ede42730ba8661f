"""What ``train`` does with the options of a search before the zoo parses them."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from sb3_ano.zoo.options import named_in
from sb3_ano.zoo.tuning.studies import default_storage, load_study, trial_number


def prepare(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Fill in what a search leaves open, and find the trial that is to be trained.

    A search without a storage gets a journal in the log folder, and one without a name the next free one, so that every
    search can go on. ``--trial-id best`` becomes a number.

    :param options: those of this package
    :param arguments: the other ones, for the zoo
    :raises ValueError: if there is no such study or trial
    :raises FileNotFoundError: if there is no such journal
    """
    named = named_in(arguments)
    study, rest = _study_in(arguments)
    folder, algo = named.folder or "logs", named.algo
    if named.optimize_hyperparameters:
        name = study.study_name or _next_name(folder, algo, named.env)
        storage = study.storage or default_storage(folder, algo, name)
        return [*rest, "--study-name", name, "--storage", storage]
    if study.trial_id is None:
        return list(arguments)
    if study.study_name is None:
        raise ValueError(f"--trial-id {study.trial_id} needs the --study-name that it is in")
    storage = study.storage or default_storage(folder, algo, study.study_name)
    number = trial_number(load_study(storage, study.study_name), study.trial_id)
    return [*rest, "--study-name", study.study_name, "--storage", storage, "--trial-id", str(number)]


def _study_in(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for option in ("--study-name", "--storage", "--trial-id"):
        parser.add_argument(option)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error


def _next_name(log_folder: str, algo: str, env_id: str) -> str:
    """The first name, of an environment and a number, that no search has; its folder is made, so that it stays ours."""
    for number in itertools.count(1):
        name = f"{env_id.replace('/', '-')}_{number}"
        folder = Path(default_storage(log_folder, algo, name)).parent
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return name
    raise AssertionError("unreachable")
