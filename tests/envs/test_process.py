"""Environments in processes: failures, and ``make_vec_env(..., backend="process")``."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano import MaskableANO
from sb3_ano.envs import ProcessVecEnv, make_vec_env
from tests.common import ROOT, variables
from tests.envs.contract_envs import Reporting

multiprocessing.set_forkserver_preload(["sb3_ano.envs.process", "tests.envs.contract_envs"])


class Broken(Reporting):
    """Fail in one of several ways when it is made, reset, or stepped.

    :param where: ``"make"``, ``"reset"`` or ``"step"``
    :param how: ``"raise"`` or ``"hang"``
    """

    def __init__(self, where: str, how: str = "raise") -> None:
        super().__init__()
        self.where = where
        self.how = how
        self.fail_in("make")

    def fail_in(self, place: str) -> None:
        if self.where == place and self.how == "raise":
            raise KeyError(f"broken\nin {place}")
        if self.where == place:
            time.sleep(1000.0)

    def reset(self, **options: Any) -> Any:
        self.fail_in("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.fail_in("step")
        return super().step(action)


@pytest.fixture
def children():
    """Return the processes of workers, of which none is left at the end of the test."""
    found: list[psutil.Process] = []

    def collect(env: ProcessVecEnv) -> list[psutil.Process]:
        found.extend(psutil.Process(worker.process.pid) for worker in env._workers)
        return found

    yield collect
    _, alive = psutil.wait_procs(found, timeout=10)
    assert alive == []


def run(env: ProcessVecEnv) -> None:
    env.reset()
    env.step(np.zeros(env.num_envs, int))


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_error_of_an_environment_arrives_as_one_line_with_its_traceback(where, children):
    env = ProcessVecEnv([Reporting, Reporting, partial(Broken, where), Reporting], n_workers=2)
    children(env)
    with pytest.raises(RuntimeError) as raised:
        run(env)
    assert str(raised.value) == f"environments 2 to 3: KeyError: 'broken\\nin {where}'"
    (note,) = raised.value.__notes__
    assert f'self.fail_in("{where}")' in note
    with pytest.raises(OSError, match="closed"):
        env.reset()
    env.close()


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_environment_that_cannot_be_made_gives_one_line(how):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    expected = {
        "raise": "environments 1 to 1: KeyError: ",
        "hang": "the process of environments 1 to 1 has not answered within 3",
    }
    with pytest.raises(RuntimeError, match=expected[how]):
        ProcessVecEnv([Reporting, partial(Broken, "make", how)], n_workers=2, timeout=3.0)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in left if "forkserver" not in " ".join(child.cmdline())] == []


def test_a_killed_process_gives_one_line(children):
    env = ProcessVecEnv([Reporting] * 4, n_workers=2)
    env.reset()
    os.kill(children(env)[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="^the process of environments 2 to 3 has ended with exit code -9; all processes"):
        env.step(np.zeros(4, int))


def test_an_environment_that_hangs_gives_one_line(children):
    env = ProcessVecEnv([Reporting, partial(Broken, "step", "hang")], n_workers=2)
    children(env)
    env._workers[1].timeout = 0.5
    with pytest.raises(RuntimeError, match=r"^the process of environments 1 to 1 has not answered within 0\.5 s"):
        run(env)


PARENT = """
from functools import partial
import numpy as np
from sb3_ano.envs import ProcessVecEnv
from tests.envs.contract_envs import Reporting
from tests.envs.test_process import Broken

if __name__ == "__main__":
    env = ProcessVecEnv([Reporting, partial(Broken, "step", "hang")], n_workers=2)
    print(*(worker.process.pid for worker in env._workers), flush=True)
    env.reset()
    env.step(np.zeros(2, int))
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_parent_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables(PYTHONPATH=str(ROOT))
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(1.0)
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    # Python names shared memory after the process.
    assert [name for name in os.listdir("/dev/shm") if f"-{parent.pid}-" in name] == []


def test_make_vec_env_has_monitors_seeds_and_masks_in_processes(tmp_path):
    env = make_vec_env(Reporting, 3, seed=1, monitor_dir=tmp_path, backend="process", env_kwargs={"observations": "Dict"})
    expected = make_vec_env(Reporting, 3, seed=1, env_kwargs={"observations": "Dict"})
    assert (env.backend, len(env._workers), isinstance(env, SubprocVecEnv)) == ("process", min(os.cpu_count() or 1, 3), True)
    np.testing.assert_equal(env.reset(), expected.reset())
    model = MaskableANO("MultiInputPolicy", env, n_steps=32, batch_size=32, n_epochs=1).learn(192)
    assert len(model.ep_info_buffer) > 6
    env.close()
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == [f"{index}.monitor.csv" for index in range(3)]
    assert load_results(str(tmp_path))["l"].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vec_env_cls": SubprocVecEnv}, "vec_env_cls=.* is not allowed with backend 'process'"),
        ({"num_threads": 0}, "num_threads=0 is not allowed"),
        ({"env_id": "NoSuchEnv-v0"}, "env_id='NoSuchEnv-v0' is unknown to backend 'gymnasium'"),
    ],
)
def test_mistakes_give_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_vec_env(**{"env_id": "CartPole-v1", "n_envs": 2, "backend": "process", **arguments})
    with pytest.raises(ValueError, match="n_workers=0 is not allowed"):
        ProcessVecEnv([Reporting], n_workers=0)
