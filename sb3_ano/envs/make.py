"""A gymnasium environment by its id, with one clear line if it cannot be made."""

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import gymnasium as gym
from gymnasium import error
from stable_baselines3.common.base_class import maybe_make_env

from sb3_ano.extras import MissingExtraError, hint, missing_extra, needs_extra

# gymnasium names the missing package, but not the extra of this package that installs it.
_EXTRA_OF_PACKAGE = {"mujoco": "mujoco", "ale_py": "atari", "ale-py": "atari", "box2d": "zoo", "pygame": "zoo"}


def make_env(env_id: str, verbose: int = 0) -> gym.Env:
    """Make an environment as SB3 does, with ``render_mode="rgb_array"`` if the environment supports it.

    :param env_id: registered id; Atari ids are registered on demand
    :param verbose: 1: print that the environment is created from its name
    :raises ValueError: if the id is malformed or not registered, or gymnasium no longer has the environment
    :raises MissingExtraError: if the environment needs a package that is not installed
    """
    prepare_env(env_id)
    try:
        with explained_missing_packages():
            return maybe_make_env(env_id, verbose)  # type: ignore[return-value]
    except error.DependencyNotInstalled:
        # An error of gymnasium, too, of a package that no extra brings.
        raise
    except error.Error as unknown:
        raise ValueError(f"env={env_id!r} is not a registered environment: {unknown}") from unknown
    except ImportError as moved:
        # gymnasium's own, of environments that it no longer has, but not those of the user's imports.
        if isinstance(moved, ModuleNotFoundError | MissingExtraError):
            raise

        raise ValueError(f"env={env_id!r} cannot be made: {moved}") from moved


@contextlib.contextmanager
def explained_missing_packages() -> Iterator[None]:
    """Turn gymnasium's errors about missing packages into errors that name the extra to install.

    :raises MissingExtraError: instead of gymnasium's error, if an extra installs the package
    """
    try:
        yield
    except error.DependencyNotInstalled as missing:
        for package, extra in _EXTRA_OF_PACKAGE.items():
            if re.search(rf"\b{package}\b", str(missing).lower()):
                raise missing_extra(extra, package) from missing

        # gymnasium's own line names the package.
        raise


def register_atari(env_id: str) -> None:
    """Register ale-py's environments if ``env_id`` is one of them.

    :raises MissingExtraError: if ale-py is not installed
    """
    if not (env_id.startswith("ALE/") or "NoFrameskip" in env_id):
        return

    # gymnasium does not find the games by itself.
    with needs_extra("atari", "ale-py"):
        gym.register_envs(importlib.import_module("ale_py"))


def prepare_env(env_id: str | Callable[..., gym.Env]) -> None:
    """Register Atari environments and redirect MuJoCo's warnings before an environment is made.

    :param env_id: id, or a class or function that returns an environment
    """
    if isinstance(env_id, str):
        register_atari(env_id)

    # MuJoCo is imported only for environments that import it themselves.
    spec = gym.registry.get(str(env_id))
    entry_point = str(getattr(spec, "entry_point", ""))
    if "mujoco" in sys.modules or "mujoco" in entry_point:
        # If it is missing, gymnasium's error explains it.
        with contextlib.suppress(ImportError):
            mujoco = importlib.import_module("mujoco")
            # The user may have a function.
            if mujoco.get_mju_user_warning() is None:
                mujoco.set_mju_user_warning(_show_mujoco_warning)


def _show_mujoco_warning(message: str) -> None:
    """Show a warning of MuJoCo through Python; by default it prints one per environment and writes MUJOCO_LOG.TXT."""
    # The time would make each message another one.
    reason, _, _ = message.partition(" Time = ")
    _warn_once(reason.strip())


@functools.cache
def _warn_once(message: str) -> None:
    try:
        warnings.warn(message, stacklevel=3)
    except UserWarning:
        # Warnings are errors here. An exception that leaves a callback of MuJoCo would end the process.
        print(f"MuJoCo: {message}", file=sys.stderr)


def require_known_settings(env_kwargs: Iterable[str], known: Iterable[str], task: str) -> None:
    """Reject settings that a task does not have.

    :param env_kwargs: names of the settings
    :param known: names of the task's settings
    :param task: library and task, for the message
    :raises TypeError: if a setting is unknown
    """
    known = list(known)
    unknown = sorted(set(env_kwargs) - set(known))
    if unknown:
        names = ", ".join(unknown)
        raise TypeError(f"env_kwargs has keys that {task} does not know: {names}{hint(unknown[0], known)}")
