"""One contender in a process of its own, told what to do by lines of JSON.

Run by its path, in any interpreter that has the contender's library: it imports this package only for contenders of this
package. The first line is the specification that :func:`sb3_ano.bench.processes.specification` makes, each further one a
request; every line is answered by one line.
"""

import contextlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata, util
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

Specification = dict[str, Any]
Reply = dict[str, Any]
_PACKAGES = ("torch", "stable-baselines3", "sb3-ano", "sbx-rl", "jax", "gymnasium", "mujoco", "envpool", "ale-py", "numpy")


class Stopwatch:
    """Seconds spent in the functions that it wraps; a call inside another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._running = False

        return timed


class _TimedActor:
    """An actor whose calls are timed; everything else is its own."""

    def __init__(self, actor: Any, watch: Stopwatch) -> None:
        self._actor = actor
        self._timed = watch.wrap(actor)

    def __call__(self, observations: Any) -> Any:
        return self._timed(observations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


class Session:
    """The contender of one process.

    :param specification: case, contender, threads, device and seed
    """

    def __init__(self, specification: Specification) -> None:
        self._case: dict[str, Any] = specification["case"]
        self._contender: dict[str, Any] = specification["contender"]
        self._threads: dict[str, int] = specification["threads"]
        self._device: str = specification["device"]
        self._seed: int = specification["seed"]
        self._model: Any = None
        self._random_actions: list[np.ndarray] = []
        torch.set_num_threads(self._threads["torch"])
        self._algorithm = self._import_algorithm()
        if self._case["atari"] and util.find_spec("ale_py"):
            gym.register_envs(import_module("ale_py"))

    def _import_algorithm(self) -> Any:
        if self._contender["envs"] == "ano":
            import_module("sb3_ano.envs")
        if self._contender["library"] == "sb3":
            return PPO
        return import_module("sbx").PPO if self._contender["library"] == "sbx" else import_module("sb3_ano").ANO

    def describe(self) -> Reply:
        """Versions, and the memory of the process before anything is built."""
        return {"python": platform.python_version(), "versions": versions(), "rss_bytes": peak_rss(), "pid": os.getpid()}

    def _make_env(self) -> VecEnv | str:
        case, ours = self._case, self._contender["envs"] == "ano"
        env_id, n_envs = case["env_id" if ours else "sb3_env_id"], case["n_envs"]
        if n_envs is None:
            return env_id
        if ours:
            return import_module("sb3_ano.envs").make_vec_env(
                env_id, n_envs, seed=self._seed, num_threads=self._threads["envs"]
            )
        if case["atari"]:
            return VecFrameStack(make_atari_env(env_id, n_envs, seed=self._seed), 4)
        return make_vec_env(env_id, n_envs, seed=self._seed)

    def _build(self) -> None:
        arguments = {**self._case["settings"], **self._contender["options"], "seed": self._seed}
        if self._contender["library"] != "sbx":  # whose device is JAX's own choice
            arguments["device"] = self._device
        self._model = self._algorithm(self._case["policy"], self._make_env(), **arguments)
        self._model.set_logger(Logger(None, []))

    def build(self) -> Reply:
        """Make environments and model."""
        self._build()
        if self._contender["env_only"]:
            env = self._model.get_env()
            env.action_space.seed(self._seed)
            self._random_actions = [
                np.stack([env.action_space.sample() for _ in range(env.num_envs)]) for _ in range(self._model.n_steps)
            ]
            env.reset()
        return {"device": str(self._model.device), "steps_per_iteration": self._model.n_steps * self._model.n_envs}

    def _advance(self, iterations: int) -> int:
        """Whole iterations of collection and update; returns environment steps."""
        steps = iterations * self._model.n_steps * self._model.n_envs
        if self._contender["env_only"]:
            env = self._model.get_env()
            for _ in range(iterations):
                for actions in self._random_actions:
                    env.step(actions)
        else:
            self._model.learn(steps, reset_num_timesteps=False)
        return steps

    def run(self, iterations: int) -> Reply:
        """Train for whole iterations.

        :param iterations: rollouts with their updates
        :return: ``seconds``, environment ``steps``, peaks of memory in bytes
        """
        start = time.perf_counter()
        steps = self._advance(iterations)
        self._wait_for_device()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "steps": steps, "rss_bytes": peak_rss(), "children_rss_bytes": _rss_of_children()}

    def whole(self, steps: int) -> Reply:
        """Construct a model and train it.

        :param steps: environment steps
        :return: ``seconds`` from before the construction until after ``learn``, of these ``construction_seconds``
        """
        start = time.perf_counter()
        self._build()
        built = time.perf_counter()
        self._model.learn(steps)
        self._wait_for_device()
        return {
            "seconds": time.perf_counter() - start,
            "construction_seconds": built - start,
            "steps": self._model.num_timesteps,
            "rss_bytes": peak_rss(),
            "children_rss_bytes": _rss_of_children(),
        }

    def profile(self, iterations: int, parts: bool = True) -> Reply:
        """Train for whole iterations with stopwatches inside.

        :param iterations: rollouts with their updates
        :param parts: also time environment and forward passes, at every step
        :return: seconds in ``collect``, ``update``, ``env`` and ``forward``, and in all
        """
        watches = {name: Stopwatch() for name in ("collect", "update", "env", "forward")}
        with contextlib.ExitStack() as stack:
            for owner, name, wrapped in self._instruments(watches, parts):
                stack.enter_context(_replaced(owner, name, wrapped))
            reply = self.run(iterations)
        return reply | {name: watch.seconds for name, watch in watches.items()}

    def _instruments(self, watches: dict[str, Stopwatch], parts: bool) -> list[tuple[Any, str, Any]]:
        """Owner, attribute and timed replacement of everything that a profile looks into."""
        model = self._model
        instruments = [
            (model, "collect_rollouts", watches["collect"].wrap(model.collect_rollouts)),
            (model, "train", watches["update"].wrap(model.train)),
        ]
        if not parts:
            return instruments
        env = model.get_env()
        for name in ("step", "step_async", "step_wait"):
            instruments.append((env, name, watches["env"].wrap(getattr(env, name))))
        rollout = sys.modules.get("sb3_ano.algorithms.rollout") if self._contender["library"] == "ano" else None
        if rollout is not None and hasattr(rollout, "make_actor"):
            make_actor = rollout.make_actor
            instruments.append(
                (rollout, "make_actor", lambda *of, **how: _TimedActor(make_actor(*of, **how), watches["forward"]))
            )
        elif self._contender["library"] != "sbx":
            instruments.append((model.policy, "forward", watches["forward"].wrap(model.policy.forward)))
        return instruments

    def _wait_for_device(self) -> None:
        if getattr(self._model.device, "type", "cpu") == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Shadow an attribute for the length of the block."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def versions() -> dict[str, str]:
    """Versions of the packages that matter for speed, where they are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def peak_rss() -> int:
    """The most memory that this process has had resident, in bytes."""
    try:
        with open("/proc/self/status") as status:
            # On Linux ru_maxrss starts at the memory of the parent.
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _rss_of_children() -> int:
    """The most that one finished child, such as a compiler, has had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Answer the lines of standard input until it ends."""
    # Libraries print; what they print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session: Session | None = None
    answered = time.process_time()
    for line in sys.stdin:
        idle = time.process_time() - answered
        request = json.loads(line)
        try:
            if session is None:
                session = Session(request)
                reply = session.describe()
            else:
                reply = getattr(session, request.pop("do"))(**request) | {"idle_cpu_seconds": idle}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
        answered = time.process_time()
    return 0


if __name__ == "__main__":
    sys.exit(main())
