"""SB3's rollout buffers, for rollouts that are tensors on a device.

The arrays of SB3's buffer are what callbacks, checkpoints and other code read. Here they are copied from the device when they
are read first, so that a training that nobody looks at copies nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ano.envs.batched import mapped
from sb3_ano.fast.step import RolloutSamples


class DeviceBuffer(RolloutBuffer):
    """A rollout buffer of SB3 that holds a rollout on a device.

    An array that is read is copied from the device then, ``(n_steps, n_envs, ...)``, and copied back before the update,
    because it may have been changed.
    """

    # Tensors by the names of the arrays.
    held: Mapping[str, Any] = MappingProxyType({})

    def hold(self, tensors: Mapping[str, Any]) -> None:
        """Take a whole rollout on a device, by the names of the arrays.

        :param tensors: ``(n_steps, n_envs, ...)``, transposed from ``(n_envs, n_steps, ...)``
        """
        # Arrays in the instance would hide the tensors: __getattr__ is asked for missing attributes only.
        for name in tensors:
            vars(self).pop(name, None)
        self.held = tensors
        # As add() leaves the buffer after the last step.
        self.pos = self.buffer_size
        self.full = True
        self.generator_ready = False

    def __getattr__(self, name: str) -> np.ndarray | dict[str, np.ndarray]:
        # Only called for what is not there.
        if name not in self.held:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        # A copy also on the CPU, because the next rollout overwrites the tensors, and the array may be kept.
        array = mapped(lambda tensor: np.array(tensor.cpu().numpy()), self.held[name])
        vars(self)[name] = array
        return array

    def samples(self, with_td_errors: bool) -> RolloutSamples:
        """Return the rollout as tensors ``(n_envs * n_steps, ...)``, environment by environment.

        :param with_td_errors: whether one-step TD errors are wanted
        """
        # Arrays that were read may have been changed, as in SB3, where they are the rollout.
        for name in self.held.keys() & vars(self).keys():
            copy_to(self.held[name], vars(self)[name])

        def flat(name: str) -> Any:
            # A view: the tensors lie in memory environment by environment.
            return mapped(lambda tensor: tensor.transpose(0, 1).flatten(0, 1), self.held[name])

        action_masks = None
        if "action_masks" in self.held:
            action_masks = flat("action_masks")
        td_errors = None
        if with_td_errors:
            td_errors = flat("td_errors")

        return RolloutSamples(
            observations=flat("observations"),
            actions=flat("actions"),
            old_values=flat("values"),
            old_log_prob=flat("log_probs"),
            advantages=flat("advantages"),
            returns=flat("returns"),
            action_masks=action_masks,
            td_errors=td_errors,
        )

    def reset(self) -> None:
        super().reset()
        self.held = MappingProxyType({})


def hold_on_device(buffer: RolloutBuffer) -> DeviceBuffer:
    """Let a rollout buffer hold rollouts on a device; it stays the same object, and an instance of its class."""
    if not isinstance(buffer, DeviceBuffer):
        # The object stays the same, because callbacks and users may hold it. Under the name of its class, pickles find it.
        kind = type(buffer)
        buffer.__class__ = type(kind.__name__, (DeviceBuffer, kind), {"__module__": kind.__module__})
    assert isinstance(buffer, DeviceBuffer)
    return buffer


def copy_to(target: Any, source: Any) -> None:
    """Copy arrays or tensors to tensors, whatever their shapes are, or dictionaries of them."""
    if isinstance(target, dict):
        for key, part in target.items():
            copy_to(part, source[key])
    else:
        # Without waiting, if the source is in pinned memory.
        tensor = torch.as_tensor(source).reshape(target.shape)
        target.copy_(tensor, non_blocking=True)
