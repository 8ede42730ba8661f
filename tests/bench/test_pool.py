"""The process pool: results and errors come back, and no process outlives its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from sb3_ano.bench.pool import Pool, WorkerError

HERE = "tests.bench.test_pool"


def add(request):
    """Print, and return a sum."""
    print("libraries print")
    return {"sum": request["a"] + request["b"], "threads": [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]}


def fail(request):
    """Raise an error of two lines."""
    raise OSError(28, "No space left\non device")


def wait(request):
    """Write which process this is, and wait."""
    Path(request["file"]).write_text(f"{os.getpid()} ")
    time.sleep(600)


def hold_the_lock(request):
    """Write which process this is, and keep Python's lock in a call of C code."""
    Path(request["file"]).write_text(f"{os.getpid()} ")
    sum(range(10**12))


def started(file: Path) -> psutil.Process:
    while not file.exists() or not file.read_text().endswith(" "):
        time.sleep(0.05)
    return psutil.Process(int(file.read_text()))


def test_results_and_errors_come_back():
    pool = Pool(2, threads=3)
    added, failed = (pool.submit(f"{HERE}:{name}", {"a": 2, "b": 3}) for name in ("add", "fail"))
    assert added.result() == {"sum": 5, "threads": [3, 3]}
    error = failed.exception()
    pool.close()
    assert str(error) == "OSError: [Errno 28] No space left on device"
    assert "Traceback" in error.details


@pytest.mark.slow
def test_closing_ends_running_processes_and_starts_no_other(tmp_path):
    pool = Pool(1)
    running, waiting = (pool.submit(f"{HERE}:hold_the_lock", {"file": str(tmp_path / name)}) for name in "ab")
    child = started(tmp_path / "a")
    begin = child.cpu_times().user
    while child.cpu_times().user < begin + 0.3:
        time.sleep(0.05)
    pool.close()
    with pytest.raises(WorkerError, match="its process was killed by SIGKILL"):
        running.result()
    assert waiting.cancelled()
    assert not child.is_running()
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("waiting", ["call(*work)", "Pool(1).submit(*work).result()"])
def test_a_process_ends_with_its_parent(waiting, tmp_path):
    work = f"work = '{HERE}:wait', {{'file': '{tmp_path / 'pid'}'}}"
    parent = subprocess.Popen([sys.executable, "-c", f"from sb3_ano.bench.pool import Pool, call; {work}; {waiting}"])
    child = started(tmp_path / "pid")
    parent.kill()
    parent.communicate()
    child.wait(timeout=20)
    assert not child.is_running()
