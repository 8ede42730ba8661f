"""The key ``backend`` of the zoo's hyperparameters: environments of ``make_vec_env`` instead of the zoo's own."""

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import rl_zoo3.utils
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import make_vec_env
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.envs.make import prepare_env
from sb3_ano.zoo.fixes import replace_everywhere

# Arguments of SB3's AtariWrapper that have other names in our protocol.
_RENAMED = {"terminal_on_life_loss": "episodic_life", "action_repeat_probability": "repeat_action_probability"}


class Backend(NamedTuple):
    """Describe where the environments of an experiment come from.

    :param env_id: gymnasium's id, which the zoo uses
    :param name: one of ``sb3_ano.envs.BACKENDS``
    :param env_kwargs: settings of the task that follow from the hyperparameters, in addition to their ``env_kwargs``
    """

    env_id: str
    name: str
    env_kwargs: dict[str, Any]

    def vec_env_class(self, *, env_kwargs: Any, vec_env_cls: Any, **arguments: Any) -> Callable[..., VecEnv]:
        """Return a function for the zoo to call instead of a class of vectorized environments.

        The zoo gives it a list of functions, of which only the number counts. What the zoo wraps around the result, such as
        VecNormalize and frame stacks, stays the zoo's.

        :param env_kwargs: settings of the task, or None
        :param vec_env_cls: class of the result; the zoo's default, ``DummyVecEnv``, leaves the choice to the backend
        :param arguments: other arguments of ``make_vec_env``
        """
        arguments["env_kwargs"] = {**self.env_kwargs, **(env_kwargs or {})}
        arguments["vec_env_cls"] = None if vec_env_cls is DummyVecEnv else vec_env_cls

        def make(env_fns: list[Any], **vec_env_kwargs: Any) -> VecEnv:
            return make_vec_env(self.env_id, len(env_fns), vec_env_kwargs=vec_env_kwargs, backend=self.name, **arguments)

        return make


def take_backend(hyperparams: dict[str, Any], env_id: str) -> Backend | None:
    """Remove the key ``backend`` from hyperparameters, and what the backend does itself for Atari games.

    For Atari games, SB3's AtariWrapper and ``frame_stack`` describe the protocol that the backend plays. Wrapped around the
    backend's environments they would act twice.

    :param hyperparams: hyperparameters in the zoo's format
    :param env_id: id of the environment
    :return: the backend, or None if the key is missing
    """
    if "backend" not in hyperparams:
        return None
    backend = Backend(env_id, hyperparams.pop("backend"), {})
    if not ExperimentManager.is_atari(env_id) or atari_protocol(env_id) is None:
        return backend
    wrappers = hyperparams.get("env_wrapper") or []
    wrappers = wrappers if isinstance(wrappers, list) else [wrappers]
    named = [next(iter(wrapper.items())) if isinstance(wrapper, dict) else (wrapper, {}) for wrapper in wrappers]
    if [name for name, _ in named] in (["stable_baselines3.common.atari_wrappers.AtariWrapper"], [AtariWrapper]):
        backend.env_kwargs.update({_RENAMED.get(name, name): value for name, value in (named[0][1] or {}).items()})
        del hyperparams["env_wrapper"]
        hyperparams.setdefault("frame_stack", 1)
    if not hyperparams.get("env_wrapper") and "frame_stack" in hyperparams:
        backend.env_kwargs["frame_stack"] = hyperparams.pop("frame_stack")
    return backend


@functools.cache
def register_backends() -> None:
    """Teach the zoo's ``create_test_env`` the keys ``backend`` and ``env_kwargs``; without them it does what it did."""
    original = rl_zoo3.utils.create_test_env
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_test_env(*args: Any, **kwargs: Any) -> VecEnv:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        prepare_env(given["env_id"])
        hyperparams = given["hyperparams"] = given["hyperparams"] or {}
        # Settings of the file and of -params, which enjoy has moved already; the zoo's other commands forget them.
        given["env_kwargs"] = {**(hyperparams.pop("env_kwargs", None) or {}), **(given["env_kwargs"] or {})}
        backend = take_backend(hyperparams, given["env_id"])
        if backend is not None:
            if given["should_render"]:
                given["env_kwargs"] = {"render_mode": "human", **given["env_kwargs"]}
                backend = backend._replace(name="gymnasium")  # the only one that can show the environment
            given["vec_env_cls"] = backend.vec_env_class(
                seed=given["seed"],
                monitor_dir=given["log_dir"],
                wrapper_class=rl_zoo3.utils.get_wrapper_class(hyperparams),
                env_kwargs=given["env_kwargs"],
                vec_env_cls=given["vec_env_cls"],
            )
        return original(**given)

    replace_everywhere(ExitStack(), rl_zoo3.utils, "create_test_env", create_test_env)  # until the process ends
