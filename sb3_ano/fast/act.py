"""Act with a policy in one rollout: from the observations of a step to actions, values and log-probabilities.

An actor is made for one rollout, during which parameters do not change. :func:`make_actor` picks the fastest one that computes
``policy(observations)``: :class:`NumpyActor`, :class:`TorchActor`, or :class:`Actor`, which calls the policy. All of them take
their random numbers from PyTorch's generator, with the calls that SB3's distributions make.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

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

if TYPE_CHECKING:
    # sb3-contrib takes time to import, and most models do not need it.
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

Observations: TypeAlias = np.ndarray | dict[str, np.ndarray]
#: Actions ``(n_envs, ...)``, values ``(n_envs, 1)``, log-probabilities ``(n_envs,)``.
Acted: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

# Parameters up to which copies of a policy take little memory. A step of a larger one gains a few percent from them.
_COPIED = 2**21


class NotFiniteError(ValueError):
    """The policy returned NaN or Inf, for a reason that is not known here."""

    def __init__(self) -> None:
        super().__init__("the policy returned NaN or Inf; look at its parameters")


class RolloutCheck(Protocol):
    """Check a rollout for NaN and Inf."""

    def step(self, actions: np.ndarray, observations: Observations, rewards: np.ndarray) -> None:
        """Check what the environments have just returned."""

    def ends(self, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Check the last observations of episodes."""

    def explain(self, error: Exception) -> None:
        """Raise an error that names the reason for which the policy failed, if it is known."""


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
        allowed = None
        if masks is not None:
            allowed = torch.as_tensor(masks, device=self._device)
        inputs = obs_as_tensor(observations, self._device)
        actions, values, log_probs = self._evaluation.act(inputs, allowed)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        """Return the values of observations, ``(n_envs, 1)``."""
        inputs = obs_as_tensor(observations, self._device)
        return self._evaluation.values(inputs).cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Observations], environments: list[int]) -> np.ndarray:
        """Return the values of last observations, which have no batch dimension, ``(len(observations),)``.

        :param observations: last observations of episodes
        :param environments: environments that they are of
        """
        values = []
        # One at a time as in SB3, because custom modules may count their calls or look at the batch.
        for observation in observations:
            inputs = self._policy.obs_to_tensor(observation)[0]
            value = self._evaluation.values(inputs)
            values.append(value.cpu().numpy().reshape(-1))
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
        inputs = obs_as_tensor(observations, self._device)
        outputs, values = self._evaluation.heads(inputs)

        # A view: on the CPU, no array is copied.
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
        # Any, because the classes of sb3-contrib are not imported for this.
        self._model = model
        self._policy: Any = model.policy
        self._device = model.policy.device
        # States after the current step. The model keeps those before it until the step is stored.
        self._states: RNNStates = model._last_lstm_states

    @torch.no_grad()
    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        # sb3-contrib's own policies do not have the argument.
        options = {}
        if masks is not None:
            options["action_masks"] = masks

        inputs = obs_as_tensor(observations, self._device)
        before = self._model._last_lstm_states
        starts = self._flags(self._model._last_episode_starts)
        actions, values, log_probs, self._states = self._policy(inputs, before, starts, **options)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Observations) -> np.ndarray:
        # Called after the rollout: the model has the states after its last step.
        inputs = obs_as_tensor(observations, self._device)
        states = self._model._last_lstm_states.vf
        starts = self._flags(self._model._last_episode_starts)
        values = self._policy.predict_values(inputs, states, starts)
        return values.cpu().numpy()

    @torch.no_grad()
    def terminal_values(self, observations: list[Observations], environments: list[int]) -> np.ndarray:
        # The states after the step that ended the episodes, of the critic.
        hidden, cell = self._states.vf
        no_start = self._flags([False])
        values = []
        for observation, index in zip(observations, environments, strict=True):
            inputs = self._policy.obs_to_tensor(observation)[0]
            of_environment = slice(index, index + 1)
            # cuDNN's LSTM rejects states that are not contiguous.
            states = (hidden[:, of_environment].contiguous(), cell[:, of_environment].contiguous())
            value = self._policy.predict_values(inputs, states, no_start)
            values.append(value.cpu().numpy())
        return np.concatenate(values).reshape(-1)

    def stored(self) -> dict[str, Any]:
        # The buffer stores the states before the step, from which the update runs its sequences.
        before = self._model._last_lstm_states
        self._model._last_lstm_states = self._states
        return {"lstm_states": before}

    def variables(self) -> dict[str, Any]:
        starts = self._flags(self._model._last_episode_starts)
        return {"lstm_states": self._states, "episode_starts": starts}

    def _flags(self, flags: np.ndarray | list[bool]) -> torch.Tensor:
        return torch.as_tensor(flags, dtype=torch.float32, device=self._device)


