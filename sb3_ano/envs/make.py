"""A gymnasium environment by its id, with one clear line where it cannot be had."""

import contextlib
import importlib
import re
from collections.abc import Iterator

import gymnasium as gym
from gymnasium import error
from stable_baselines3.common.base_class import maybe_make_env

from sb3_ano.extras import missing_extra

# gymnasium says which package is missing, not which extra of this package brings it.
_EXTRA_OF_PACKAGE = {"mujoco": "mujoco", "ale_py": "atari", "ale-py": "atari", "box2d": "zoo", "pygame": "zoo"}


def make_env(env_id: str, verbose: int = 0) -> gym.Env:
    """Make an environment as SB3 does, that is, ready to be rendered to pictures.

    :param env_id: a registered id; Atari's are registered on demand
    :param verbose: 1 says that the environment is created from its name
    :raises ValueError: if the id is not registered, or malformed
    :raises MissingExtraError: if the environment needs a package that is not installed
    """
    register_atari(env_id)
    try:
        with explained_missing_packages():
            return maybe_make_env(env_id, verbose)  # type: ignore[return-value]
    except error.DependencyNotInstalled:
        raise
    except error.Error as unknown:
        raise ValueError(f"env={env_id!r} is not a registered environment: {unknown}") from unknown


@contextlib.contextmanager
def explained_missing_packages() -> Iterator[None]:
    """Turn gymnasium's errors about missing packages into ours, which name the extra.

    :raises MissingExtraError: in place of gymnasium's error, for the packages that an extra brings
    """
    try:
        yield
    except error.DependencyNotInstalled as missing:
        for package, extra in _EXTRA_OF_PACKAGE.items():
            if re.search(rf"\b{package}\b", str(missing).lower()):
                raise missing_extra(extra, package) from missing
        raise


def register_atari(env_id: str) -> None:
    """Register Atari's environments if ``env_id`` is one of them; does nothing for others.

    :raises MissingExtraError: if ale-py is not installed
    """
    if not (env_id.startswith("ALE/") or "NoFrameskip" in env_id):
        return
    try:
        gym.register_envs(importlib.import_module("ale_py"))
    except ImportError as missing:
        raise missing_extra("atari", "ale-py") from missing
