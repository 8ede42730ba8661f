"""SB3's rollout buffers, for rollouts that are tensors on a device."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ano.fast.policy import mapped
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
        for name in tensors:
            vars(self).pop(name, None)
        self.held = tensors
        self.pos = self.buffer_size
        self.full = True
        self.generator_ready = False

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not there.
        if name not in self.held:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        array = mapped(lambda tensor: np.array(tensor.cpu().numpy()), self.held[name])
        vars(self)[name] = array
        return array

    def samples(self, with_td_errors: bool) -> RolloutSamples:
        """Return the rollout as tensors ``(n_envs * n_steps, ...)``, environment by environment.

        :param with_td_errors: whether one-step TD errors are wanted
        """
        for name in self.held.keys() & vars(self).keys():
            copy_to(self.held[name], vars(self)[name])

        def flat(name: str) -> Any:
            # A view: the tensors lie in memory environment by environment.
            return mapped(lambda tensor: tensor.transpose(0, 1).flatten(0, 1), self.held[name])

        return RolloutSamples(
            observations=flat("observations"),
            actions=flat("actions"),
            old_values=flat("values"),
            old_log_prob=flat("log_probs"),
            advantages=flat("advantages"),
            returns=flat("returns"),
            action_masks=flat("action_masks") if "action_masks" in self.held else None,
            td_errors=flat("td_errors") if with_td_errors else None,
        )

    def reset(self) -> None:
        super().reset()
        self.held = MappingProxyType({})


def hold_on_device(buffer: RolloutBuffer) -> DeviceBuffer:
    """Let a rollout buffer hold rollouts on a device; it stays the same object, and an instance of its class."""
    if not isinstance(buffer, DeviceBuffer):
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
        target.copy_(torch.as_tensor(source).reshape(target.shape), non_blocking=True)
