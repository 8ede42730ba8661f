"""Act with a policy in one rollout: from the observations of a step to actions, values and log-probabilities."""

import itertools
import math
from collections.abc import Callable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import distributions
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from sb3_ano._compat import registries
from sb3_ano.algorithms.policy_evaluation import MASKED, choices, customization, has_stock_distribution, make_evaluation

Observations: TypeAlias = np.ndarray | dict[str, np.ndarray]
#: Actions ``(n_envs, ...)``, values ``(n_envs, 1)``, log-probabilities ``(n_envs,)``.
Acted: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def make_actor(model: Any, n_envs: int) -> "Actor":
    """Make the fastest actor that computes ``model.policy(observations)``, with the same random numbers.

    :param model: an on-policy algorithm with ``policy`` and ``precision``
    :param n_envs: number of observations per step
    """
    if model.precision == "float32" and NumpyActor.supports(model.policy, n_envs):
        return NumpyActor(model.policy, n_envs)
    return TorchActor(model.policy, model.precision, n_envs, acts_with_copies(model))


# Parameters up to which copies of a policy take little memory. A step of a larger one gains a few percent from them.
_COPIED = 2**21


def acts_with_copies(model: Any) -> bool:
    """Tell whether a policy may act with copies of its parameters, which have to be compared with them at each step."""
    size = sum(parameter.numel() for parameter in model.policy.parameters())
    return bool(size <= _COPIED or model.precision == "bfloat16")  # which would convert all weights at each step


class Snapshot:
    """Keep modules, their attributes, hooks, parameters and buffers of a policy at one moment.

    :param policy: actor and critic
    :param numbers: whether to keep copies of parameters and buffers; a policy that acts with its own needs none
    """

    def __init__(self, policy: ActorCriticPolicy, numbers: bool = True) -> None:
        self._policy, self._action_dist = policy, policy.action_dist
        registered = [registries(module) for module in policy.modules()]
        self._known = None not in registered
        held = [*map(vars, policy.modules()), *(registry for module in registered for registry in module or [])]
        self._held = [(now, [*now.values()]) for now in held]
        # Values, because no version counter shows what was written through ``parameter.data``.
        tensors = itertools.chain(policy.parameters(), policy.buffers()) if numbers else ()
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def is_current(self, policy: ActorCriticPolicy) -> bool:
        """Tell whether this is the policy, and is still the same; False if that cannot be known."""
        return (
            self._known
            and policy is self._policy
            and policy.action_dist is self._action_dist
            and all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in self._held)
            and all(torch.equal(tensor, value) for tensor, value in self._values)
        )


class _Actor:
    """An actor whose steps have nothing to store, or to show to callbacks, but SB3's arrays."""

    #: Local variables that callbacks find, in addition to those of SB3's loop.
    variables: Mapping[str, Any] = MappingProxyType({})

    def columns(self) -> dict[str, Any]:
        """Return what the rollout buffer stores of a step in addition to SB3's arrays."""
        return {}


class TorchActor(_Actor):
    """Act with any policy, on any device.

    :param policy: actor and critic
    :param precision: precision of its layers
    :param n_envs: number of observations per step
    :param copied: whether to act with copies of its layers, laid out for it
    """

    def __init__(self, policy: ActorCriticPolicy, precision: str, n_envs: int, copied: bool = True) -> None:
        self._evaluation = make_evaluation(policy, precision)
        self._policy, self._device = policy, policy.device
        self._sample: _Sampler | None = None
        if self._device.type == "cpu":
            if copied:
                self._evaluation.make_inference_copy(n_envs)
            if self._evaluation.traits.stock and type(policy.action_dist) in SAMPLERS and _can_be_sampled(policy):
                self._sample = SAMPLERS[type(policy.action_dist)](policy, n_envs)

    @torch.no_grad()
    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        if self._sample is not None:
            outputs = self._evaluation.heads(obs_as_tensor(observations, self._device))
            head = outputs[0].numpy()
            drawn, chosen = self._sample(head if masks is None else np.where(masks, head, MASKED))
            return drawn, outputs[1].numpy(), chosen
        allowed = None if masks is None else torch.as_tensor(masks, device=self._device)
        actions, values, log_probs = self._evaluation.act(obs_as_tensor(observations, self._device), allowed)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        return self._evaluation.values(obs_as_tensor(observations, self._device)).cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
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


