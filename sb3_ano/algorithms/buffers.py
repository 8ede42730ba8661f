"""Rollout buffers whose memory is the training data: collection writes it, the update indexes it, nothing is copied."""

from collections.abc import Generator
from typing import Any, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples

RolloutSamples: TypeAlias = RolloutBufferSamples | DictRolloutBufferSamples

# In the order of SB3's samples.
_SAMPLED = ("observations", "actions", "values", "log_probs", "advantages", "returns")


class FlatRolloutBuffer(RolloutBuffer):
    """SB3's rollout buffer, laid out so that a rollout need not be rearranged before it is trained on.

    SB3 collects in the order (step, environment), and trains in the order (environment, step): it copies everything in
    between, and allocates everything anew for the next rollout. Here the memory is in the second order from the start, and
    the arrays that SB3's users know, ``(n_steps, n_envs, ...)``, are views of it.
    """

    td_errors: np.ndarray

    def reset(self) -> None:
        if not hasattr(self, "_flat") or self.rewards.shape != (self.buffer_size, self.n_envs):
            super().reset()
            self.td_errors = np.zeros(self.advantages.shape, np.float32)  # takes no memory yet, unlike zeros_like
            self._lay_out()
        self.pos = 0
        self.full = False

    def _lay_out(self) -> None:
        """Replace SB3's arrays by views of memory in which each environment's steps lie together."""
        self._flat: dict[str, Any] = {}
        self._views: dict[str, Any] = {}
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        for name in (*_SAMPLED, "td_errors"):
            views = {key: self._environment_major(array) for key, array in _items(getattr(self, name))}
            flat = {key: torch.from_numpy(_flattened(view)) for key, view in views.items()}
            single = isinstance(getattr(self, name), np.ndarray)
            self._views[name] = views[""] if single else views
            setattr(self, name, self._views[name])
            self._flat[name] = flat[""] if single else flat

    @staticmethod
    def _environment_major(array: np.ndarray) -> np.ndarray:
        return np.zeros((array.shape[1], array.shape[0], *array.shape[2:]), dtype=array.dtype).swapaxes(0, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_flat", "_views", "_copies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        filled = {name: getattr(self, name) for name in (*_SAMPLED, "td_errors")}
        self._lay_out()
        for name, arrays in filled.items():
            for key, array in _items(arrays):
                dict(_items(getattr(self, name)))[key][...] = array

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: torch.Tensor | np.ndarray,
        log_prob: torch.Tensor | np.ndarray,
    ) -> None:
        """Store one step of all environments; see SB3. Arrays are taken beside tensors."""
        position = self.pos
        self._add_observations(position, obs)
        self.actions[position] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[position] = reward
        self.episode_starts[position] = episode_start
        self.values[position] = _array(value).reshape(self.n_envs)
        self.log_probs[position] = _array(log_prob).reshape(self.n_envs)
        self.pos = position + 1
        self.full = self.pos == self.buffer_size

    def _add_observations(self, position: int, observations: Any) -> None:
        row = self.observations[position]
        row[...] = observations if row.ndim == np.ndim(observations) else observations.reshape(row.shape)

    def compute_returns_and_advantage(self, last_values: torch.Tensor | np.ndarray, dones: np.ndarray) -> None:
        """Generalised advantage estimates and lambda-returns, as in SB3, and the one-step errors they are made of.

        :param last_values: values of the observations after the rollout, ``(n_envs,)`` or ``(n_envs, 1)``
        :param dones: whether the last step ended an episode, ``(n_envs,)``
        """
        after = _array(last_values).reshape(1, self.n_envs)
        ended = np.asarray(dones, dtype=np.float32).reshape(1, self.n_envs)
        goes_on = np.float32(1.0) - np.concatenate([self.episode_starts[1:], ended])
        next_values = np.concatenate([self.values[1:], after])
        errors = self.rewards + np.float32(self.gamma) * next_values * goes_on - self.values
        decay = np.float32(self.gamma * self.gae_lambda) * goes_on

        advantages = np.empty_like(errors)
        advantage = np.zeros(self.n_envs, dtype=np.float32)
        for step in range(self.buffer_size - 1, -1, -1):
            np.multiply(decay[step], advantage, out=advantage)
            np.add(advantage, errors[step], out=advantage)
            advantages[step] = advantage
        self.td_errors[...] = errors
        self.advantages[...] = advantages
        self.returns[...] = advantages + self.values

    def tensors(self) -> RolloutSamples:
        """The rollout as tensors ``(n_envs * n_steps, ...)``, environment by environment.

        They share the memory of the arrays on the CPU, and are copies on another device.
        """
        self._adopt()
        return RolloutBufferSamples(*map(self._on_device, _SAMPLED))

    def _adopt(self) -> None:
        """Copy in what a callback or a subclass put in the place of an array, as SB3 itself does with ``returns``."""
        for name, views in self._views.items():
            arrays = getattr(self, name)
            if arrays is views:
                continue
            for (_, view), (_, array) in zip(_items(views), _items(arrays), strict=True):
                view[...] = array
            setattr(self, name, views)

    def _on_device(self, name: str) -> Any:
        """A flat tensor, or a dictionary of those; on another device always in the same memory."""
        flat = self._flat[name]
        if self.device.type == "cpu":
            return flat
        copies = self._copies.setdefault(name, {})
        for key, tensor in _items(flat):
            if key not in copies:
                copies[key] = torch.empty_like(tensor, device=self.device)
            copies[key].copy_(tensor)
        return copies if isinstance(flat, dict) else copies[""]

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """Minibatches in random order; see SB3."""
        size = self.buffer_size * self.n_envs
        indices = np.random.permutation(size)
        for start in range(0, size, batch_size or size):
            yield self._get_samples(indices[start : start + (batch_size or size)])

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> RolloutBufferSamples:
        return gather(self.tensors(), torch.from_numpy(batch_inds).to(self.device))


class DictFlatRolloutBuffer(FlatRolloutBuffer, DictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""

    def _add_observations(self, position: int, observations: Any) -> None:
        for key, array in self.observations.items():
            row = array[position]
            row[...] = observations[key].reshape(row.shape)

    def tensors(self) -> RolloutSamples:
        self._adopt()
        return DictRolloutBufferSamples(*map(self._on_device, _SAMPLED))


def gather(samples: Any, indices: torch.Tensor) -> Any:
    """The samples at ``indices``, with actions in float32 as SB3 has them."""
    picked = {name: _picked(values, indices) for name, values in samples._asdict().items()}
    picked["actions"] = picked["actions"].to(torch.float32)
    return type(samples)(**picked)


def _picked(values: Any, indices: torch.Tensor) -> Any:
    return {key: value[indices] for key, value in values.items()} if isinstance(values, dict) else values[indices]


def _array(values: torch.Tensor | np.ndarray) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def _items(arrays: Any) -> list[tuple[str, Any]]:
    """The arrays, or tensors, of a Dict observation by key, or the one there is."""
    return list(arrays.items()) if isinstance(arrays, dict) else [("", arrays)]


def _flattened(view: np.ndarray) -> np.ndarray:
    """``(n_envs * n_steps, ...)``, sharing the memory of an environment-major view ``(n_steps, n_envs, ...)``."""
    memory = view.swapaxes(0, 1)
    return memory.reshape(-1, *memory.shape[2:])
