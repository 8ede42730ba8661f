"""A gymnasium environment by its id, with one clear line where it cannot be had."""

import contextlib
import importlib
from collections.abc import Iterator

import gymnasium as gym
from gymnasium import error
from stable_baselines3.common.base_class import maybe_make_env

from sb3_ano.extras import missing_extra

# gymnasium says which package is missing, not which extra of this package brings it.
_EXTRA_OF_PACKAGE = {"mujoco": "mujoco", "ale": "atari", "envpool": "envpool", "box2d": "zoo", "pygame": "zoo"}


def make_env(env_id: str, verbose: int = 0) -> gym.Env:
    """Make an environment as SB3 does, that is, ready to be rendered to pictures.

    :param env_id: a registered id; Atari's are registered on demand
    :param verbose: 1 says that the environment is created from its name
    :raises ValueError: if the id is not registered
    :raises MissingExtraError: if the environment needs a package that is not installed
    """
    with explained_env_errors(env_id):
        if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
            _register_atari()
        return maybe_make_env(env_id, verbose)  # type: ignore[return-value]


@contextlib.contextmanager
def explained_env_errors(env_id: str | None = None) -> Iterator[None]:
    """Turn gymnasium's errors about unknown environments and missing packages into ours."""
    try:
        yield
    except error.UnregisteredEnv as unknown:
        name = "" if env_id is None else f"={env_id!r}"
        raise ValueError(f"env{name} is not a registered environment: {unknown}") from unknown
    except error.DependencyNotInstalled as missing:
        for package, extra in _EXTRA_OF_PACKAGE.items():
            if package in str(missing).lower():
                raise missing_extra(extra, package) from missing
        raise


def _register_atari() -> None:
    try:
        gym.register_envs(importlib.import_module("ale_py"))
    except ImportError as missing:
        raise missing_extra("atari", "ale-py") from missing
