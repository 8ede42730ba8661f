"""Features extractors, networks and policies that users write, of the kinds that a faster update could get wrong."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from torch import nn


class Viewing(BaseFeaturesExtractor):
    """Asks its input to be contiguous, as most extractors that users write do."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space, features_dim=6)
        self.linear, self.scale = nn.Linear(int(np.prod(space.shape)), 6), nn.Parameter(torch.tensor(1.5))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale * self.linear(observations.view(len(observations), -1)))


class Striding(Viewing):
    """Reads its input in the order of memory."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        size = observations[0].numel()
        rows = observations.as_strided((len(observations), size), (size, 1))
        return torch.tanh(self.scale * self.linear(rows * torch.linspace(-1.0, 1.0, size)))


class Normalizing(FlattenExtractor):
    """Layers that differ between collecting and training, and random numbers."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layers = nn.Sequential(nn.BatchNorm1d(self.features_dim), nn.Dropout(0.2))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(super().forward(observations))


class Counting(FlattenExtractor):
    """Changes with every call."""

    calls = 0

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(observations) * (1.0 + 0.1 * (self.calls % 5))


class Unused(FlattenExtractor):
    """A layer without a gradient, for now."""

    uses = False

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layer = nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = super().forward(observations)
        return features + self.layer(features) if self.uses else features


class Alternating(Unused):
    """Uses its layer, which then has a gradient, in every other minibatch."""

    calls = 0

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.uses = self.calls % 2 == 1
        return super().forward(observations)


class Reversing(FlattenExtractor):
    """A hook on the gradient of features."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layer = nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = self.layer(super().forward(observations))
        if features.requires_grad:
            features.register_hook(lambda gradient: -0.5 * gradient)
        return features


class Residual(nn.Sequential):
    """Layers that NumPy could run, in a module that does something else with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent = super().forward(x)
        return 2.0 * latent + x.mean(dim=1, keepdim=True)


class Scaled(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.scale = layers, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(x)


class WithResidualNets(ActorCriticPolicy):
    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        self.mlp_extractor.policy_net = Residual(*self.mlp_extractor.policy_net)
        self.mlp_extractor.value_net = Residual(*self.mlp_extractor.value_net)


def overriding(name: str, function: Callable) -> type[ActorCriticPolicy]:
    """A policy class whose method ``name`` is ``function(method, *arguments)``."""
    original = getattr(ActorCriticPolicy, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(original, self), *args, **kwargs)

    return type(name, (ActorCriticPolicy,), {name: method})


Overriding = overriding("evaluate_actions", lambda f, *x: (lambda values, log_prob, _: (2.0 * values, log_prob, None))(*f(*x)))