class NumpyActor(_Actor):
    """Act with SB3's policies without images on the CPU in NumPy, whose cost per call is a tenth of PyTorch's.

    If the layers are small, actor and critic are one network: their first layers see the same input, and the following ones
    are stacked into block-diagonal matrices, because a call costs more than multiplying by zeros.

    :param policy: policy that :meth:`supports` accepts
    :param n_envs: number of observations per step
    """

    @staticmethod
    def supports(policy: ActorCriticPolicy, n_envs: int) -> bool:
        """Tell whether this is SB3's policy on the CPU, with Tanh or ReLU, no images, no gSDE, and small layers."""
        extractor, features = policy.mlp_extractor, policy.features_extractor
        stock = type(extractor) is MlpExtractor and type(features) in (FlattenExtractor, CombinedExtractor)
        if customization(policy) is not None or not stock:
            return False
        parts = features.extractors.values() if type(features) is CombinedExtractor else [features.flatten]
        networks = extractor.policy_net, extractor.value_net
        if any(type(network) is not nn.Sequential for network in networks):
            return False
        actor, critic = [*networks[0], policy.action_net], [*networks[1], policy.value_net]
        linear, activations = [*actor[::2], *critic[::2]], {type(layer) for layer in actor[1::2] + critic[1::2]}
        return (
            all(type(layer) is nn.Linear and layer.bias is not None for layer in linear)
            and len(activations) <= 1
            and activations <= _ACTIVATIONS.keys()
            and all(type(part) is nn.Flatten for part in parts)
            and policy.share_features_extractor
            and not (getattr(policy, "use_sde", False) or policy.squash_output)
            and has_stock_distribution(policy)
            and _rows(policy.observation_space) is not None
            and _can_be_sampled(policy)
            and policy.device.type == "cpu"
            and n_envs * max(layer.weight.numel() for layer in linear) <= _ONE_THREAD
        )

    def __init__(self, policy: ActorCriticPolicy, n_envs: int) -> None:
        self._actor = _layers(policy.mlp_extractor.policy_net, policy.action_net)
        self._critic = _layers(policy.mlp_extractor.value_net, policy.value_net)
        self._joint: list[_Layer] = []
        if len(self._actor) == len(self._critic):
            pairs = [*zip(self._actor, self._critic, strict=True)]
            # Before they are stacked, because block-diagonal matrices of wide layers take much memory.
            if n_envs * max(_stacked_size(*pair, shared_input=i == 0) for i, pair in enumerate(pairs)) <= _ONE_THREAD:
                self._joint = [_stacked(*pair, shared_input=i == 0) for i, pair in enumerate(pairs)]
        self._rows: Any = _rows(policy.observation_space)
        self._head_size = self._actor[-1].weight.shape[1]
        self._sample = SAMPLERS.get(type(policy.action_dist), _sb3_sampler)(policy, n_envs)

    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        inputs = self._rows(observations)
        if self._joint:
            outputs = _run(self._joint, inputs)
            head, values = outputs[:, : self._head_size], outputs[:, self._head_size :].copy()
        else:
            head, values = _run(self._actor, inputs), _run(self._critic, inputs)
        actions, log_probs = self._sample(head if masks is None else np.where(masks, head, MASKED))
        return actions, values, log_probs

    def values(self, observations: Observations) -> np.ndarray:
        """Return the values of observations, ``(batch, 1)``."""
        return _run(self._critic, self._rows(observations))

    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
        """Return the values of last observations, which have no batch dimension, ``(len(observations),)``."""
        if not isinstance(observations[0], dict):
            return self.values(np.stack(observations)).reshape(-1)
        batch = {key: np.stack([part[key] for part in observations]) for key in observations[0]}
        return self.values(batch).reshape(-1)


def _can_be_sampled(policy: ActorCriticPolicy) -> bool:
    """Tell whether NumPy can draw the actions of a policy with the distribution that SB3 makes."""
    gaussian = type(policy.action_dist) is distributions.DiagGaussianDistribution
    return (
        all(type(parameter) is nn.Parameter and parameter.dtype == torch.float32 for parameter in policy.parameters())
        and (not gaussian or policy.log_std.shape == (getattr(policy.action_net, "out_features", None),))
        and not torch.is_autocast_enabled("cpu")
    )


#: The policy of one rollout.
Actor: TypeAlias = NumpyActor | TorchActor


def _rows(space: spaces.Space[Any]) -> Callable[[Any], np.ndarray] | None:
    """Return a function from observations to one float32 row per environment, as SB3 makes them; None for images."""
    if isinstance(space, spaces.Dict):
        parts = {key: _rows(part) for key, part in space.spaces.items()}
        if None in parts.values():
            return None
        return lambda observations: np.concatenate([part(observations[key]) for key, part in parts.items()], axis=1)  # type: ignore[misc]
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        ends = np.cumsum(choices(space)).tolist()
        columns = [slice(*span) for span in itertools.pairwise([0, *ends])]

        def one_hot(observations: Any) -> np.ndarray:
            indices = _flat(observations).T.astype(np.uint32)  # a negative index raises, as in SB3
            batch = np.arange(indices.shape[1])
            # One row per environment. A table of all codes would have as many rows as there are values.
            rows = np.zeros((len(batch), ends[-1]), dtype=np.float32)
            if len(columns) == 1:
                rows[batch, indices[0]] = 1.0
                return rows
            for part, index in zip(columns, indices, strict=True):
                rows[:, part][batch, index] = 1.0
            return rows

        return one_hot
    if len(space.shape or ()) == 3:
        return None
    return lambda observations: _flat(observations).astype(np.float32, copy=False)