class _Layer(NamedTuple):
    """``activation(x @ weight + bias)``; the activation works in place."""

    weight: np.ndarray
    bias: np.ndarray
    activation: Callable[[np.ndarray], None] | None


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

        # Empty if actor and critic are computed one after the other.
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
            # Contiguous, as callbacks get them from SB3.
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
        # All in one batch: SB3's networks see no difference.
        batch = stacked(observations)
        return self.values(batch).reshape(-1)


def stacked(observations: Sequence[Observations]) -> Observations:
    """Stack observations without a batch dimension, arrays or dictionaries of them."""
    first = observations[0]
    if not isinstance(first, dict):
        return np.stack(cast("Sequence[np.ndarray]", observations))

    batch = {}
    for key in first:
        batch[key] = np.stack([observation[key] for observation in observations])
    return batch


def make_actor(model: OnPolicyAlgorithm, evaluation: PolicyEvaluation, decisions: Decisions) -> Actor:
    """Make the fastest actor that computes ``model.policy(observations)``, with the same random numbers.

    :param model: on-policy algorithm
    :param evaluation: evaluation of its policy
    :param decisions: decisions for the rollout
    """
    policy = model.policy
    if is_recurrent(policy):
        # Its state belongs to the model, which sb3-contrib and checkpoints read.
        return LstmActor(model)
    if decisions.acting is None:
        return NumpyActor(policy, model.n_envs)

    # Copies are laid out for the CPU's convolutions, and NumPy would wait for another device.
    if policy.device.type == "cpu" and decisions.policy is None:
        layers = (
            policy.mlp_extractor,
            policy.features_extractor,
            policy.pi_features_extractor,
            policy.vf_features_extractor,
        )
        # Custom layers may hold more than their parameters, and are not copied.
        if _may_be_copied(policy, evaluation) and all(is_library_code(layer) for layer in layers):
            evaluation.use_copies()
        # Custom distributions and layers may depend on the moment at which actions are drawn.
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
    is_gaussian = type(policy.action_dist) is distributions.DiagGaussianDistribution
    if not is_gaussian and not _is_categorical(policy):
        return False

    # Under autocast, SB3's distributions may get bfloat16, which NumPy does not have.
    if torch.is_autocast_enabled("cpu"):
        return False
    # NumPy would broadcast another shape without a word.
    if is_gaussian and policy.log_std.shape != (getattr(policy.action_net, "out_features", None),):
        return False

    # Subclasses of Parameter may compute something when they are read.
    for parameter in policy.parameters():
        if type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
            return False
    return True


class Snapshot:
    """Keep modules, their attributes, hooks, parameters and buffers of a policy at one moment.

    :param policy: actor and critic
    :param numbers: whether to keep copies of parameters and buffers; a policy that acts with its own needs none
    """

    def __init__(self, policy: ActorCriticPolicy, numbers: bool) -> None:
        self._policy = policy
        self._action_dist = policy.action_dist
        self._known = True
        # Each dictionary with the objects that were in it. References, not copies: they are compared by identity, and an
        # object that is kept alive cannot give its identity to another.
        self._held: list[tuple[dict[str, Any], list[object]]] = []
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
            # map() stops at the shorter one, so that the lengths are compared, too.
            if len(now) != len(then) or not all(map(is_, now.values(), then)):
                return False

        # Last, because it reads every number.
        return all(torch.equal(tensor, value) for tensor, value in self._values)


def _rows(space: spaces.Space[object]) -> Callable[[Any], np.ndarray]:
    """Return a function from observations to one float32 row per environment, as SB3 makes them.

    It stands for SB3's ``preprocess_obs`` and the extractor of features, for spaces without images.
    """
    if isinstance(space, spaces.Dict):
        # In the order of the space, which is that of SB3's CombinedExtractor.
        parts = {key: _rows(part) for key, part in space.spaces.items()}

        def joined(observations: dict[str, np.ndarray]) -> np.ndarray:
            rows = [part(observations[key]) for key, part in parts.items()]
            return np.concatenate(rows, axis=1)

        return joined

    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return lambda observations: _flat(observations).astype(np.float32, copy=False)

    columns = _spans(choices(space))
    n_columns = columns[-1].stop

    def one_hot(observations: np.ndarray) -> np.ndarray:
        # A negative index raises, as in SB3.
        indices = _flat(observations).T.astype(np.uint32)
        batch = np.arange(indices.shape[1])
        # One row per environment. A table of all codes would have as many rows as there are values.
        rows = np.zeros((len(batch), n_columns), dtype=np.float32)
        if len(columns) == 1:
            rows[batch, indices[0]] = 1.0
            return rows

        for part, index in zip(columns, indices, strict=True):
            rows[:, part][batch, index] = 1.0
        return rows

    return one_hot


