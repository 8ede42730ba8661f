"""Act with a policy in one rollout: from the observations of a step to actions, values and log-probabilities."""

import math
from collections.abc import Callable
from operator import is_
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

from sb3_ano._compat import registries
from sb3_ano.algorithms.policy_evaluation import PolicyEvaluation, customization

Observations: TypeAlias = np.ndarray | dict[str, np.ndarray]
#: Actions ``(n_envs, ...)``, values ``(n_envs, 1)``, log-probabilities ``(n_envs,)``.
Acted: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class Actor(Protocol):
    """The policy of one rollout."""

    def __call__(self, observations: Observations) -> Acted: ...

    def values(self, observations: Observations) -> np.ndarray:
        """Return the values of observations, ``(batch, 1)``."""
        ...

    def terminal_values(self, observations: list[Any]) -> np.ndarray:
        """Return the values of last observations, which have no batch dimension, ``(len(observations),)``."""
        ...


def make_actor(model: Any, n_envs: int) -> Actor:
    """Make the fastest actor that computes ``model.policy(observations)``, with the same random numbers.

    :param model: an on-policy algorithm with ``policy`` and ``precision``
    :param n_envs: number of observations per step
    """
    if model.precision == "float32" and NumpyActor.supports(model.policy, n_envs):
        return NumpyActor(model.policy, n_envs)
    return TorchActor(model.policy, model.precision)


class Snapshot:
    """Keep modules, hooks, replaced methods and parameters of a policy at one moment.

    :param policy: actor and critic
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self._policy, self._action_dist = policy, policy.action_dist
        self._attributes = [(vars(module), len(vars(module))) for module in policy.modules()]
        registered = [registries(module) for module in policy.modules()]
        self._known = None not in registered
        self._registries = [(registry, [*registry.values()]) for module in registered for registry in module or []]
        # Values, because no version counter shows what was written through ``parameter.data``.
        self._values = [(parameter, parameter.detach().clone()) for parameter in policy.parameters()]

    def is_current(self) -> bool:
        """Tell whether the policy is still the same; False if that cannot be known."""
        return (
            self._known
            and self._policy.action_dist is self._action_dist
            and all(len(attributes) == size for attributes, size in self._attributes)
            and all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in self._registries)
            and all(torch.equal(parameter, value) for parameter, value in self._values)
        )


class TorchActor:
    """Act with any policy, on any device.

    :param policy: actor and critic
    :param precision: precision of its layers
    """

    def __init__(self, policy: ActorCriticPolicy, precision: str) -> None:
        self._evaluation = PolicyEvaluation(policy, precision)
        self._policy, self._device = policy, policy.device
        if self._device.type == "cpu":
            self._evaluation.make_inference_copy()

    @torch.no_grad()
    def __call__(self, observations: Observations) -> Acted:
        actions, values, log_probs = self._evaluation.act(obs_as_tensor(observations, self._device))
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        return self._evaluation.values(obs_as_tensor(observations, self._device)).cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Any]) -> np.ndarray:
        # One at a time as in SB3, because custom modules may count their calls or look at the batch.
        inputs = [self._policy.obs_to_tensor(observation)[0] for observation in observations]
        return np.concatenate([self._evaluation.values(x).cpu().numpy().reshape(-1) for x in inputs])


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
    """Act with SB3's MlpPolicy on the CPU in NumPy, whose cost per call is a tenth of PyTorch's.

    If the layers are small, actor and critic are one network: their first layers see the same input, and the following ones
    are stacked into block-diagonal matrices, because a call costs more than multiplying by zeros.

    :param policy: policy that :meth:`supports` accepts
    :param n_envs: number of observations per step
    """

    @staticmethod
    def supports(policy: ActorCriticPolicy, n_envs: int) -> bool:
        """Tell whether this is SB3's MlpPolicy on the CPU, with Tanh or ReLU, Box observations, no gSDE, and small layers."""
        extractor, space = policy.mlp_extractor, policy.observation_space
        if customization(policy) is not None or policy.device.type != "cpu" or policy.squash_output:
            return False
        if type(extractor) is not MlpExtractor or type(space) is not spaces.Box or len(space.shape) == 3:
            return False
        if type(extractor.policy_net) is not nn.Sequential or type(extractor.value_net) is not nn.Sequential:
            return False
        if type(policy.features_extractor) is not FlattenExtractor or not policy.share_features_extractor:
            return False
        if type(policy.features_extractor.flatten) is not nn.Flatten or type(policy.action_dist) not in _SAMPLERS:
            return False
        actor, critic = [*extractor.policy_net], [*extractor.value_net]
        linear = [*actor[::2], *critic[::2], policy.action_net, policy.value_net]
        activations = {type(layer) for layer in [*actor[1::2], *critic[1::2]]}
        gaussian = type(policy.action_dist) is DiagGaussianDistribution
        return (
            len(actor) % 2 == len(critic) % 2 == 0
            and all(type(layer) is nn.Linear and layer.bias is not None for layer in linear)
            and len(activations) <= 1
            and activations <= _ACTIVATIONS.keys()
            and (not gaussian or policy.log_std.shape == (policy.action_net.out_features,))
            and all(type(parameter) is nn.Parameter and parameter.dtype == torch.float32 for parameter in policy.parameters())
            and not torch.is_autocast_enabled("cpu")
            and n_envs * max(layer.weight.numel() for layer in linear) <= _ONE_THREAD
        )

    def __init__(self, policy: ActorCriticPolicy, n_envs: int) -> None:
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
        self._sample = _SAMPLERS[type(policy.action_dist)](policy, n_envs)

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

    def terminal_values(self, observations: list[Any]) -> np.ndarray:
        return self.values(np.stack([np.asarray(observation) for observation in observations])).reshape(-1)