def _flat(observations: Any) -> np.ndarray:
    array = np.asarray(observations)
    return array.reshape(len(array), -1)


def _run(layers: list[_Layer], x: np.ndarray) -> np.ndarray:
    for weight, bias, activation in layers:
        x = x.dot(weight)
        x += bias
        if activation is not None:
            activation(x)
    return x


def _layers(network: nn.Sequential, head: Any) -> list[_Layer]:
    """Return a network and its head with transposed weights; the arrays share memory with the parameters."""
    modules: list[Any] = [*network, head]
    activations = [*(_ACTIVATIONS[type(module)] for module in modules[1::2]), None]
    linear = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in modules[::2]]
    return [_Layer(*arrays, activation) for arrays, activation in zip(linear, activations, strict=True)]


def _stacked_size(actor: _Layer, critic: _Layer, shared_input: bool) -> int:
    """Return the number of weights of the layer that :func:`_stacked` makes."""
    inputs = len(actor.weight) if shared_input else len(actor.weight) + len(critic.weight)
    return int(inputs * (actor.weight.shape[1] + critic.weight.shape[1]))


def _stacked(actor: _Layer, critic: _Layer, shared_input: bool) -> _Layer:
    """Join two layers to one that computes both; block-diagonal unless their input is the same."""
    if shared_input:
        weight = np.concatenate([actor.weight, critic.weight], axis=1)
    else:
        weight = torch.block_diag(torch.from_numpy(actor.weight), torch.from_numpy(critic.weight)).numpy()
    return _Layer(weight, np.concatenate([actor.bias, critic.bias]), actor.activation)


#: From the output of the action head ``(n_envs, n)`` to actions, shaped as the action space, and log-probabilities.
_Sampler: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class NotFiniteError(ValueError):
    """The policy returned NaN or Inf, for a reason that is not known here."""

    def __init__(self) -> None:
        super().__init__("the policy returned NaN or Inf; look at its parameters")


def _gaussian_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    with np.errstate(over="ignore"):  # the sampler reports it, with the parameter
        std = np.exp(policy.log_std.detach().numpy())
    constant = np.float32(np.log(std).sum() + len(std) * math.log(math.sqrt(2.0 * math.pi)))
    minus_half = np.full(len(std), -0.5, dtype=np.float32)
    shape = policy.action_space.shape or ()
    # Filled as SB3's policy fills a new tensor of this shape at each step.
    noise = torch.empty(n_envs, len(std), dtype=torch.float32, device="cpu")
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
        if not math.isfinite(log_probs.sum()):
            raise NotFiniteError
        return actions.reshape(-1, *shape), log_probs

    return sample


def _categorical_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    samplers = [_one_of(size, n_envs) for size in choices(policy.action_space)]
    if isinstance(policy.action_space, spaces.Discrete):
        return samplers[0]
    ends = np.cumsum(choices(policy.action_space)).tolist()
    parts = [slice(*span) for span in itertools.pairwise([0, *ends])]
    shape = policy.action_space.shape or ()

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions, log_probs = zip(*[one(logits[:, part]) for one, part in zip(samplers, parts, strict=True)], strict=True)
        return np.stack(actions, axis=1).reshape(-1, *shape), np.sum(log_probs, axis=0)

    return sample


def _one_of(size: int, n_envs: int) -> _Sampler:
    noise = torch.empty(n_envs, size, dtype=torch.float32, device="cpu")
    drawn, row = noise.numpy(), np.arange(n_envs)

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        largest = logits.max(axis=1, keepdims=True)
        probs = np.exp(logits - largest)
        total = probs.sum(axis=1)
        noise.exponential_()  # what torch.multinomial does for one sample per row
        probs /= drawn
        actions = probs.argmax(axis=1)
        # Added before it is subtracted, as in PyTorch: with masks that allow nothing, logits are so large that only this is 0.
        chosen = logits[row, actions] - (largest[:, 0] + np.log(total))
        if not math.isfinite(chosen.sum()):
            raise NotFiniteError
        return actions, chosen

    return sample


def _sb3_sampler(policy: ActorCriticPolicy, n_envs: int) -> _Sampler:
    @torch.no_grad()
    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distribution = policy.action_dist.proba_distribution(torch.from_numpy(logits))
        actions = distribution.get_actions()
        return actions.numpy(), distribution.log_prob(actions).numpy()

    return sample


SAMPLERS: dict[type, Callable[[ActorCriticPolicy, int], _Sampler]] = {
    distributions.DiagGaussianDistribution: _gaussian_sampler,
    distributions.CategoricalDistribution: _categorical_sampler,
    distributions.MultiCategoricalDistribution: _categorical_sampler,
}
