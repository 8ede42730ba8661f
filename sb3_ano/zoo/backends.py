"""The key ``backend`` of the zoo's hyperparameters: environments of ``make_vec_env`` in place of the zoo's own."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import make_vec_env
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.envs.make import prepare_env
from sb3_ano.extras import missing_extra

try:
    import rl_zoo3
    import rl_zoo3.utils
    from rl_zoo3 import exp_manager
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
# The arguments of SB3's wrapper, in the names of our protocol.
_ARGUMENTS = {
    "noop_max": "noop_max",
    "frame_skip": "frame_skip",
    "screen_size": "screen_size",
    "terminal_on_life_loss": "episodic_life",
    "clip_reward": "clip_reward",
    "action_repeat_probability": "repeat_action_probability",
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where the environments of an experiment come from.

    :param env_id: gymnasium's id, which the zoo goes by
    :param name: one of ``sb3_ano.envs.BACKENDS``
    :param env_kwargs: settings that the hyperparameters imply beside their ``env_kwargs``
    """

    env_id: str
    name: str
    env_kwargs: dict[str, Any]


_in_use: ContextVar[Backend | None] = ContextVar("_in_use", default=None)


def register_backends() -> None:
    """Teach the zoo's training and its ``enjoy`` the key ``backend``; calling it again changes nothing.

    The zoo asks SB3's ``make_vec_env`` for its environments. In place of it stands a function that looks for the backend of
    the experiment; what the zoo wraps around them, such as VecNormalize, stays the zoo's.
    """
    if hasattr(ExperimentManager.create_envs, "__wrapped__"):
        return
    ExperimentManager._preprocess_hyperparams = _take_backend(ExperimentManager._preprocess_hyperparams)
    ExperimentManager.create_envs = _use_backend(ExperimentManager.create_envs)
    original = rl_zoo3.utils.create_test_env
    for module in (exp_manager, rl_zoo3.utils):
        module.make_vec_env = _look_for_backend(module.make_vec_env)
    # Modules that were imported before this one hold the function under the same name.
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "rl_zoo3" and getattr(module, "create_test_env", None) is original:
            module.create_test_env = _test_with_backend(original)  # type: ignore[attr-defined]


def _backend_in(hyperparams: dict[str, Any], env_id: str) -> Backend | None:
    """Take the key ``backend`` out of the hyperparameters, and for Atari games what the backend does itself.

    With SB3's AtariWrapper and ``frame_stack`` a file says the same as our protocol, which the backend plays; on top of it
    they would act twice.
    """
    if "backend" not in hyperparams:
        return None
    name = hyperparams.pop("backend")
    env_kwargs: dict[str, Any] = {}
    if ExperimentManager.is_atari(env_id) and atari_protocol(env_id) is not None:
        wrapper_kwargs = _atari_wrapper_kwargs(hyperparams.get("env_wrapper"))
        if wrapper_kwargs is not None:
            unknown = sorted(set(wrapper_kwargs) - set(_ARGUMENTS))
            if unknown:
                raise ValueError(f"AtariWrapper has no argument {', '.join(unknown)}; allowed are {', '.join(_ARGUMENTS)}")
            env_kwargs = {_ARGUMENTS[key]: value for key, value in wrapper_kwargs.items()}
            del hyperparams["env_wrapper"]
            env_kwargs["frame_stack"] = hyperparams.pop("frame_stack", 1)
        elif not hyperparams.get("env_wrapper") and "frame_stack" in hyperparams:
            env_kwargs["frame_stack"] = hyperparams.pop("frame_stack")
    return Backend(env_id, name, env_kwargs)


def _atari_wrapper_kwargs(env_wrapper: Any) -> dict[str, Any] | None:
    """The arguments of SB3's AtariWrapper if it is the only wrapper; otherwise None."""
    wrappers = env_wrapper if isinstance(env_wrapper, list) else [env_wrapper]
    if wrappers == [_ATARI_WRAPPER]:
        return {}
    if len(wrappers) == 1 and isinstance(wrappers[0], dict) and list(wrappers[0]) == [_ATARI_WRAPPER]:
        return wrappers[0][_ATARI_WRAPPER] or {}
    return None


@contextlib.contextmanager
def _using(backend: Backend | None) -> Iterator[None]:
    token = _in_use.set(backend)
    try:
        yield
    finally:
        _in_use.reset(token)


def _take_backend(preprocess: Any) -> Any:
    @functools.wraps(preprocess)
    def _preprocess_hyperparams(self: ExperimentManager, hyperparams: dict[str, Any]) -> Any:
        self.backend = _backend_in(hyperparams, self.env_name.gym_id)
        return preprocess(self, hyperparams)

    return _preprocess_hyperparams


def _use_backend(create: Any) -> Any:
    @functools.wraps(create)
    def create_envs(self: ExperimentManager, *args: Any, **kwargs: Any) -> VecEnv:
        prepare_env(self.env_name.gym_id)
        with _using(getattr(self, "backend", None)):
            return create(self, *args, **kwargs)

    return create_envs


def _test_with_backend(create: Any) -> Callable[..., VecEnv]:
    @functools.wraps(create)
    def create_test_env(
        env_id: str,
        n_envs: int = 1,
        stats_path: str | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        should_render: bool = True,
        hyperparams: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> VecEnv:
        prepare_env(env_id)
        hyperparams = hyperparams if hyperparams is not None else {}
        backend = _backend_in(hyperparams, env_id)
        if backend is not None and should_render and backend.name in ("envpool", "ale"):
            backend = _rendering(backend)
        if backend is not None and kwargs.get("vec_env_cls") is None:
            kwargs["vec_env_cls"] = DummyVecEnv  # which is replaced; the zoo would take processes for several environments
        with _using(backend):
            return create(env_id, n_envs, stats_path, seed, log_dir, should_render, hyperparams, **kwargs)

    return create_test_env


def _rendering(backend: Backend) -> Backend:
    """gymnasium in place of a backend that has no window to show.

    :raises ValueError: if observations would differ there
    """
    shown = dataclasses.replace(backend, name="gymnasium")
    spaces = []
    for one in (backend, shown):
        env = make_vec_env(one.env_id, backend=one.name, env_kwargs=one.env_kwargs)
        spaces.append(env.observation_space)
        env.close()
    if spaces[0] != spaces[1]:
        raise ValueError(
            f"{backend.env_id} cannot be shown: gymnasium's observations ({spaces[1]}) are not those of "
            f"backend {backend.name!r} ({spaces[0]}); use --no-render"
        )
    return shown


def _look_for_backend(make: Any) -> Callable[..., VecEnv]:
    @functools.wraps(make)
    def make_envs(env_id: Any, n_envs: int = 1, **kwargs: Any) -> VecEnv:
        backend = _in_use.get()
        if backend is None:
            return make(env_id, n_envs=n_envs, **kwargs)
        if kwargs.get("vec_env_cls") is DummyVecEnv:  # the zoo's default
            kwargs["vec_env_cls"] = None
        kwargs["env_kwargs"] = backend.env_kwargs | (kwargs.get("env_kwargs") or {})
        return make_vec_env(backend.env_id, n_envs, backend=backend.name, **kwargs)

    return make_envs
