"""Act with a policy in one rollout: from the observations of a step to actions, values and log-probabilities."""

import itertools
import math
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import distributions
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from sb3_ano.fast.policy import MASKED, PolicyEvaluation, choices, is_maskable, is_recurrent
from sb3_ano.fast.private import registries
from sb3_ano.fast.rules import ONE_THREAD, Decisions, is_library_code
from sb3_ano.policies import hidden_features

Observations: TypeAlias = np.ndarray | dict[str, np.ndarray]
#: Actions ``(n_envs, ...)``, values ``(n_envs, 1)``, log-probabilities ``(n_envs,)``.
Acted: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

# Parameters up to which copies of a policy take little memory. A step of a larger one gains a few percent from them.
_COPIED = 2**21


class NotFiniteError(ValueError):
    """The policy returned NaN or Inf, for a reason that is not known here."""

    def __init__(self) -> None:
        super().__init__("the policy returned NaN or Inf; look at its parameters")


class Actor:
    """Act, in PyTorch, with any policy on any device; subclasses do the same with less work.

    :param model: on-policy algorithm
    :param evaluation: evaluation of its policy
    """

    #: Whether it acts with copies of the policy's parameters, which have to be compared with them if they may change.
    holds_copies = False

    def __init__(self, model: OnPolicyAlgorithm, evaluation: PolicyEvaluation) -> None:
        self._policy = model.policy
        self._device = model.policy.device
        self._evaluation = evaluation
        self.holds_copies = evaluation.has_copies

    @torch.no_grad()
    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        """Act on the observations of one step.

        :param observations: observations of all environments
        :param masks: actions that are allowed, bool ``(n_envs, n)``, or None for all
        """
        allowed = None if masks is None else torch.as_tensor(masks, device=self._device)
        actions, values, log_probs = self._evaluation.act(obs_as_tensor(observations, self._device), allowed)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        """Return the values of observations, ``(n_envs, 1)``."""
        return self._evaluation.values(obs_as_tensor(observations, self._device)).cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
        """Return the values of last observations, which have no batch dimension, ``(len(observations),)``.

        :param observations: last observations of episodes
        :param environments: environments that they are of
        """
        values = []
        # One at a time as in SB3, because custom modules may count their calls or look at the batch.
        for observation in observations:
            inputs = self._policy.obs_to_tensor(observation)[0]
            values.append(self._evaluation.values(inputs).cpu().numpy().reshape(-1))
        return np.concatenate(values)

    def stored(self) -> dict[str, Any]:
        """Return what the rollout buffer stores of the last step in addition to SB3's arrays; called once per step."""
        return {}

    def variables(self) -> dict[str, Any]:
        """Return local variables that callbacks find, in addition to those of SB3's loop."""
        return {}


class TorchActor(Actor):
    """Act with layers of SB3 in PyTorch on the CPU, and draw actions in NumPy.

    :param model: on-policy algorithm
    :param evaluation: evaluation of its policy
    """

    def __init__(self, model: OnPolicyAlgorithm, evaluation: PolicyEvaluation) -> None:
        super().__init__(model, evaluation)
        self._sample = make_sampler(model.policy, model.n_envs)

    @torch.no_grad()
    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        outputs, values = self._evaluation.heads(obs_as_tensor(observations, self._device))
        head = outputs.numpy()
        if masks is not None:
            head = np.where(masks, head, MASKED)
        actions, log_probs = self._sample(head)
        return actions, values.numpy(), log_probs


