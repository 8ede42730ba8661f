"""The process pool: results, errors and progress come back, and no process outlives its parent."""

import errno
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from sb3_ano.bench import pool as pools
from sb3_ano.bench.pool import Pool, WorkerError

HERE = "tests.bench.test_pool"


def add(request, report):
    """Report twice, print, and return a sum."""
    report(1)
    print("libraries print")
    report(2.5)
    return {"sum": request["a"] + request["b"], "threads": [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]}


def fail(request, report):
    """Raise an error of two lines."""
    raise OSError(errno.ENOSPC, "No space left\non device")


def wait(request, report):
    """Report which process this is, and wait."""
    report(os.getpid())
    time.sleep(600)


def hold_the_lock(request, report):
    """Report which process this is, and keep Python's lock in a call of C code."""
    report(os.getpid())
    sum(range(10**12))


def test_results_progress_and_errors_come_back():
    pool, progress = Pool(2, threads=3), []
    added, failed = (pool.submit(f"{HERE}:{name}", {"a": 2, "b": 3}, progress.append) for name in ("add", "fail"))
    assert added.result() == {"sum": 5, "threads": [3, 3]}
    error = failed.exception()
    pool.close()
    assert progress == [1, 2.5]
    assert str(error) == "OSError: [Errno 28] No space left on device"
    assert "Traceback" in error.details
    assert error.disk_is_full


@pytest.mark.slow
@pytest.mark.parametrize(("function", "end"), [("wait", "ended with status 3"), ("hold_the_lock", "was killed by SIGKILL")])
def test_closing_ends_running_processes_and_starts_no_other(function, end, monkeypatch):
    monkeypatch.setattr(pools, "_CLOSE_SECONDS", 5.0 if function == "wait" else 0.5)
    pool, started, process_ids = Pool(1), threading.Event(), []
    target = f"{HERE}:{function}"
    running, waiting = (pool.submit(target, {}, lambda pid: (process_ids.append(pid), started.set())) for _ in "12")
    assert started.wait(60)
    child = psutil.Process(process_ids[0])
    begin = child.cpu_times().user
    while function == "hold_the_lock" and child.cpu_times().user < begin + 0.3:
        time.sleep(0.05)
    pool.close()
    with pytest.raises(WorkerError, match=f"its process {end}") as error:
        running.result()
    assert error.value.killed == ("SIGKILL" in end)
    assert waiting.cancelled()
    assert len(process_ids) == 1
    assert not child.is_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    "waiting", [f"call('{HERE}:wait', {{}}, show)", f"Pool(1).submit('{HERE}:wait', {{}}, show).result()"]
)
def test_a_process_ends_with_its_parent(waiting):
    code = f"from sb3_ano.bench.pool import Pool, call; show = lambda pid: print(pid, flush=True); {waiting}"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    child.wait(timeout=20)