def _flat(observations: Observations) -> np.ndarray:
    """Return one float32 row per environment."""
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
    """Return a network and its head with transposed weights; the arrays share memory with the parameters."""
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
    """Join two layers to one that computes both; block-diagonal unless their input is the same."""
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


def _gaussian_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    std = np.exp(policy.log_std.detach().numpy())
    constant = np.float32(np.log(std).sum() + len(std) * math.log(math.sqrt(2.0 * math.pi)))
    minus_half = np.full(len(std), -0.5, dtype=np.float32)
    shape = policy.action_space.shape or ()
    # Filled as SB3's policy fills a new tensor of this shape at each step.
    noise = torch.empty(n_envs, len(std))
    drawn = noise.numpy()

    def sample(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        noise.normal_()
        actions = drawn * std
        actions += mean
        # From the rounded action, not from the number drawn, because the update reads the action.
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


def _categorical_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    return _sample_index


def _multi_categorical_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    ends = np.cumsum(policy.action_dist.action_dims)[:-1]  # type: ignore[attr-defined]

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [_sample_index(part) for part in np.split(logits, ends, axis=1)]
        return np.stack([indices for indices, _ in parts], axis=1), np.sum([log_probs for _, log_probs in parts], axis=0)

    return sample


def _bernoulli_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = torch.bernoulli(torch.from_numpy(logits).sigmoid()).numpy()
        # log sigmoid(l) where the action is 1, log sigmoid(-l) where it is 0
        log_probs = -np.logaddexp(np.float32(0.0), np.where(actions > 0.0, -logits, logits))
        return actions, log_probs.sum(axis=1)

    return sample


_SAMPLERS: dict[type, Callable[[ActorCriticPolicy, int], _Sampler]] = {
    DiagGaussianDistribution: _gaussian_sampler,
    CategoricalDistribution: _categorical_sampler,
    MultiCategoricalDistribution: _multi_categorical_sampler,
    BernoulliDistribution: _bernoulli_sampler,
}