class LstmActor(Actor):
    """Act with an LSTM policy, and keep its states in the model as sb3-contrib does.

    :param model: algorithm with ``_last_lstm_states``, those before the current step
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        self._policy: Any = model.policy
        self._device = model.policy.device
        self._states = model._last_lstm_states

    @torch.no_grad()
    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        options = {} if masks is None else {"action_masks": masks}
        inputs = obs_as_tensor(observations, self._device)
        starts = self._flags(self._model._last_episode_starts)
        actions, values, log_probs, self._states = self._policy(inputs, self._model._last_lstm_states, starts, **options)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        inputs = obs_as_tensor(observations, self._device)
        starts = self._flags(self._model._last_episode_starts)
        return self._policy.predict_values(inputs, self._model._last_lstm_states.vf, starts).cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
        hidden, cell = self._states.vf
        values = []
        for observation, index in zip(observations, environments, strict=True):
            inputs = self._policy.obs_to_tensor(observation)[0]
            states = (hidden[:, index : index + 1].contiguous(), cell[:, index : index + 1].contiguous())
            values.append(self._policy.predict_values(inputs, states, self._flags([False])).cpu().numpy())
        return np.concatenate(values).reshape(-1)

    def stored(self) -> dict[str, Any]:
        before = self._model._last_lstm_states
        self._model._last_lstm_states = self._states
        return {"lstm_states": before}

    def variables(self) -> dict[str, Any]:
        return {"lstm_states": self._states, "episode_starts": self._flags(self._model._last_episode_starts)}

    def _flags(self, flags: Any) -> torch.Tensor:
        return torch.as_tensor(flags, dtype=torch.float32, device=self._device)


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


class NumpyActor(Actor):
    """Act with SB3's policies without images on the CPU in NumPy, whose cost per call is a tenth of PyTorch's.

    If the layers are small, actor and critic are one network: their first layers see the same input, and the following ones
    are stacked into block-diagonal matrices, because a call costs more than multiplying by zeros.

    :param policy: policy to which no rule for ``"acting"`` applies
    :param n_envs: number of observations per step
    """

    # Its layers share memory with the parameters, but stacked ones, standard deviations and so on are copies.
    holds_copies = True

    def __init__(self, policy: ActorCriticPolicy, n_envs: int) -> None:
        self._actor = _layers(policy.mlp_extractor.policy_net, policy.action_net)
        self._critic = _layers(policy.mlp_extractor.value_net, policy.value_net)
        hidden = hidden_features(policy)
        if hidden.any():
            # What the actor does not see has no weight.
            weight = np.where(hidden[:, None], np.float32(0.0), self._actor[0].weight)
            self._actor[0] = self._actor[0]._replace(weight=weight)
        self._joint: list[_Layer] = []
        if len(self._actor) == len(self._critic):
            self._joint = _joined(self._actor, self._critic, n_envs)
        self._rows = _rows(policy.observation_space)
        self._head_size = self._actor[-1].weight.shape[1]
        self._sample = make_sampler(policy, n_envs)

    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        inputs = self._rows(observations)
        if self._joint:
            outputs = _run(self._joint, inputs)
            head = outputs[:, : self._head_size]
            values = outputs[:, self._head_size :].copy()
        else:
            head = _run(self._actor, inputs)
            values = _run(self._critic, inputs)

        if masks is not None:
            head = np.where(masks, head, MASKED)
        actions, log_probs = self._sample(head)
        return actions, values, log_probs

    def values(self, observations: Observations) -> np.ndarray:
        return _run(self._critic, self._rows(observations))

    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
        if not isinstance(observations[0], dict):
            return self.values(np.stack(observations)).reshape(-1)

        batch = {key: np.stack([part[key] for part in observations]) for key in observations[0]}
        return self.values(batch).reshape(-1)


def make_actor(model: OnPolicyAlgorithm, evaluation: PolicyEvaluation, decisions: Decisions) -> Actor:
    """Make the fastest actor that computes ``model.policy(observations)``, with the same random numbers.

    :param model: on-policy algorithm
    :param evaluation: evaluation of its policy
    :param decisions: decisions for the rollout
    """
    policy = model.policy
    if is_recurrent(policy):
        return LstmActor(model)
    if decisions.acting is None:
        return NumpyActor(policy, model.n_envs)

    if policy.device.type == "cpu" and decisions.policy is None:
        layers = (policy.mlp_extractor, policy.features_extractor, policy.pi_features_extractor, policy.vf_features_extractor)
        # Custom layers may hold more than their parameters, and are not copied.
        if _may_be_copied(policy, evaluation) and all(is_library_code(layer) for layer in layers):
            evaluation.use_copies()
        if decisions.library_code and _can_be_sampled(policy):
            return TorchActor(model, evaluation)

    return Actor(model, evaluation)


def _may_be_copied(policy: ActorCriticPolicy, evaluation: PolicyEvaluation) -> bool:
    """Tell whether copies of the layers take little memory, or gain much."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    # For bfloat16, all weights would otherwise be converted at each step.
    return size <= _COPIED or evaluation.is_bfloat16


def _can_be_sampled(policy: ActorCriticPolicy) -> bool:
    """Tell whether NumPy can draw the actions of a policy with the distribution that SB3 makes."""
    gaussian = type(policy.action_dist) is distributions.DiagGaussianDistribution
    if not (gaussian or _is_categorical(policy)) or torch.is_autocast_enabled("cpu"):
        return False
    if gaussian and policy.log_std.shape != (getattr(policy.action_net, "out_features", None),):
        return False
    return all(type(part) is nn.Parameter and part.dtype == torch.float32 for part in policy.parameters())


