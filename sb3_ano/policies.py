"""A policy whose critic sees more than its actor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.type_aliases import Schedule
from torch import nn


class Hidden(nn.Module):
    """Put zeros in the place of the features of an observation.

    :param width: number of features
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return zeros, ``(batch, width)``."""
        return observations.new_zeros(len(observations), self.width)


class CriticOnlyKeys:
    """Hide parts of Dict observations from the actor, in front of a policy for them.

    :param arguments: arguments of the policy
    :param critic_only_keys: keys that only the critic sees
    :param options: keyword arguments of the policy
    :raises ValueError: if an observation lacks a key, or the features extractor is not a CombinedExtractor
    """

    def __init__(self, *arguments: object, critic_only_keys: Sequence[str] | None = None, **options: object) -> None:
        # Each once, in the order given. Set before the policy builds its layers.
        self.critic_only_keys = [*dict.fromkeys(critic_only_keys or ())]
        # Actor and critic have an extractor each: layers for images are theirs alone.
        super().__init__(*arguments, **options, share_features_extractor=False)  # type: ignore[call-arg]

    def _build(self: Any, lr_schedule: Schedule) -> None:
        # The policy's constructor has made the extractors. Here, the optimizer has not collected their parameters yet.
        extractors = getattr(self.pi_features_extractor, "extractors", {})

        for key in self.critic_only_keys:
            if key not in extractors:
                allowed = ", ".join(extractors) or "none with this features extractor"
                raise ValueError(
                    f"critic_only_keys={self.critic_only_keys} has {key!r}, which is not allowed; allowed are {allowed}"
                )

            # An image's extractor knows its width, and Flatten keeps that of the observation. The width has to stay, because
            # the layers behind are made for all features.
            width = getattr(extractors[key], "features_dim", None)
            if width is None:
                width = get_flattened_obs_dim(self.observation_space[key])
            extractors[key] = Hidden(int(width))

        super()._build(lr_schedule)  # type: ignore[misc]

    def _get_constructor_parameters(self) -> dict[str, object]:
        # SB3 makes a saved policy from these when it loads it.
        parameters: dict[str, object] = super()._get_constructor_parameters()  # type: ignore[misc]
        parameters["critic_only_keys"] = self.critic_only_keys
        return parameters


class AsymmetricPolicy(CriticOnlyKeys, MultiInputActorCriticPolicy):
    """SB3's policy for Dict observations, whose argument ``critic_only_keys`` names what only the critic sees."""


def hidden_features(policy: ActorCriticPolicy) -> np.ndarray:
    """Tell which features of a policy for Dict observations its actor does not see, bool ``(features,)``."""
    # Only a CombinedExtractor has extractors. Empty arrays cannot be concatenated without one.
    flags = [np.zeros(0, dtype=bool)]
    extractors = getattr(policy.pi_features_extractor, "extractors", {})

    for key, part in extractors.items():
        width = get_flattened_obs_dim(policy.observation_space[key])  # type: ignore[index]
        is_hidden = isinstance(part, Hidden)
        flags.append(np.full(width, is_hidden))

    return np.concatenate(flags)
