"""The policy as the collection uses it: from the observations of one step to actions, values and log-probabilities."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from sb3_ano.algorithms.policies import PolicyEvaluation, overridden_method

Observations: TypeAlias = np.ndarray | dict[str, np.ndarray]
#: Actions ``(n_envs, ...)``, values ``(n_envs, 1)``, log-probabilities ``(n_envs,)``.
Acted: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class Actor(Protocol):
    """Samples actions; valid for one rollout, in which the parameters do not change."""

    def __call__(self, observations: Observations) -> Acted: ...

    def values(self, observations: Observations) -> np.ndarray:
        """Values of observations, ``(batch, 1)``."""
        ...


def make_actor(model: Any, n_envs: int, n_steps: int, previous: Actor | None = None) -> Actor:
    """The fastest actor that gives what ``model.policy(observations)`` gives, random numbers included.

    :param model: an on-policy algorithm with ``policy`` and ``precision``
    :param n_envs: observations in a step
    :param n_steps: steps of the rollout
    :param previous: the actor of this rollout so far, if a callback has changed the policy
    """
    if model.precision == "float32" and NumpyActor.supports(model.policy, n_envs):
        return NumpyActor(model.policy, n_envs, n_steps, previous if isinstance(previous, NumpyActor) else None)
    return TorchActor(model.policy, model.precision)


class TorchActor:
    """Any policy, on any device.

    :param policy: actor and critic
    :param precision: of its layers
    """

    def __init__(self, policy: ActorCriticPolicy, precision: str) -> None:
        self._evaluation = PolicyEvaluation(policy, precision)
        self._device = policy.device
        if self._device.type == "cpu":
            self._evaluation.freeze()

    @torch.no_grad()
    def __call__(self, observations: Observations) -> Acted:
        actions, values, log_probs = self._evaluation.act(obs_as_tensor(observations, self._device))
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        return self._evaluation.values(obs_as_tensor(observations, self._device)).cpu().numpy()


class _Layer(NamedTuple):
    """``activation(x @ weight + bias)``; the activation works in place."""

    weight: np.ndarray
    bias: np.ndarray
    activation: Callable[[np.ndarray], Any] | None


def _tanh(x: np.ndarray) -> None:
    np.tanh(x, out=x)


def _relu(x: np.ndarray) -> None:
    np.maximum(x, np.float32(0.0), out=x)


_ACTIVATIONS: dict[type[nn.Module], Callable[[np.ndarray], None]] = {nn.Tanh: _tanh, nn.ReLU: _relu}
#: OpenBLAS multiplies matrices with more than this many products in several threads. They go on spinning for a while, on the
#: processors that environments could use.
_ONE_THREAD = 4 * 65536


class NumpyActor:
    """SB3's MlpPolicy on the CPU without PyTorch's cost a call, which is ten times that of NumPy.

    Where the layers are small, actor and critic are one network: their first layers see the same input, and the following ones
    are stacked into block-diagonal matrices, because a call costs more than multiplying by zeros.

    :param policy: one that :meth:`supports` accepts
    :param n_envs: observations in a step
    :param n_steps: steps of the rollout
    :param previous: the actor whose random numbers to go on with
    """

    @staticmethod
    def supports(policy: ActorCriticPolicy, n_envs: int) -> bool:
        """Whether this is SB3's MlpPolicy on the CPU: Tanh or ReLU, observations of numbers, no gSDE, and small layers."""
        if overridden_method(policy) or policy.device.type != "cpu" or policy.squash_output:
            return False
        if type(policy.mlp_extractor) is not MlpExtractor or not isinstance(policy.observation_space, spaces.Box):
            return False
        if type(policy.features_extractor) is not FlattenExtractor or not policy.share_features_extractor:
            return False
        if type(policy.action_dist) not in _SAMPLERS or len(policy.observation_space.shape) == 3:
            return False
        if any(module._forward_hooks or module._forward_pre_hooks for module in policy.modules()):
            return False
        actor, critic = [*policy.mlp_extractor.policy_net], [*policy.mlp_extractor.value_net]
        linear = [*actor[::2], *critic[::2], policy.action_net, policy.value_net]
        activations = [*actor[1::2], *critic[1::2]]
        return (
            len(actor) % 2 == len(critic) % 2 == 0
            and all(type(layer) is nn.Linear and layer.bias is not None for layer in linear)
            and len({type(layer) for layer in activations} | set(_ACTIVATIONS)) == len(_ACTIVATIONS)
            and len({type(layer) for layer in activations}) <= 1
            and all(parameter.dtype == torch.float32 for parameter in policy.parameters())
            and n_envs * max(layer.weight.numel() for layer in linear) <= _ONE_THREAD
        )

    def __init__(self, policy: ActorCriticPolicy, n_envs: int, n_steps: int, previous: "NumpyActor | None" = None) -> None:
        actor = _layers(policy.mlp_extractor.policy_net, policy.action_net)
        critic = _layers(policy.mlp_extractor.value_net, policy.value_net)
        self._critic = critic
        self._joint: list[_Layer] = []
        if len(actor) == len(critic):
            joint = [_stacked(*pair, shared_input=i == 0) for i, pair in enumerate(zip(actor, critic, strict=True))]
            if n_envs * max(layer.weight.size for layer in joint) <= _ONE_THREAD:
                self._joint = joint
        self._actor = actor
        self._head_size = actor[-1].weight.shape[1]
        self._draw: _Draw = _standard_normal(n_envs, self._head_size, n_steps) if previous is None else previous._draw
        self._sample = _SAMPLERS[type(policy.action_dist)](policy, self._draw)

    def __call__(self, observations: Observations) -> Acted:
        inputs = _flat(observations)
        if self._joint:
            outputs = _run(self._joint, inputs)
            head, values = outputs[:, : self._head_size], outputs[:, self._head_size :].copy()
        else:
            head, values = _run(self._actor, inputs), _run(self._critic, inputs)
        actions, log_probs = self._sample(head)
        return actions, values, log_probs

    def values(self, observations: Observations) -> np.ndarray:
        return _run(self._critic, _flat(observations))