class Snapshot:
    """Keep modules, their attributes, hooks, parameters and buffers of a policy at one moment.

    :param policy: actor and critic
    :param numbers: whether to keep copies of parameters and buffers; a policy that acts with its own needs none
    """

    def __init__(self, policy: ActorCriticPolicy, numbers: bool) -> None:
        self._policy = policy
        self._action_dist = policy.action_dist
        self._known = True
        self._held: list[tuple[dict[str, Any], list[Any]]] = []
        for module in policy.modules():
            found = registries(module)
            if found is None:
                self._known = False
                continue
            for registry in (vars(module), *found):
                self._held.append((registry, [*registry.values()]))

        self._values = []
        if numbers:
            # Values, because no version counter shows what was written through ``parameter.data``.
            for tensor in itertools.chain(policy.parameters(), policy.buffers()):
                self._values.append((tensor, tensor.detach().clone()))

    def is_current(self, policy: ActorCriticPolicy) -> bool:
        """Tell whether this is the policy, and is still the same; False if that cannot be known."""
        if not self._known or policy is not self._policy or policy.action_dist is not self._action_dist:
            return False
        for now, then in self._held:
            if len(now) != len(then) or not all(map(is_, now.values(), then)):
                return False
        return all(torch.equal(tensor, value) for tensor, value in self._values)


def _rows(space: spaces.Space[Any]) -> Callable[[Any], np.ndarray]:
    """Return a function from observations to one float32 row per environment, as SB3 makes them."""
    if isinstance(space, spaces.Dict):
        parts = {key: _rows(part) for key, part in space.spaces.items()}
        return lambda observations: np.concatenate([part(observations[key]) for key, part in parts.items()], axis=1)

    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return lambda observations: _flat(observations).astype(np.float32, copy=False)

    ends = np.cumsum(choices(space)).tolist()
    columns = [slice(*span) for span in itertools.pairwise([0, *ends])]

    def one_hot(observations: Any) -> np.ndarray:
        # A negative index raises, as in SB3.
        indices = _flat(observations).T.astype(np.uint32)
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
    activations = [_ACTIVATIONS[type(module)] for module in modules[1::2]]
    layers = []
    for linear, activation in zip(modules[::2], [*activations, None], strict=True):
        layers.append(_Layer(linear.weight.detach().numpy().T, linear.bias.detach().numpy(), activation))
    return layers


def _joined(actor: list[_Layer], critic: list[_Layer], n_envs: int) -> list[_Layer]:
    """Join the layers of two networks to those of one that computes both; none if one would be too large."""
    layers = []
    for index, (left, right) in enumerate(zip(actor, critic, strict=True)):
        # The first layers see the same input.
        rows = len(left.weight) if index == 0 else len(left.weight) + len(right.weight)
        columns = left.weight.shape[1] + right.weight.shape[1]
        # Before they are stacked, because block-diagonal matrices of wide layers take much memory.
        if n_envs * rows * columns > ONE_THREAD:
            return []

        if index == 0:
            weight = np.concatenate([left.weight, right.weight], axis=1)
        else:
            weight = torch.block_diag(torch.from_numpy(left.weight), torch.from_numpy(right.weight)).numpy()
        layers.append(_Layer(weight, np.concatenate([left.bias, right.bias]), left.activation))
    return layers


#: From the output of the action head ``(n_envs, n)`` to actions, shaped as the action space, and log-probabilities.
Sampler: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _is_categorical(policy: ActorCriticPolicy) -> bool:
    plain = (distributions.CategoricalDistribution, distributions.MultiCategoricalDistribution)
    return is_maskable(policy) or type(policy.action_dist) in plain


def make_sampler(policy: ActorCriticPolicy, n_envs: int) -> Sampler:
    """Return a function that draws actions as the distribution of a policy does, with the same random numbers."""
    if type(policy.action_dist) is distributions.DiagGaussianDistribution:
        return _gaussian_sampler(policy, n_envs)
    if _is_categorical(policy):
        return _categorical_sampler(policy, n_envs)

    @torch.no_grad()
    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distribution = policy.action_dist.proba_distribution(torch.from_numpy(logits))
        actions = distribution.get_actions()
        return actions.numpy(), distribution.log_prob(actions).numpy()

    return sample


def _gaussian_sampler(policy: ActorCriticPolicy, n_envs: int) -> Sampler:
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


def _categorical_sampler(policy: ActorCriticPolicy, n_envs: int) -> Sampler:
    samplers = [_one_of(size, n_envs) for size in choices(policy.action_space)]
    if isinstance(policy.action_space, spaces.Discrete):
        return samplers[0]

    ends = np.cumsum(choices(policy.action_space)).tolist()
    parts = [slice(*span) for span in itertools.pairwise([0, *ends])]
    shape = policy.action_space.shape or ()

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = []
        log_probs = []
        for sample_dimension, part in zip(samplers, parts, strict=True):
            action, log_prob = sample_dimension(logits[:, part])
            actions.append(action)
            log_probs.append(log_prob)
        return np.stack(actions, axis=1).reshape(-1, *shape), np.sum(log_probs, axis=0)

    return sample


def _one_of(size: int, n_envs: int) -> Sampler:
    noise = torch.empty(n_envs, size, dtype=torch.float32, device="cpu")
    drawn = noise.numpy()
    row = np.arange(n_envs)

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
