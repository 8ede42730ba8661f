"""Studies on disk: a journal file or a database, which several processes may share."""

import os
import time
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import optuna
    from optuna.storages import BaseStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
except ImportError as error:
    raise missing_extra("zoo", error.name or "optuna") from error

_PURPOSE = "search"


def report_folder(log_folder: str, algo: str, study_name: str) -> Path:
    """Where the report of a study goes, and its journal unless ``--storage`` names another place."""
    return Path(log_folder) / algo / "searches" / study_name.replace(os.sep, "-")


def default_storage(log_folder: str, algo: str, study_name: str) -> str:
    """The journal of a study for which no ``--storage`` was given."""
    return str(report_folder(log_folder, algo, study_name) / "study.log")


def open_storage(storage: str, create: bool) -> BaseStorage:
    """Open a study's storage.

    :param storage: a journal file, ``FILE.log``, or the URL of a database, such as ``sqlite:///FILE.db``
    :param create: whether to make what is not there
    :raises ValueError: if the argument is neither, or the database cannot be opened
    :raises FileNotFoundError: if the journal is not there and is not to be made
    """
    if "://" in storage:
        return _open_database(storage)
    if not storage.endswith(".log"):
        raise ValueError(
            f"storage={storage!r} is not allowed; allowed are a journal file, FILE.log, and the URL of a database, such as "
            "sqlite:///FILE.db"
        )
    path = Path(storage)
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.is_file():
        raise FileNotFoundError(f"storage={storage!r} does not exist")
    # Absolute, because Optuna looks at the age of a lock through the link: a relative one in a subfolder points nowhere, and
    # the lock of a process that was killed would be waited for without end.
    path = path.absolute()
    lock = JournalFileSymlinkLock(str(path))
    _drop_torn_line(path, lock)
    return JournalStorage(JournalFileBackend(str(path), lock))


def open_study(storage: str | None, study_name: str | None, purpose: dict[str, Any], **kwargs: Any) -> optuna.Study:
    """Make a study, or go on with it.

    :param storage: as for :func:`open_storage`; None keeps the study in memory
    :param study_name: its name, or None for one that Optuna makes up
    :param purpose: what the study's trials have in common, and without which their values could not be compared
    :param kwargs: sampler and pruner
    :raises ValueError: if the study is there and serves another purpose
    """
    opened = None if storage is None else open_storage(storage, create=True)
    study = optuna.create_study(storage=opened, study_name=study_name, load_if_exists=True, direction="maximize", **kwargs)
    found = study.user_attrs.get(_PURPOSE)
    if found is None:
        study.set_user_attr(_PURPOSE, purpose)
    elif found != purpose:
        differing = [key for key in purpose if found.get(key) != purpose[key]]
        raise ValueError(
            f"study {study.study_name!r} is about {_listed(found, differing)}, and cannot go on with "
            f"{_listed(purpose, differing)}; give another --study-name"
        )
    return study


def load_study(storage: str, study_name: str) -> optuna.Study:
    """A study that is there.

    :raises ValueError: if it is not, with the studies that are
    :raises FileNotFoundError: if there is no such journal
    """
    opened = open_storage(storage, create=False)
    try:
        return optuna.load_study(storage=opened, study_name=study_name)
    except KeyError as error:
        names = ", ".join(optuna.get_all_study_names(opened)) or "none"
        raise ValueError(f"study_name={study_name!r} is not in {storage}; studies there: {names}") from error


def trial_number(study: optuna.Study, trial_id: str) -> int:
    """The number of a trial that ended with a result.

    :param trial_id: a number, or ``best``
    :raises ValueError: if there is no such trial
    """
    if trial_id == "best":
        try:
            return study.best_trial.number
        except ValueError as error:
            raise ValueError(f"trial_id='best': no trial of study {study.study_name!r} is complete") from error
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    numbers = [trial.number for trial in study.get_trials(deepcopy=False, states=states)]
    if not trial_id.isdecimal() or int(trial_id) not in numbers:
        raise ValueError(
            f"trial_id={trial_id!r} is not in study {study.study_name!r}; allowed are 'best' and "
            f"{', '.join(map(str, numbers)) or 'no number yet'}"
        )
    return int(trial_id)


def _open_database(url: str) -> RDBStorage:
    # Processes that share a file wait for each other; SQLite's own patience is five seconds.
    engine_kwargs = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    for attempts_left in reversed(range(10)):
        try:
            return RDBStorage(url, engine_kwargs)
        except Exception as error:  # every database's driver has errors of its own
            if attempts_left and _is_collision(error):
                time.sleep(0.2)
                continue
            raise ValueError(f"storage={url!r} cannot be opened: {str(error).splitlines()[0]}") from error
    raise AssertionError("the last attempt returns or raises")


def _is_collision(error: Exception) -> bool:
    """Whether another process made the tables of a new database at the same moment, which Optuna does not expect."""
    return type(error).__name__ == "IntegrityError" or "already exists" in str(error)


def _drop_torn_line(path: Path, lock: JournalFileSymlinkLock) -> None:
    """Cut off an incomplete last line, which a full disk leaves, and after which Optuna could read no further line."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    lock.acquire()
    try:
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()


def _listed(purpose: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={purpose.get(key)!r}" for key in keys)
