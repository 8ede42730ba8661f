"""A gymnasium environment by its id, with one clear line where it cannot be had."""

import contextlib
import difflib
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium as gym
from gymnasium import error
from gymnasium.envs.registration import load_env_creator
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
    prepare_env(env_id)
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


def prepare_env(env_id: str | Callable[..., gym.Env]) -> None:
    """Register Atari's environments and redirect MuJoCo's warnings, before an environment that needs it is made.

    :param env_id: id, or what returns the environment
    """
    if isinstance(env_id, str):
        register_atari(env_id)
    # MuJoCo is imported only for environments that import it themselves.
    if "mujoco" in sys.modules or "mujoco" in str(getattr(gym.registry.get(str(env_id)), "entry_point", "")):
        with contextlib.suppress(ImportError):  # which gymnasium explains
            mujoco = importlib.import_module("mujoco")
            if mujoco.get_mju_user_warning() is None:
                mujoco.set_mju_user_warning(_show_mujoco_warning)


def _show_mujoco_warning(message: str) -> None:
    """Show a warning of MuJoCo as one of Python's; its own way is a line per environment, and the file MUJOCO_LOG.TXT."""
    _warn_once(message.partition(" Time = ")[0].strip())


@functools.cache
def _warn_once(message: str) -> None:
    try:
        warnings.warn(message, stacklevel=3)
    except UserWarning:
        # An exception that leaves a callback of MuJoCo ends the process.
        print(f"MuJoCo: {message}", file=sys.stderr)


def settings_of(env_id: str | Callable[..., gym.Env]) -> list[str]:
    """Names of the settings of an environment, as far as its constructor names them."""
    creator: Any = gym.spec(env_id).entry_point if isinstance(env_id, str) else env_id
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    return list(inspect.signature(creator).parameters)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The part of an error message that names up to three candidates near to ``name``; empty without any."""
    near = difflib.get_close_matches(name, candidates, n=3)
    return f", did you mean {' or '.join(map(repr, near))}?" if near else ""


def unknown_settings(keys: Iterable[str], task: str, known: Iterable[str]) -> TypeError:
    """The error for keys of ``env_kwargs`` that a task does not know."""
    keys = sorted(keys)
    hint = did_you_mean(keys[0], known)
    return TypeError(f"env_kwargs has keys that {task} does not know: {', '.join(keys)}{hint}")
