"""The processes that work on a study, and the trials that they left behind when they died."""

import contextlib
import os
import socket
import threading
import time
import uuid
from datetime import datetime
from types import TracebackType
from typing import Self

from sb3_ano.extras import missing_extra

try:
    import optuna
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise missing_extra("zoo", error.name or "optuna") from error

#: Seconds between two signs of life, and without one until a process counts as dead. Clocks may differ by what is between.
BEAT_SECONDS, GRACE_SECONDS = 60.0, 300.0

#: Attribute of a trial that two processes began where one was left.
SURPLUS = "surplus"

_WORKER = "worker"
# Workers that are entered in this process.
_entered: set[str] = set()


class Worker:
    """This process in a study: while it is entered, it tells the others that it lives.

    Optuna's own heartbeats exist in databases only, and wait out their time even where the process can be looked for.

    :param study: the study that it works on
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._name = uuid.uuid4().hex[:12]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, daemon=True)

    def __enter__(self) -> Self:
        _entered.add(self._name)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        _entered.discard(self._name)

    def sign(self, trial: optuna.Trial) -> None:
        """Say that this process runs the trial."""
        trial.set_user_attr(_WORKER, self._name)

    def give_up_dead_trials(self) -> list[int]:
        """Mark the running trials of dead processes as failed, so that they neither count nor stay open.

        :return: their numbers
        """
        given_up = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_abandoned(trial):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
                given_up.append(trial.number)
        return given_up

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        name = trial.user_attrs.get(_WORKER)
        if name in _entered:
            return False
        worker = self._study.user_attrs.get(f"{_WORKER} {name}")
        if worker is None:  # died before it signed, or belongs to another program
            started = trial.datetime_start
            return started is not None and (datetime.now() - started).total_seconds() > GRACE_SECONDS
        if time.time() - worker["seen"] > GRACE_SECONDS:
            return True
        # One with this process's id that is not entered is gone, or the id would not be free.
        return worker["host"] == _host() and (worker["pid"] == os.getpid() or not _is_alive(worker["pid"]))

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            # A network file system may be away for a moment; the next sign of life comes soon enough.
            with contextlib.suppress(OSError, optuna.exceptions.StorageInternalError):
                self._beat()

    def _beat(self) -> None:
        self._study.set_user_attr(f"{_WORKER} {self._name}", {"host": _host(), "pid": os.getpid(), "seen": time.time()})


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # os.kill would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    """The machine, and on Linux the container, within which a process id means something."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()
