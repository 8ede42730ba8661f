"""Python environments in processes that step several of them each."""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from sb3_ano._system import cores
from sb3_ano.envs.atari import require_integer
from sb3_ano.envs.direct import DirectVecEnv

# Seconds for environments to close before their process is killed.
_SECONDS_TO_CLOSE = 5.0

# Observations of all environments by the keys of SB3's buffers: those of a Dict, numbers of a Tuple, None of other spaces.
_Memory: TypeAlias = dict[str, ctypes.Array[ctypes.c_ubyte]]


class ProcessVecEnv(SubprocVecEnv):
    """SB3's ``SubprocVecEnv`` with several environments per process, and observations in shared memory.

    Observations, rewards, dones and infos are the same; observations have the type of their space. A step sends one message to
    each process, and one back. The first environment is also made in this process, and closed, because its space is needed.

    An error of an environment is raised here as one line, with its traceback as a note. After an error in a step or a reset,
    or if a process ends or does not answer, all processes are ended.

    :param env_fns: functions that each make one environment
    :param start_method: start method of the processes: ``"forkserver"``, ``"spawn"`` (for Windows) or ``"fork"``
    :param n_workers: number of processes; None: one per processor. There are at most as many as environments
    :param timeout: seconds to wait for an answer; None waits without end
    """

    def __init__(
        self,
        env_fns: list[Callable[[], gym.Env]],
        start_method: str = "forkserver",
        n_workers: int | None = None,
        timeout: float | None = 300.0,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        # PyTorch and SB3 are imported once, and not by each process.
        context.set_forkserver_preload(["__main__", __name__])

        n_envs = len(env_fns)
        if n_workers is not None:
            require_integer("n_workers", n_workers)
        n_workers = min(n_workers or cores(), n_envs)

        # A worker cannot be given memory after its start, and the spaces tell how much it needs.
        env = env_fns[0]()
        env.close()

        self._observations: dict[str, np.ndarray] = {}
        memory: _Memory = {}
        keys, shapes, dtypes = obs_space_info(env.observation_space)
        for key in keys:
            shape = (n_envs, *shapes[key])
            size = int(np.prod(shape)) * dtypes[key].itemsize
            # It has no name, and the system frees it when the last process has ended, whatever ends it.
            memory[key] = context.RawArray(ctypes.c_ubyte, size)
            flat = np.frombuffer(memoryview(memory[key]), dtypes[key])
            self._observations[key] = flat.reshape(shape)

        self.closed = False
        self._workers: list[_Worker] = []
        #: The pipes of the single environments, for the methods of SubprocVecEnv.
        self.remotes: list[Any] = []
        try:
            for number in range(n_workers):
                # Parts of equal size, or sizes that differ by one.
                start = number * n_envs // n_workers
                end = (number + 1) * n_envs // n_workers
                rows = slice(start, end)
                worker = _Worker(context, env_fns[rows], memory, rows, timeout)
                self._workers.append(worker)

                for row in range(end - start):
                    self.remotes.append(_Remote(self, worker, row))

            # SubprocVecEnv's constructor would start a process for each environment.
            VecEnv.__init__(self, n_envs, env.observation_space, env.action_space)
        except BaseException:
            # The caller has no object to close.
            self.close()
            raise

    def reset(self) -> VecEnvObs:
        """Reset all environments, with their seeds and options if those were set."""
        # All are asked before the first answer is read, so that they work at the same time.
        for worker in self._workers:
            data = (self._seeds[worker.rows], self._options[worker.rows])
            worker.send("reset", data)

        # SB3's seeds and options are for one reset.
        self._reset_seeds()
        self._reset_options()

        for worker in self._workers:
            self.reset_infos[worker.rows] = self.receive(worker, is_step=True)
        return self._observed()

    def step_async(self, actions: np.ndarray) -> None:
        """Start a step of all environments.

        :param actions: shape ``(n_envs, ...)``
        """
        for worker in self._workers:
            part = actions[worker.rows]
            # A pickled array takes ten times as long.
            worker.send("step", (part.tobytes(), part.dtype.str, part.shape))

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step; environments that are done are reset in it.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float64, dones ``(n_envs,)`` bool, infos
        """
        rewards = np.zeros(self.num_envs)
        dones = np.zeros(self.num_envs, dtype=bool)
        infos: list[dict[str, object]] = []
        for worker in self._workers:
            rows = worker.rows
            answer = self.receive(worker, is_step=True)
            rewards[rows], dones[rows], worker_infos, self.reset_infos[rows] = answer
            infos += worker_infos
        return self._observed(), rewards, dones, infos

    def _observed(self) -> VecEnvObs:
        # Copies, because the next step writes into the shared memory, while SB3 still has this step's observations.
        copies = {key: shared.copy() for key, shared in self._observations.items()}
        return dict_to_obs(self.observation_space, copies)

    def receive(self, worker: "_Worker", is_step: bool = False) -> Any:
        """Read the next answer of a worker.

        :param worker: worker
        :param is_step: whether an error of an environment ends all processes
        :raises RuntimeError: if an environment raised an error, or the process has ended or does not answer
        """
        try:
            answer = worker.receive()
        except BaseException:
            # Also after Ctrl+C, because answers that come later would be taken for others.
            self.close()
            raise

        if not isinstance(answer, Exception):
            return answer

        # After half a step, the environments of this process and of the others have different numbers of steps.
        if is_step:
            self.close()

        # Other answers to the same call, which would be taken for those to the next one.
        for other in self._workers:
            while other.unread and not self.closed:
                with contextlib.suppress(type(answer)):
                    self.receive(other)
        raise answer

    def close(self) -> None:
        """Close all environments, and end their processes; a second call does nothing."""
        self.closed = True
        # A worker whose pipe ends closes its environments.
        for worker in self._workers:
            worker.pipe.close()

        # One limit for all, because they close at the same time.
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for worker in self._workers:
            remaining = max(0.0, deadline - time.monotonic())
            worker.process.join(remaining)
            worker.process.kill()
            worker.process.join()


class _Worker:
    """A process with some environments, as seen by the one that uses them."""

    def __init__(
        self,
        context: BaseContext,
        env_fns: list[Callable[[], gym.Env]],
        memory: _Memory,
        rows: slice,
        timeout: float | None,
    ) -> None:
        self.rows = rows
        self.timeout = timeout
        #: Answers that were not read yet.
        self.unread = 0

        self.pipe, theirs = context.Pipe()
        # A function need not be importable, as SB3 promises.
        arguments = (theirs, self.pipe, CloudpickleWrapper(env_fns), memory, rows)
        self.process = context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()

        # Without this end, a read notices when the process ends.
        theirs.close()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.pipe, selectors.EVENT_READ)

    def send(self, command: str, data: object, row: int = 0) -> None:
        # A process that has ended is noticed when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            message = pickle.dumps((command, data, row))
            self.pipe.send_bytes(message)
        self.unread += 1

    def receive(self) -> Any:
        try:
            if self.selector.select(self.timeout):
                answer = self.pipe.recv()
                self.unread -= 1
                return answer

            lost = f"has not answered within {self.timeout} s"
            self.process.kill()
        except (EOFError, ConnectionResetError):
            self.process.join(_SECONDS_TO_CLOSE)
            lost = f"has ended with exit code {self.process.exitcode}"

        raise RuntimeError(f"the process of {_shown(self.rows)} {lost}; all processes of these environments were ended")


class _Remote:
    """Stand in for the pipe of a single environment, which the methods of SubprocVecEnv use."""

    def __init__(self, venv: ProcessVecEnv, worker: _Worker, row: int) -> None:
        self._venv = venv
        self._worker = worker
        self._row = row

    def send(self, command: tuple[str, object]) -> None:
        self._worker.send(*command, self._row)

    def recv(self) -> Any:
        return self._venv.receive(self._worker)


def _shown(rows: slice) -> str:
    return f"environments {rows.start} to {rows.stop - 1}"


def _work(remote: Connection, ours: Connection, env_fns: CloudpickleWrapper, memory: _Memory, rows: slice) -> None:
    """Answer commands until the other end of the pipe is closed.

    :param remote: this process's end of the pipe
    :param ours: the other end, which a forked process has too
    :param env_fns: functions that each make one environment
    :param memory: observations of all environments
    :param rows: rows of these environments
    """
    ours.close()
    # Ctrl+C is for the process that reads the answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    venv: DirectVecEnv | None = None
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            command, data, row = remote.recv()
            try:
                # Made here instead of before the loop, so that an error is the answer to a command.
                if venv is None:
                    venv = DirectVecEnv(env_fns.var)
                    _share(venv, memory, rows)
                answer = pickle.dumps(_answer(venv, command, data, row))
            except Exception as error:
                # has_attr catches AttributeError. The error itself may not be picklable.
                kind: type[Exception] = RuntimeError
                if isinstance(error, AttributeError):
                    kind = AttributeError
                reason = " ".join(str(error).split())
                line = kind(f"{_shown(rows)}: {type(error).__name__}: {reason}")
                line.add_note(f"In the process of these environments:\n{traceback.format_exc()}")
                answer = pickle.dumps(line)
            remote.send_bytes(answer)

    if venv is not None:
        venv.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Of a parent that was killed, which could not end its daemons.
        parent.join()
        # First, the environments are closed, unless one hangs.
        time.sleep(_SECONDS_TO_CLOSE)
        os._exit(1)


def _share(venv: DirectVecEnv, memory: _Memory, rows: slice) -> None:
    """Let environments observe into shared memory, and keep rewards as exact as SubprocVecEnv does."""
    for key, buffer in venv.buf_obs.items():
        shared = np.frombuffer(memoryview(memory[key]), buffer.dtype)
        venv.buf_obs[key] = shared.reshape(-1, *buffer.shape[1:])[rows]

    # DummyVecEnv's are float32.
    venv.buf_rews = np.zeros(venv.num_envs)  # type: ignore[assignment]


def _answer(venv: DirectVecEnv, command: str, data: Any, row: int) -> Any:
    if command == "step":
        raw, kind, shape = data
        # Of a bytearray, the array is writable: an environment may clip its action in place.
        actions = np.frombuffer(bytearray(raw), kind).reshape(shape)
        _, rewards, dones, infos = venv.step(actions)
        # Lists take less time to pickle than small arrays.
        return rewards.tolist(), dones.tolist(), infos, venv.reset_infos

    if command == "reset":
        # The parent has forgotten them, and the reset of this VecEnv forgets them, too.
        venv._seeds, venv._options = data
        venv.reset()
        return venv.reset_infos

    # The commands of SubprocVecEnv's methods.
    env = venv.envs[row]
    if command == "render":
        return env.render()
    if command == "has_attr":
        return env.has_wrapper_attr(data)
    if command == "get_attr":
        return env.get_wrapper_attr(data)
    if command == "set_attr":
        return setattr(env, *data)
    if command == "is_wrapped":
        return is_wrapped(env, data)

    # "env_method"
    name, arguments, options = data
    return env.get_wrapper_attr(name)(*arguments, **options)
