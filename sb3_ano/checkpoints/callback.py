"""The callback that writes checkpoints, and goes on from them."""

import importlib.metadata
import io
import os
import pickle
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ProgressBarCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ano.checkpoints.files import Checkpoint, FolderLock, checkpoint_files, newest_checkpoint, write_checkpoint
from sb3_ano.checkpoints.rng import random_state, set_random_state
from sb3_ano.checkpoints.settings import differing, settings_of
from sb3_ano.checkpoints.state import TrainingState

_PACKAGES = ("torch", "numpy", "gymnasium", "stable-baselines3")


class TrainingCheckpoints(BaseCallback):
    """Writes checkpoints of a training, and with ``resume=True`` goes on from the newest.

    An interrupted program is run again as it is: model, environments and callbacks are built as before, ``learn`` is called
    with the same arguments, and where its first rollout would start, everything is as it was at the checkpoint. From there on
    the run is, bit for bit, the uninterrupted one, if all state can be stored. Otherwise a warning names what differs: the
    episodes of EnvPool's environments start afresh, and a lambda that a callback has put in place of a schedule is lost.

    One call of ``learn`` belongs to a folder. For on-policy algorithms, SB3's own included.

    :param folder: of the checkpoints, made if it is missing; they hold pickles: go on only from folders of your own
    :param every: environment steps, of all environments together, from one checkpoint to the next; they are written between
        two rollouts, so at most this and a rollout are lost. None: goes by ``seconds``
    :param seconds: time from one checkpoint to the next, where ``every`` is None
    :param keep: how many of the last checkpoints stay
    :param resume: whether to go on from the newest whole checkpoint in the folder, if there is one
    :param verbose: 0 silent, 1 says what it goes on from, 2 each checkpoint as well
    :raises ValueError: if a number is out of range; at the start of the training, if the folder holds checkpoints without
        ``resume``, or if settings or environments are not those of the checkpoint
    :raises BlockingIOError: at the start of the training, if another process writes checkpoints into the folder
    """

    #: The collection of rollouts need not prepare tensors and local variables for it.
    reads_locals = False

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
                raise ValueError(f"{name}={number!r} is not allowed; allowed are whole numbers from 1")
        if not seconds >= 0.0:
            raise ValueError(f"seconds={seconds!r} is not allowed; allowed are numbers from 0")
        self.folder = Path(folder)
        self.every, self.seconds, self.keep, self.resume = every, seconds, keep, resume
        self._lock: FolderLock | None = None
        self._pending: Checkpoint | None = None
        self._settings: dict[str, Any] = {}
        self._last_timesteps: int | None = None
        self._last_time = 0.0
        self._told_of_dropped = False

    def _on_training_start(self) -> None:
        if not isinstance(self.model, OnPolicyAlgorithm):
            raise ValueError(f"TrainingCheckpoints cannot store {type(self.model).__name__}; allowed are on-policy algorithms")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        weakref.finalize(self, self._lock.release)  # SB3 tells callbacks nothing of an exception
        self._settings = settings_of(self.model)
        if self._last_timesteps is not None:  # a further call of learn
            return
        if not self.resume and checkpoint_files(self.folder):
            raise ValueError(
                f"folder={str(self.folder)!r} holds checkpoints of an earlier run; resume=True goes on with it, "
                "and a new run needs another folder"
            )
        self._pending = newest_checkpoint(self.folder, self._tell) if self.resume else None
        if self._pending is not None:
            self._check(self._pending)

    def _check(self, checkpoint: Checkpoint) -> None:
        """Complain of a checkpoint of another training, and tell of what may make a difference.

        :raises ValueError: if it is none of this training
        """
        details, total = checkpoint.details, self.model._total_timesteps
        algorithm = type(self.model).__name__
        if details["algorithm"] != algorithm:
            raise ValueError(f"{checkpoint.path} was written by {details['algorithm']}, and not by {algorithm}")
        for name, there, here in differing(details["settings"], self._settings):
            raise ValueError(f"{name} is {here}, and {there} in {checkpoint.path}; a training goes on only with its settings")
        if checkpoint.num_timesteps >= total:
            raise ValueError(
                f"total_timesteps={total} is not allowed: {checkpoint.path} is at {checkpoint.num_timesteps} already"
            )
        if details["total_timesteps"] != total:
            self._tell(f"the run was started for {details['total_timesteps']} steps; schedules now go by {total}")
        for package, version in details["versions"].items():
            if version != _versions()[package]:
                _warn(f"{package} was {version} and is {_versions()[package]}: the run may not be exactly the same")

    def _on_rollout_start(self) -> None:
        if self._pending is not None:
            self._restore(self._pending)
            self._pending = None
        elif self._is_due():
            try:
                self._save()
            except OSError as error:
                warnings.warn(
                    f"no checkpoint at {self.model.num_timesteps} steps, the training goes on: {error}", stacklevel=2
                )
        else:
            return
        self._last_timesteps, self._last_time = self.model.num_timesteps, time.monotonic()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _is_due(self) -> bool:
        if self._last_timesteps is None:
            return True
        if self.every is not None:
            return self.model.num_timesteps - self._last_timesteps >= self.every
        return time.monotonic() - self._last_time >= self.seconds

    def _training_state(self) -> TrainingState:
        return TrainingState(self.model, self.locals.get("callback"), without=self)

    def _save(self) -> None:
        model = io.BytesIO()
        self.model.save(model)
        attributes = self._training_state()
        state = {
            "attributes": attributes.capture(),
            "elapsed": time.time_ns() - self.model.start_time,
            "exploration": self._exploration(),
            "logger": {name: dict(getattr(self.logger, name)) for name in _PENDING_RECORDS},
            "random": random_state(),
            "requires_grad": {name: parameter.requires_grad for name, parameter in self.model.policy.named_parameters()},
        }
        state["without_state"] = attributes.environments_without_state()
        state["dropped"] = attributes.dropped
        details = {
            "algorithm": type(self.model).__name__,
            "total_timesteps": self.model._total_timesteps,
            "settings": self._settings,
            "versions": _versions(),
        }
        path = write_checkpoint(
            self.folder, self.model.num_timesteps, model.getvalue(), pickle.dumps(state), details, self.keep
        )
        self._tell_of_dropped(attributes)
        if self.verbose >= 2:
            print(f"wrote {path}")

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Bring model, environments, callbacks and generators to where they were when the checkpoint was written."""
        state = {**_BEFORE, **pickle.loads(checkpoint.state)}
        self.model.set_parameters(str(checkpoint.path), exact_match=True, device=self.model.device)
        attributes = self._training_state()
        different = attributes.restore(state["attributes"])
        for name, parameter in self.model.policy.named_parameters():
            parameter.requires_grad_(state["requires_grad"].get(name, parameter.requires_grad))
        self.model.start_time = time.time_ns() - state["elapsed"]
        for name, values in state["logger"].items():
            getattr(self.logger, name).update(values)
        self._move_progress_bars(self.locals.get("callback"))
        set_random_state(state["random"])
        for name, value in state["exploration"].items():
            setattr(self.model.policy.action_dist, name, value.to(self.model.device))
        self._tell(f"goes on from {checkpoint.path} after {self.model.num_timesteps} steps")
        lost = sorted({*different, *state["dropped"]})
        if lost:
            _warn(
                f"{', '.join(lost)} cannot be restored and stay as this program built them: the run may not be exactly the "
                "uninterrupted one"
            )
        if state["without_state"]:
            self._begin_new_episodes(state["without_state"])

    def _begin_new_episodes(self, without_state: list[str]) -> None:
        """Start afresh in environments whose state is out of reach.

        :param without_state: what those are
        """
        model, env = self.model, self.model.env
        assert env is not None
        _warn(
            f"the state of {', '.join(without_state)} cannot be stored: new episodes begin, and the run is not exactly the "
            "uninterrupted one"
        )
        if not isinstance(env.unwrapped, DummyVecEnv):  # episodes would be those that the training began with
            env.seed((model.seed or 0) + model.num_timesteps)
        model._last_obs = env.reset()  # type: ignore[assignment]
        model._last_episode_starts = np.ones((env.num_envs,), dtype=bool)

    def _exploration(self) -> dict[str, torch.Tensor]:
        """The noise of gSDE, which was drawn just before a rollout starts."""
        names = ("exploration_mat", "exploration_matrices") if self.model.use_sde else ()
        return {name: getattr(self.model.policy.action_dist, name) for name in names}

    def _move_progress_bars(self, callback: BaseCallback | None) -> None:
        if isinstance(callback, CallbackList):
            for child in callback.callbacks:
                self._move_progress_bars(child)
        elif isinstance(callback, ProgressBarCallback):
            callback.pbar.update(self.model.num_timesteps)

    def _tell_of_dropped(self, attributes: TrainingState) -> None:
        if attributes.dropped and not self._told_of_dropped:
            self._told_of_dropped = True
            self._tell(f"checkpoints are without {', '.join(sorted(attributes.dropped))}, which cannot be pickled")

    def _tell(self, line: str) -> None:
        if self.verbose >= 1:
            print(f"TrainingCheckpoints: {line}")


#: What was recorded since the logger wrote its last row.
_PENDING_RECORDS = ("name_to_value", "name_to_count", "name_to_excluded")
#: Of a checkpoint that was written before these were stored.
_BEFORE: dict[str, Any] = {"requires_grad": {}, "dropped": ["what an earlier version of sb3_ano did not store"]}


def _warn(message: str) -> None:
    """Say, whatever the verbosity, what keeps a resumed run from being the uninterrupted one."""
    warnings.warn(f"TrainingCheckpoints: {message}", stacklevel=3)


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in _PACKAGES}
