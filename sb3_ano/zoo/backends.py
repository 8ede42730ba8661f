"""The key ``backend`` of the zoo's hyperparameters: environments of ``make_vec_env`` instead of the zoo's own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import rl_zoo3.utils
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import make_vec_env
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.envs.make import prepare_env
from sb3_ano.zoo.hyperparameters import Hyperparameters

_ATARI_WRAPPERS: tuple[object, ...] = ("stable_baselines3.common.atari_wrappers.AtariWrapper", AtariWrapper)
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
    env_kwargs: Hyperparameters

    def vec_env_class(
        self, *, env_kwargs: Hyperparameters | None, vec_env_cls: object, **arguments: Any
    ) -> Callable[..., VecEnv]:
        """Return a function for the zoo to call instead of a class of vectorized environments.

        The zoo gives it a list of functions, of which only the number counts. What the zoo wraps around the result, such as
        VecNormalize and frame stacks, stays the zoo's.

        :param env_kwargs: settings of the task, or None
        :param vec_env_cls: class of the result; the zoo's default, ``DummyVecEnv``, leaves the choice to the backend
        :param arguments: other arguments of ``make_vec_env``
        """
        arguments["env_kwargs"] = {**self.env_kwargs, **(env_kwargs or {})}
        # Every user has the default, so that it says nothing.
        if vec_env_cls is not DummyVecEnv:
            arguments["vec_env_cls"] = vec_env_cls

        def make(env_fns: list[object], **vec_env_kwargs: Any) -> VecEnv:
            return make_vec_env(self.env_id, len(env_fns), vec_env_kwargs=vec_env_kwargs, backend=self.name, **arguments)

        return make


def take_backend(hyperparams: Hyperparameters, env_id: str) -> Backend | None:
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

    # One wrapper, alone or in a list, with or without arguments
    wrapper = hyperparams.get("env_wrapper")
    if isinstance(wrapper, list) and len(wrapper) == 1:
        wrapper = wrapper[0]
    options: Hyperparameters = {}
    if isinstance(wrapper, dict) and len(wrapper) == 1:
        wrapper, options = next(iter(wrapper.items()))

    # Its arguments become settings of the task.
    if wrapper in _ATARI_WRAPPERS:
        for name, value in (options or {}).items():
            backend.env_kwargs[_RENAMED.get(name, name)] = value
        del hyperparams["env_wrapper"]
        # The protocol's own default is 4.
        hyperparams.setdefault("frame_stack", 1)
    # Above other wrappers, the zoo stacks the frames.
    if not hyperparams.get("env_wrapper") and "frame_stack" in hyperparams:
        backend.env_kwargs["frame_stack"] = hyperparams.pop("frame_stack")
    return backend


def make_agents_envs(
    env_id: str,
    n_envs: int,
    hyperparams: Hyperparameters,
    *,
    env_kwargs: Hyperparameters,
    stats_path: str | None = None,
    seed: int = 0,
    monitor_dir: str | None = None,
) -> VecEnv:
    """Make environments for a trained agent, as the zoo's ``create_test_env`` does, with the key ``backend``.

    :param env_id: gymnasium's id
    :param n_envs: number of environments
    :param hyperparams: hyperparameters of the training in the zoo's format
    :param env_kwargs: settings of the task
    :param stats_path: directory with the statistics of VecNormalize, or None
    :param seed: seed of the environments
    :param monitor_dir: directory for monitor files; None writes none
    """
    prepare_env(env_id)
    # The caller's keep the key.
    hyperparams = dict(hyperparams)
    vec_env_class: Any = ExperimentManager.default_vec_env_cls

    backend = take_backend(hyperparams, env_id)
    if backend is not None:
        if "render_mode" in env_kwargs:
            backend = backend._replace(name="gymnasium")  # the only one that can show every environment
        vec_env_class = backend.vec_env_class(
            seed=seed,
            monitor_dir=monitor_dir,
            wrapper_class=rl_zoo3.utils.get_wrapper_class(hyperparams),
            env_kwargs=env_kwargs,
            vec_env_cls=vec_env_class,
        )
    return rl_zoo3.utils.create_test_env(
        env_id,
        n_envs=n_envs,
        stats_path=stats_path,
        seed=seed,
        log_dir=monitor_dir,
        should_render=False,
        hyperparams=hyperparams,
        env_kwargs=env_kwargs,
        vec_env_cls=vec_env_class,
    )
