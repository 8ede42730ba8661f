"""The callback that writes checkpoints and resumes from them."""

import io
import json
import os
import pickle
import platform
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano._arguments import NOT_HYPERPARAMETERS, constructor_parameters
from sb3_ano._io import DirectoryLock
from sb3_ano._system import versions
from sb3_ano.checkpoints.files import Checkpoint, checkpoint_files, newest_checkpoint, write_checkpoint
from sb3_ano.checkpoints.native import random_state, set_random_state
from sb3_ano.checkpoints.state import TrainingState, Unpickler

_PACKAGES = ("torch", "numpy", "gymnasium", "stable-baselines3")
# What was recorded since the logger wrote its last row.
_UNWRITTEN_RECORDS = ("name_to_value", "name_to_count", "name_to_excluded")
# The noise of gSDE, which is drawn just before a rollout starts.
_NOISE = ("exploration_mat", "exploration_matrices")
# Locks of this process by directory, with the threads that took them. A training that ended with an exception holds its lock
# until its callback is deleted, which a traceback can delay, and must not keep the same thread from resuming.
_locks: dict[Path, tuple[DirectoryLock, threading.Thread]] = {}


class TrainingCheckpoints(BaseCallback):
    """Write checkpoints during a training and, with ``resume=True``, resume from the newest one.

    To resume, run the interrupted program again: build model, environments and callbacks as before, and call ``learn`` with
    the same arguments. Before its first rollout, the state of the checkpoint is restored. From there the run equals the
    uninterrupted one bit for bit if all state can be stored. Otherwise a warning names what differs, for example EnvPool's
    environments, which start new episodes, or an open file in a callback.

    A directory belongs to one call of ``learn``. All on-policy algorithms are supported, including SB3's own.

    :param folder: directory of the checkpoints, which is created. Checkpoints contain pickles: resume only from your own
    :param every: number of environment steps between checkpoints, counted over all environments. Checkpoints are written
        between rollouts, so that at most this number and one rollout are lost. None: ``seconds`` decides
    :param seconds: seconds between checkpoints if ``every`` is None
    :param keep: number of checkpoints to keep
    :param resume: whether to resume from the newest undamaged checkpoint in the directory, if there is one
    :param verbose: 0: silent; 1: report the checkpoint that training resumes from; 2: also report each checkpoint
    :raises ValueError: if a number is out of range; at the start of the training if the directory holds checkpoints and
        ``resume`` is False, or if settings or environments differ from those of the checkpoint
    :raises BlockingIOError: at the start of the training if another process, or another thread of this one, writes checkpoints
        to the directory
    """

    #: The collection of rollouts does not need to prepare tensors and local variables for this callback.
    reads_locals = False
    model: OnPolicyAlgorithm

    #: Release the lock. RL Zoo ends a training also if its start has raised.
    _release: Any = staticmethod(lambda: None)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        *,
        seconds: float = 60.0,
        keep: int = 3,
        resume: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose)
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and (not isinstance(number, int | np.integer) or number < 1):
                raise ValueError(f"{name}={number!r} is not allowed; allowed are positive integers")
        # Also NaN
        if not seconds >= 0.0:
            raise ValueError(f"seconds={seconds!r} is not allowed; allowed are numbers >= 0")

        self.folder = Path(folder)
        self.every = every
        self.seconds = seconds
        self.keep = keep
        self.resume = resume
        self._due: float | None = None  # number of steps, or time
        self._written = 0  # steps of the last checkpoint that was written or restored

    def _on_training_start(self) -> None:
        model = self.model
        if not isinstance(model, OnPolicyAlgorithm):
            raise ValueError(f"TrainingCheckpoints cannot store {type(model).__name__}; allowed are on-policy algorithms")

        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()

        # Settings as they were given: callbacks can change them during the training.
        self._details: dict[str, Any] = {
            "algorithm": type(model).__name__,
            "total_timesteps": model._total_timesteps,
            "settings": _settings(model),
            # Functions without a name are stored as code, which other versions of Python cannot run.
            "versions": {**versions(_PACKAGES), "python": platform.python_version()},
        }
        if self._due is not None and model.num_timesteps >= self._written:  # a call of learn that continues
            return

        # Restored when the first rollout starts, because only then everything is built.
        self._due = None
        self._pending = None
        if self.resume:
            self._pending = newest_checkpoint(self.folder, self._report)
        elif checkpoint_files(self.folder):
            raise ValueError(
                f"folder={str(self.folder)!r} holds checkpoints of an earlier run; resume from them with resume=True, "
                "or use another directory for a new run"
            )
        if self._pending is not None:
            self._require_same_training(self._pending)

    def _lock_folder(self) -> None:
        directory = self.folder.resolve()
        thread = threading.current_thread()
        # The lock of this process would let its other threads in.
        if directory in _locks:
            earlier, owner = _locks[directory]
            if earlier.descriptor is not None and owner is not thread and owner.is_alive():
                raise BlockingIOError(f"{directory} is in use: the thread {owner.name} of this process writes to it now")
            earlier.release()

        lock = DirectoryLock(directory, patience=0.0)
        _locks[directory] = (lock, thread)
        # Also called when the callback is deleted, because SB3 does not report exceptions to callbacks.
        self._release = weakref.finalize(self, lock.release)

    def _require_same_training(self, checkpoint: Checkpoint) -> None:
        """Compare algorithm, settings and number of steps with those of a checkpoint.

        :raises ValueError: if the checkpoint belongs to another training
        """
        here = self._details
        there = checkpoint.details
        settings = {"algorithm": here["algorithm"], **here["settings"]}
        earlier = {"algorithm": there["algorithm"], **there["settings"]}
        # A setting that one of them lacks is different, too.
        for name in sorted(settings | earlier):
            value = settings.get(name)
            other = earlier.get(name)
            if value != other:
                raise ValueError(f"{name} is {value}, but {other} in {checkpoint.path}; resume with the same settings")

        total = here["total_timesteps"]
        reached = checkpoint.num_timesteps
        if reached >= total:
            at = f"{checkpoint.path} is already at {reached} of {there['total_timesteps']}"
            raise ValueError(
                f"total_timesteps={total} is not allowed: {at}; to continue a later call of learn, load that model"
            )

        if total != there["total_timesteps"]:
            self._report(f"the run was started for {there['total_timesteps']} steps; schedules now use {total}")

        for package, version in here["versions"].items():
            before = there["versions"].get(package, version)
            if version != before:
                _warn(f"{package} was {before} and is {version}: results may differ")

    def _on_rollout_start(self) -> None:
        if self._pending is not None:
            self._restore(self._pending)
            self._pending = None
        elif self._due is None or self._position() >= self._due:
            try:
                self._save()
            except OSError as error:
                _warn(f"no checkpoint at {self.model.num_timesteps} steps, training continues: {error}")
        else:
            return

        # From now on, because writing takes time, too.
        if self.every is None:
            self._due = self._position() + self.seconds
        else:
            self._due = self._position() + self.every

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._release()

    def _position(self) -> float:
        """Return the time, or the number of steps, that checkpoints are due by."""
        if self.every is None:
            return time.monotonic()
        return self.model.num_timesteps

    def _save(self) -> None:
        model = self.model
        file = io.BytesIO()
        model.save(file)

        # SB3's file lacks what follows.
        state = TrainingState(model, self.locals.get("callback"), exclude=self).capture()
        state["elapsed"] = time.time_ns() - model.start_time
        state["logger"] = {}
        for name in _UNWRITTEN_RECORDS:
            state["logger"][name] = dict(getattr(self.logger, name))
        state["requires_grad"] = {}
        for name, parameter in model.policy.named_parameters():
            state["requires_grad"][name] = parameter.requires_grad
        state["exploration"] = {}
        if model.use_sde:
            for name in _NOISE:
                state["exploration"][name] = getattr(model.policy.action_dist, name)

        state["random"] = random_state()

        steps = model.num_timesteps
        path = write_checkpoint(
            self.folder,
            steps,
            file.getvalue(),
            pickle.dumps(state),
            self._details,
            self.keep,
        )
        self._written = steps
        if state["dropped"] and self._due is None:  # only once
            dropped = ", ".join(sorted(state["dropped"]))
            self._report(f"checkpoints lack {dropped}, which cannot be stored")
        self._report(f"wrote {path}", verbosity=2)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore model, environments, callbacks and random generators."""
        model = self.model
        policy = model.policy
        state = Unpickler(io.BytesIO(checkpoint.state)).load()
        training = TrainingState(model, self.locals.get("callback"), exclude=self)

        model.set_parameters(str(checkpoint.path), exact_match=True, device=model.device)
        different = training.restore(state["attributes"])

        # The policy's parameters are SB3's matter, but not which of them are frozen.
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(state["requires_grad"][name])
        for name, noise in state["exploration"].items():
            setattr(policy.action_dist, name, noise.to(model.device))

        # States of an LSTM, of the device that the checkpoint was written on
        lstm_states = getattr(model, "_last_lstm_states", None)
        if lstm_states is not None:
            moved = [tuple(part.to(model.device) for part in pair) for pair in lstm_states]
            model._last_lstm_states = type(lstm_states)(*moved)  # type: ignore[attr-defined]

        # What the log shows
        model.start_time = time.time_ns() - state["elapsed"]
        for name, values in state["logger"].items():
            getattr(self.logger, name).update(values)
        for found in training.objects.values():
            if isinstance(found, ProgressBarCallback):
                found.pbar.update(model.num_timesteps)
        # Last, because restoring may draw numbers.
        set_random_state(state["random"])

        self._written = model.num_timesteps
        self._report(f"resumes from {checkpoint.path} after {model.num_timesteps} steps")
        lost = sorted({*different, *state["dropped"]})
        if lost:
            _warn(f"{', '.join(lost)} cannot be restored and stay as this program built them: results may differ")

        kinds = state["without_state"]
        if kinds:
            _warn(f"the state of {', '.join(kinds)} cannot be stored: new episodes start, and results may differ")
            self.training_env.seed((model.seed or 0) + model.num_timesteps)  # not that of the training's first episodes
            model._last_obs = self.training_env.reset()  # type: ignore[assignment]
            model._last_episode_starts = np.ones((model.n_envs,), dtype=bool)

    def _report(self, line: str, verbosity: int = 1) -> None:
        if self.verbose >= verbosity:
            print(f"TrainingCheckpoints: {line}")


def _warn(message: str) -> None:
    """Warn of differences to the uninterrupted run, at any verbosity."""
    warnings.warn(f"TrainingCheckpoints: {message}", stacklevel=3)


def _settings(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """Return what must be equal, as plain JSON values: arguments of the model and of VecNormalize, and the shape."""
    settings: dict[str, Any] = {}
    for name in sorted(constructor_parameters(type(model))):
        is_free = name == "policy" or (name in NOT_HYPERPARAMETERS and name != "seed")
        if not is_free and hasattr(model, name):
            settings[name] = getattr(model, name)

    # The values of a shape, because its name says little.
    settings["shaping_fingerprint"] = getattr(model, "shaping_fingerprint", None)

    normalize = model.get_vec_normalize_env()
    settings["VecNormalize"] = None
    if normalize is not None:
        names = constructor_parameters(VecNormalize).keys() - {"venv"}
        settings["VecNormalize"] = {name: vars(normalize).get(name) for name in sorted(names)}

    # As the file will have them, so that tuples and lists compare as equal.
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=_plain, skipkeys=True))
    return plain


def _plain(value: object) -> object:
    """Return a schedule as three of its values, and a class or another object as its name."""
    if callable(value) and not isinstance(value, type):
        try:  # a schedule of the remaining progress
            return [float(value(progress)) for progress in (1.0, 0.5, 0.0)]
        except Exception:  # a user's function can raise anything
            pass
    return getattr(value, "__qualname__", type(value).__qualname__)