def _spans(sizes: list[int]) -> list[slice]:
    """Return the columns of each dimension of a discrete space."""
    ends = np.cumsum(sizes).tolist()
    return [slice(*span) for span in itertools.pairwise([0, *ends])]


def _flat(observations: np.ndarray) -> np.ndarray:
    array = np.asarray(observations)
    return array.reshape(len(array), -1)


def _run(layers: list[_Layer], x: np.ndarray) -> np.ndarray:
    for weight, bias, activation in layers:
        # A new array for each layer, in which the following lines work in place.
        x = x.dot(weight)
        x += bias
        if activation is not None:
            activation(x)
    return x


def _layers(network: nn.Sequential, head: nn.Module) -> list[_Layer]:
    """Return a network and its head with transposed weights; the arrays share memory with the parameters."""
    # Linear layers and activations alternate, and the head has none: a rule for "acting" applies to other networks.
    modules = [*network, head]
    activations = [_ACTIVATIONS[type(module)] for module in modules[1::2]]

    layers = []
    for linear, activation in zip(modules[::2], [*activations, None], strict=True):
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.detach().numpy().T
        bias = linear.bias.detach().numpy()
        layers.append(_Layer(weight, bias, activation))
    return layers


def _joined(actor: list[_Layer], critic: list[_Layer], n_envs: int) -> list[_Layer]:
    """Join the layers of two networks to those of one that computes both; none if one would be too large."""
    layers = []
    for index, (left, right) in enumerate(zip(actor, critic, strict=True)):
        # The first layers see the same input; the following ones, each its own half of it.
        rows = len(left.weight)
        if index > 0:
            rows += len(right.weight)
        columns = left.weight.shape[1] + right.weight.shape[1]
        # Before they are stacked, because block-diagonal matrices of wide layers take much memory.
        if n_envs * rows * columns > ONE_THREAD:
            return []

        if index == 0:
            weight = np.concatenate([left.weight, right.weight], axis=1)
        else:
            # NumPy has no such function, and scipy is not required.
            blocks = torch.block_diag(torch.from_numpy(left.weight), torch.from_numpy(right.weight))
            weight = blocks.numpy()
        bias = np.concatenate([left.bias, right.bias])
        # Both networks have the same activation, or a rule for "acting" applies.
        layers.append(_Layer(weight, bias, left.activation))
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

    # MultiBinary actions are drawn in PyTorch, as in SB3.
    @torch.no_grad()
    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distribution = policy.action_dist.proba_distribution(torch.from_numpy(logits))
        actions = distribution.get_actions()
        return actions.numpy(), distribution.log_prob(actions).numpy()

    return sample


def _gaussian_sampler(policy: ActorCriticPolicy, n_envs: int) -> Sampler:
    with np.errstate(over="ignore"):  # the sampler reports it, with the parameter
        std = np.exp(policy.log_std.detach().numpy())
    # What does not depend on the action: the log-determinant and the normalization of the density.
    constant = np.float32(np.log(std).sum() + len(std) * math.log(math.sqrt(2.0 * math.pi)))
    # A product with this vector halves and adds in one call.
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

        # One sum instead of a look at each number; SB3's distributions look at their parameters.
        if not math.isfinite(log_probs.sum()):
            raise NotFiniteError
        return actions.reshape(-1, *shape), log_probs

    return sample


def _categorical_sampler(policy: ActorCriticPolicy, n_envs: int) -> Sampler:
    samplers = [_one_of(size, n_envs) for size in choices(policy.action_space)]
    if isinstance(policy.action_space, spaces.Discrete):
        return samplers[0]

    parts = _spans(choices(policy.action_space))
    shape = policy.action_space.shape or ()

    def sample(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Dimension by dimension, as SB3 draws them.
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
        # Minus the largest logit, so that exp() does not overflow.
        largest = logits.max(axis=1, keepdims=True)
        probs = np.exp(logits - largest)
        total = probs.sum(axis=1)

        # The race that torch.multinomial runs for one sample per row: the largest p / e wins, with e exponential. Without
        # their sum, the probabilities are as good.
        noise.exponential_()
        probs /= drawn
        actions = probs.argmax(axis=1)

        # Added before it is subtracted, as in PyTorch: with masks that allow nothing, logits are so large that only this is 0.
        log_total = largest[:, 0] + np.log(total)
        chosen = logits[row, actions] - log_total
        if not math.isfinite(chosen.sum()):
            raise NotFiniteError
        return actions, chosen

    return sample
