"""SB3's rollout buffers with less work per step, and with the one-step TD errors that advantages are made of."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples, TensorDict


class RolloutSamples(NamedTuple):
    """Samples of a rollout: the fields of SB3's ``RolloutBufferSamples``, TD errors, and masks.

    :param observations: ``(batch, ...)``, or a dictionary of those
    :param actions: ``(batch, action_dim)``
    :param old_values: values at collection, ``(batch,)``
    :param old_log_prob: log-probabilities at collection, ``(batch,)``
    :param advantages: generalized advantage estimates, ``(batch,)``
    :param returns: lambda-returns, ``(batch,)``
    :param td_errors: one-step TD errors, ``(batch,)``
    :param action_masks: actions that were allowed, bool ``(batch, n)``, or None
    """

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    td_errors: torch.Tensor
    action_masks: torch.Tensor | None = None


# Names of the buffer's arrays that differ from those of the samples.
_ARRAYS = {"old_values": "values", "old_log_prob": "log_probs"}
# Bytes of images up to which they are copied to be turned to channels_last once; SB3 copies no rollout of one environment.
_TURNED = 2**25


class FlatRolloutBuffer(RolloutBuffer):
    """SB3's rollout buffer, which takes arrays next to tensors, and hands out the whole rollout as tensors.

    SB3 gathers each minibatch in NumPy; the update gathers it from these tensors in compiled code.
    """

    action_masks: Any = None

    def reset(self) -> None:
        super().reset()
        self.td_errors = np.zeros(self.advantages.shape, dtype=np.float32)  # zeros_like would write, and so take memory

    def add(
        self,
        obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: torch.Tensor | np.ndarray,
        log_prob: torch.Tensor | np.ndarray,
        **columns: np.ndarray,
    ) -> None:
        """Store one step of all environments; see SB3. Values and log-probabilities may be arrays.

        :param columns: rows of further arrays of the buffer, by name
        """
        position = self.pos
        self._add_observations(position, obs)
        self.actions[position] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[position] = reward
        self.episode_starts[position] = episode_start
        self.values[position] = _array(value).reshape(self.n_envs)
        self.log_probs[position] = _array(log_prob).reshape(self.n_envs)
        for name, column in columns.items():
            getattr(self, name)[position] = column
        self.pos = position + 1
        self.full = self.pos == self.buffer_size

    def _add_observations(self, position: int, observations: Any) -> None:
        row = self.observations[position]
        row[...] = observations if row.ndim == np.ndim(observations) else observations.reshape(row.shape)

    def compute_returns_and_advantage(self, last_values: torch.Tensor | np.ndarray, dones: np.ndarray) -> None:
        """Compute advantages and lambda-returns as SB3 does, and keep the one-step TD errors that they are made of.

        :param last_values: values of the observations after the rollout, ``(n_envs,)`` or ``(n_envs, 1)``
        :param dones: whether the last step ended an episode, ``(n_envs,)``
        """
        continues = np.empty_like(self.episode_starts)
        np.subtract(np.float32(1.0), self.episode_starts[1:], out=continues[:-1])
        continues[-1] = np.float32(1.0) - np.asarray(dones, dtype=np.float32).reshape(self.n_envs)

        # In place, because a rollout may be large.
        errors = self.td_errors
        errors[:-1] = self.values[1:]
        errors[-1] = _array(last_values).reshape(self.n_envs)
        errors *= np.float32(self.gamma)
        errors *= continues
        errors += self.rewards
        errors -= self.values

        decay = continues
        decay *= np.float32(self.gamma * self.gae_lambda)
        advantage = np.zeros(self.n_envs, dtype=np.float32)
        for step in range(self.buffer_size - 1, -1, -1):
            np.multiply(decay[step], advantage, out=advantage)
            np.add(advantage, errors[step], out=advantage)
            self.advantages[step] = advantage
        np.add(self.advantages, self.values, out=self.returns)

    def tensors(self, channels_last: bool = False) -> RolloutSamples:
        """Return the rollout as tensors ``(n_envs * n_steps, ...)``, environment by environment, on the buffer's device.

        On the CPU they share their memory with the buffer's arrays, which have these shapes from then on, as in SB3.

        :param channels_last: whether images get that memory format, where it takes no more memory than SB3 does
        :raises ValueError: if the buffer is not full
        """
        self._flatten(channels_last)
        return self._samples(lambda array: torch.from_numpy(array).to(self.device))

    def _flatten(self, channels_last: bool = False) -> None:
        """Bring the arrays of a rollout into the shapes in which SB3 leaves them after an update, once."""
        if not self.full:
            raise ValueError(f"the rollout buffer holds {self.pos} of {self.buffer_size} steps; collect a whole rollout first")
        if self.generator_ready:
            return
        for name in RolloutSamples._fields:
            attribute = _ARRAYS.get(name, name)
            # Read from the attributes, because callbacks and subclasses assign other arrays, as SB3 itself does.
            array = getattr(self, attribute)
            setattr(self, attribute, mapped(lambda part: _environment_major(part, channels_last), array))
        self.generator_ready = True

    def _samples(self, convert: Callable[[np.ndarray], torch.Tensor]) -> RolloutSamples:
        """Return samples of the arrays of a rollout, converted; SB3 has numbers in columns, which are flattened."""
        fields = []
        for name in RolloutSamples._fields:
            array = getattr(self, _ARRAYS.get(name, name))
            samples = mapped(convert, array)
            is_number = name not in ("observations", "actions", "action_masks")
            fields.append(samples.flatten() if is_number else samples)
        return RolloutSamples(*fields)

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """Yield minibatches in random order; see SB3."""
        self._flatten()
        size = self.buffer_size * self.n_envs
        indices = np.random.permutation(size)
        for start in range(0, size, batch_size or size):
            yield self._get_samples(indices[start : start + (batch_size or size)])

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        self._flatten()
        samples = self._samples(lambda array: torch.from_numpy(array[batch_inds]).to(self.device))
        return samples._replace(actions=samples.actions.to(torch.float32))


class DictFlatRolloutBuffer(FlatRolloutBuffer, DictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""

    def _add_observations(self, position: int, observations: Any) -> None:
        for key, array in self.observations.items():
            row = array[position]
            row[...] = observations[key].reshape(row.shape)


def gather(samples: RolloutSamples, indices: torch.Tensor) -> RolloutSamples:
    """Return the samples at ``indices``, with actions in float32 as SB3 has them."""
    picked = RolloutSamples(*[mapped(lambda values: values[indices], field) for field in samples])
    return picked._replace(actions=picked.actions.to(torch.float32))


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to an array or tensor, to each entry of a dictionary, or to nothing if the values are None."""
    if isinstance(values, dict):
        return {key: function(part) for key, part in values.items()}
    return None if values is None else function(values)


def is_stock(buffer: RolloutBuffer, *names: str) -> bool:
    """Tell whether methods of a buffer are :class:`FlatRolloutBuffer`'s, neither overridden nor replaced."""
    return all(name not in vars(buffer) and getattr(type(buffer), name) is getattr(FlatRolloutBuffer, name) for name in names)


def _array(values: torch.Tensor | np.ndarray) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def _environment_major(array: np.ndarray, channels_last: bool) -> np.ndarray:
    """Do what SB3's ``swap_and_flatten`` does; ``channels_last`` lays images ``(n, channels, height, width)`` out in that way.

    As in SB3, the rollout of one environment is not copied, unless it consists of a few images that are to be turned.
    """
    swapped = np.ascontiguousarray(array).swapaxes(0, 1)
    is_image = channels_last and array.ndim == 5
    if is_image and (array.shape[1] > 1 or array.nbytes <= _TURNED):
        turned = swapped.transpose(0, 1, 3, 4, 2)
        return turned.reshape(-1, *turned.shape[2:]).transpose(0, 3, 1, 2)
    shape = array.shape[2:] or (1,)
    return swapped.reshape(-1, *shape)
