"""The process pool: results, errors and progress come back, and no process outlives its parent."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from sb3_ano.bench.pool import Pool, Worker, WorkerError

HERE = "tests.bench.test_pool"


def add(request, report):
    """Report twice, print, and return a sum."""
    report(1)
    print("libraries print")
    report(2.5)
    return {"sum": request["a"] + request["b"], "threads": os.environ["OMP_NUM_THREADS"]}


def fail(request, report):
    """Raise an error of two lines."""
    raise OSError(errno.ENOSPC, "No space left\non device")


def die(request, report):
    """End as the system ends a process without memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait(request, report):
    """Say which process this is, and wait."""
    report(os.getpid())
    time.sleep(600)


def test_results_progress_and_errors_come_back():
    pool, progress = Pool(2, threads=3), []
    try:
        added, failed = (pool.submit(f"{HERE}:{name}", {"a": 2, "b": 3}, progress.append) for name in ("add", "fail"))
        assert added.result() == {"sum": 5, "threads": "3"}
        with pytest.raises(WorkerError) as error:
            failed.result()
    finally:
        pool.close()
    assert progress == [1, 2.5]
    assert str(error.value) == "OSError: [Errno 28] No space left on device"
    assert "Traceback" in error.value.details
    assert error.value.disk_is_full


@pytest.mark.slow
def test_a_killed_process_is_an_error_of_its_own():
    with pytest.raises(WorkerError, match="its process was killed by SIGKILL") as error:
        Worker(f"{HERE}:die", {}).result()
    assert error.value.killed


@pytest.mark.slow
def test_closing_ends_running_processes_and_starts_no_other():
    pool, started, process_ids = Pool(1), threading.Event(), []

    def report(process_id):
        process_ids.append(process_id)
        started.set()

    running, waiting = (pool.submit(f"{HERE}:wait", {}, report) for _ in range(2))
    assert started.wait(60)
    pool.close()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        running.result()
    assert waiting.cancelled()
    assert len(process_ids) == 1
    assert not psutil.pid_exists(process_ids[0])


@pytest.mark.slow
def test_a_process_ends_with_its_parent():
    code = f"from sb3_ano.bench.pool import Worker; Worker('{HERE}:wait', {{}}).result(lambda pid: print(pid, flush=True))"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    child.wait(timeout=20)