def _flat(observations: Observations) -> np.ndarray:
    """One float32 row an environment."""
    array = np.asarray(observations)
    return array.reshape(len(array), -1).astype(np.float32)


def _run(layers: list[_Layer], x: np.ndarray) -> np.ndarray:
    for weight, bias, activation in layers:
        x = x.dot(weight)
        x += bias
        if activation is not None:
            activation(x)
    return x


def _layers(network: nn.Module, head: nn.Module) -> list[_Layer]:
    """The network and its head, weights transposed; arrays share memory with the parameters."""
    modules = [*network, head]  # type: ignore[misc]
    layers: list[_Layer] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            weight, bias = module.weight.detach().numpy().T, module.bias.detach().numpy()
            layers.append(_Layer(weight, bias, None))
        else:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[type(module)])
    return layers


def _stacked(actor: _Layer, critic: _Layer, shared_input: bool) -> _Layer:
    """One layer that computes both; block-diagonal unless their input is the same."""
    bias = np.concatenate([actor.bias, critic.bias])
    if shared_input:
        return _Layer(np.concatenate([actor.weight, critic.weight], axis=1), bias, actor.activation)
    rows, columns = actor.weight.shape
    weight = np.zeros((rows + critic.weight.shape[0], columns + critic.weight.shape[1]), dtype=np.float32)
    weight[:rows, :columns] = actor.weight
    weight[rows:, columns:] = critic.weight
    return _Layer(weight, bias, actor.activation)


#: From the output of the action head ``(n_envs, n)`` to actions, shaped as the action space, and log-probabilities.
_Sampler: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


#: Standard normal numbers for one step, ``(n_envs, size of an action)``.
_Draw: TypeAlias = Callable[[], np.ndarray]


def _standard_normal(n_envs: int, size: int, n_steps: int) -> _Draw:
    """The numbers that SB3's policy would draw step by step, ``(n_envs, size)`` a call.

    Of 16 numbers on, PyTorch's CPU generator fills a tensor in a vectorised way. Fewer are drawn one by one, and so are the
    numbers of a tensor that is not contiguous: those of a whole rollout, drawn at once, are the same.
    """
    if n_envs * size >= 16:
        return lambda: torch.randn(n_envs, size).numpy()

    def rollouts() -> Iterator[np.ndarray]:
        while True:
            drawn = torch.empty(n_steps * n_envs * size, 2)[:, 0].normal_().numpy()
            yield from np.ascontiguousarray(drawn).reshape(n_steps, n_envs, size)

    return rollouts().__next__


def _gaussian_sampler(policy: ActorCriticPolicy, draw: _Draw) -> _Sampler:
    log_std = policy.log_std.detach().numpy()
    std = np.exp(log_std)
    constant = np.float32(np.log(std).sum() + len(std) * math.log(math.sqrt(2.0 * math.pi)))
    minus_half = np.full(len(std), -0.5, dtype=np.float32)
    shape = policy.action_space.shape or ()

    def sample(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = draw() * std
        actions += mean
        # Of the action as it was rounded, not of the number drawn: the update looks at the action.
        deviation = actions - mean
        deviation /= std
        deviation *= deviation
        log_probs = deviation.dot(minus_half)
        log_probs -= constant
        return actions.reshape(-1, *shape), log_probs

    return sample


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _sample_index(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    log_probs = _log_softmax(logits)
    indices = torch.multinomial(torch.from_numpy(np.exp(log_probs)), 1, replacement=True).numpy()
    return indices[:, 0], np.take_along_axis(log_probs, indices, axis=1)[:, 0]


def _categorical_sampler(policy: ActorCriticPolicy, draw: _Draw) -> _Sampler:
    return _sample_index


def _multi_categorical_sampler(policy: ActorCriticPolicy, draw: _Draw) -> _Sampler:
    ends = np.cumsum(policy.action_dist.action_dims)[:-1]  # type: ignore[attr-defined]

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [_sample_index(part) for part in np.split(logits, ends, axis=1)]
        return np.stack([indices for indices, _ in parts], axis=1), np.sum([log_probs for _, log_probs in parts], axis=0)

    return sample


def _bernoulli_sampler(policy: ActorCriticPolicy, draw: _Draw) -> _Sampler:
    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = torch.bernoulli(torch.from_numpy(logits).sigmoid()).numpy()
        # log sigmoid(l) where the action is 1, log sigmoid(-l) where it is 0
        log_probs = -np.logaddexp(np.float32(0.0), np.where(actions > 0.0, -logits, logits))
        return actions, log_probs.sum(axis=1)

    return sample


_SAMPLERS: dict[type, Callable[[ActorCriticPolicy, _Draw], _Sampler]] = {
    DiagGaussianDistribution: _gaussian_sampler,
    CategoricalDistribution: _categorical_sampler,
    MultiCategoricalDistribution: _multi_categorical_sampler,
    BernoulliDistribution: _bernoulli_sampler,
}
