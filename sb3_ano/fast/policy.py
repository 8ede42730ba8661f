"""Compute what SB3's policies compute, with fewer calls and in a form that can be compiled.

:class:`PolicyEvaluation` stands for ``forward``, ``evaluate_actions`` and ``predict_values``. The order of calls within each
is SB3's, because distributions and dropout draw random numbers.
"""

import contextlib
import copy
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    Distribution,
    MultiCategoricalDistribution,
    make_proba_distribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn import functional as F

from sb3_ano.envs.batched import mapped

#: Logit of an action that is not allowed, as in sb3-contrib. Not -Inf, because the entropy would be NaN.
MASKED = -1e8


def contrib_class(module: str, name: str) -> Any:
    """Return a class of sb3-contrib, or None if it was never imported, and no object can be an instance of it.

    sb3-contrib is not imported for this, because that takes time and most models do not need it.
    """
    imported = sys.modules.get(f"sb3_contrib.common.{module}")
    if imported is None:
        return None
    return getattr(imported, name)


def contrib_policies() -> list[types.ModuleType]:
    """Return the modules of sb3-contrib's policies that were imported."""
    names = ("sb3_contrib.common.maskable.policies", "sb3_contrib.common.recurrent.policies")
    return [sys.modules[name] for name in names if name in sys.modules]


def is_maskable(policy: ActorCriticPolicy) -> bool:
    """Tell whether a policy is one of sb3-contrib's maskable policies."""
    # By the class, not by an attribute: a custom policy of SB3 may have any attribute.
    kind = contrib_class("maskable.policies", "MaskableActorCriticPolicy")
    return kind is not None and isinstance(policy, kind)


def is_recurrent(policy: ActorCriticPolicy) -> bool:
    """Tell whether a policy is one of sb3-contrib's policies with an LSTM."""
    return is_recurrent_class(type(policy))


def is_recurrent_class(kind: type) -> bool:
    """Tell whether a class of policies is one of sb3-contrib's with an LSTM."""
    base = contrib_class("recurrent.policies", "RecurrentActorCriticPolicy")
    return base is not None and issubclass(kind, base)


def base_of(policy: ActorCriticPolicy) -> type:
    """Return the class of SB3 or sb3-contrib whose methods the engine stands in for."""
    if is_maskable(policy):
        return contrib_class("maskable.policies", "MaskableActorCriticPolicy")
    if is_recurrent(policy):
        return contrib_class("recurrent.policies", "RecurrentActorCriticPolicy")
    return ActorCriticPolicy


def choices(space: spaces.Space[object]) -> list[int]:
    """Return the numbers of values in each dimension of a discrete space."""
    # Python's integers, because the compiler takes none of NumPy.
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * spaces.flatdim(space)

    assert isinstance(space, spaces.MultiDiscrete)
    return [int(size) for size in space.nvec]


def plain_distribution(space: spaces.Space[object]) -> CategoricalDistribution | MultiCategoricalDistribution:
    """Return SB3's distribution whose logits can be masked; MultiBinary has two actions per dimension, as in sb3-contrib."""
    # SB3's Bernoulli distribution has one logit per dimension, with which a mask cannot rule out each of two values.
    sizes = choices(space)
    if isinstance(space, spaces.Discrete):
        return CategoricalDistribution(sizes[0])
    return MultiCategoricalDistribution(sizes)


def has_library_distribution(policy: ActorCriticPolicy) -> bool:
    """Tell whether the distribution of actions is of the class that SB3, or sb3-contrib, makes for the action space."""
    # A new one is made to compare with, because the choice by space is SB3's code and may change.
    if is_maskable(policy):
        make = contrib_class("maskable.distributions", "make_masked_proba_distribution")
        expected = make(policy.action_space)
    else:
        expected = make_proba_distribution(policy.action_space, policy.use_sde)
    return type(policy.action_dist) is type(expected)


def preprocessing(space: spaces.Space[object], normalize_images: bool, channels_last: bool = False) -> Callable[[Any], Any]:
    """Return SB3's ``preprocess_obs`` for one space, in PyTorch alone, so that it can be compiled.

    :param space: observation space
    :param normalize_images: whether images are divided by 255
    :param channels_last: whether images come out in that memory format, in which convolutions are faster
    """
    # Why not SB3's: it reads the space at every call, and the compiler cannot follow the space. Here the space decides once.
    if isinstance(space, spaces.Dict):
        parts = {}
        for key, part in space.spaces.items():
            parts[key] = preprocessing(part, normalize_images, channels_last)
        return lambda observations: {key: part(observations[key]) for key, part in parts.items()}

    if isinstance(space, spaces.Discrete):
        size = int(space.n)
        return lambda observations: F.one_hot(observations.long(), size).float()

    if isinstance(space, spaces.MultiDiscrete):
        sizes = choices(space)

        def one_hot(observations: torch.Tensor) -> torch.Tensor:
            columns = observations.long().reshape(len(observations), -1).unbind(dim=1)
            codes = []
            for column, size in zip(columns, sizes, strict=True):
                codes.append(F.one_hot(column, size))
            return torch.cat(codes, dim=1).float()

        return one_hot

    # An array of three dimensions that is no image, such as one of floats, is turned but not divided.
    is_normalized = normalize_images and is_image_space(space)
    is_turned = channels_last and len(space.shape or ()) == 3

    def as_floats(observations: torch.Tensor) -> torch.Tensor:
        if is_turned:
            # Before the conversion, while a number is a single byte.
            observations = observations.contiguous(memory_format=torch.channels_last)

        observations = observations.to(torch.float32)
        if is_normalized:
            return observations / 255.0
        return observations

    return as_floats


class _Copies(NamedTuple):
    """Copies of the layers that :class:`PolicyEvaluation` computes with, under their names in the policy."""

    mlp_extractor: MlpExtractor
    features_extractor: BaseFeaturesExtractor
    pi_features_extractor: BaseFeaturesExtractor
    vf_features_extractor: BaseFeaturesExtractor


class PolicyEvaluation:
    """Compute values, log-probabilities and entropies of a policy.

    :param policy: actor and critic
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks; heads and
        distribution are computed in float32
    :param calls_policy: whether to call the policy's own methods, as SB3 does
    :param channels_last: whether images are given to the features extractor in that memory format
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        precision: str,
        calls_policy: bool,
        channels_last: bool,
    ) -> None:
        self.policy = policy
        self.calls_policy = calls_policy
        self._preprocess = preprocessing(policy.observation_space, policy.normalize_images, channels_last)
        # Where the layers between observations and heads are read from: the policy, or copies after use_copies.
        self._layers: ActorCriticPolicy | _Copies = policy
        #: Whether it computes with copies of the policy's layers.
        self.has_copies = False
        self.is_bfloat16 = precision == "bfloat16"
        # Autocast converts float32 weights at each call. Copies that are bfloat16 already need none.
        self._autocast = self.is_bfloat16
        self._device_type = policy.device.type
        # The distribution that logits are given to. sb3-contrib's maskable ones cannot be compiled.
        self._plain: CategoricalDistribution | MultiCategoricalDistribution | None = None
        if is_maskable(policy):
            self._plain = plain_distribution(policy.action_space)

    def __call__(self, samples: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what ``policy.evaluate_actions`` returns.

        :param samples: minibatch of the rollout
        :param actions: its actions, ``(batch, action_dim)``, or ``(batch,)`` for Discrete
        :return: values ``(batch, 1)``, log-probabilities ``(batch,)``, entropies ``(batch,)`` or None
        """
        # Custom buffers hand out samples of their own types.
        masks = getattr(samples, "action_masks", None)
        if self.calls_policy:
            if masks is None:
                return self.policy.evaluate_actions(samples.observations, actions)
            # Only policies of sb3-contrib get masks.
            return self.policy.evaluate_actions(samples.observations, actions, action_masks=masks)  # type: ignore[call-arg]

        # The order of SB3's evaluate_actions, because custom heads may draw random numbers.
        latent_pi, latent_vf = self._latents(samples.observations)
        distribution = self._distribution(latent_pi, masks)
        log_prob = distribution.log_prob(actions)
        values = self.policy.value_net(latent_vf)
        entropy = distribution.entropy()

        if torch.compiler.is_compiling():
            # The distribution belongs to the policy: no tensor of the graph may stay behind in it.
            distribution.distribution = None  # type: ignore[assignment]
            if hasattr(distribution, "_latent_sde"):
                distribution._latent_sde = None
        return values, log_prob, entropy

    def act(
        self,
        observations: PyTorchObs,
        masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what ``policy(observations)`` does: actions, values ``(batch, 1)``, log-probabilities ``(batch,)``.

        :param observations: observations of one step
        :param masks: actions that are allowed, for policies that take masks
        """
        if self.calls_policy:
            # SB3's policies have no such argument.
            if masks is None:
                return self.policy(observations)
            return self.policy(observations, action_masks=masks)

        # The order of SB3's forward, which differs.
        latent_pi, latent_vf = self._latents(observations)
        values = self.policy.value_net(latent_vf)
        distribution = self._distribution(latent_pi, masks)
        actions = distribution.get_actions()
        log_prob = distribution.log_prob(actions)
        shape = self.policy.action_space.shape or ()
        return actions.reshape(-1, *shape), values, log_prob

    def heads(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of the action head ``(batch, n)`` and of the value head ``(batch, 1)`` of SB3's policies."""
        latent_pi, latent_vf = self._latents(observations)
        return self.policy.action_net(latent_pi), self.policy.value_net(latent_vf)

    def values(self, observations: PyTorchObs) -> torch.Tensor:
        """Return the values of observations, ``(batch, 1)``, as ``policy.predict_values`` does."""
        if self.calls_policy:
            return self.policy.predict_values(observations)

        layers = self._layers
        inputs = self._preprocess(observations)
        with self._precision():
            features = layers.vf_features_extractor(inputs)
            latent_vf = layers.mlp_extractor.forward_critic(features)

        # The head is computed in float32: bfloat16 has two or three digits.
        if self.is_bfloat16:
            latent_vf = latent_vf.float()
        return self.policy.value_net(latent_vf)

    def _distribution(self, latent_pi: torch.Tensor, masks: torch.Tensor | None) -> Distribution:
        # SB3's method knows all distributions, gSDE's, too, and can be traced.
        if self._plain is None:
            return self.policy._get_action_dist_from_latent(latent_pi)

        logits = self.policy.action_net(latent_pi)
        if masks is not None:
            # sb3-contrib keeps masks in float32.
            logits = torch.where(masks.bool(), logits, MASKED)
        return self._plain.proba_distribution(action_logits=logits)

    def _latents(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of the action head and of the value head."""
        layers = self._layers
        inputs = self._preprocess(observations)

        with self._precision():
            if self.policy.share_features_extractor:
                # Features once, as in SB3: a second pass would draw another dropout mask.
                features = layers.features_extractor(inputs)
                latent_pi, latent_vf = layers.mlp_extractor(features)
            else:
                pi_features = layers.pi_features_extractor(inputs)
                vf_features = layers.vf_features_extractor(inputs)
                latent_pi = layers.mlp_extractor.forward_actor(pi_features)
                latent_vf = layers.mlp_extractor.forward_critic(vf_features)

        # Outside of autocast, so that heads, distribution and loss are float32.
        if self.is_bfloat16:
            return latent_pi.float(), latent_vf.float()
        return latent_pi, latent_vf

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast:
            return torch.autocast(self._device_type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def use_copies(self) -> None:
        """Continue with a copy of SB3's layers as they are now, laid out for many small batches on the CPU.

        Every forward pass would otherwise convert weights again: those of convolutions to ``channels_last``, and, for
        bfloat16, all weights to that type.
        """
        names = [
            "mlp_extractor",
            "features_extractor",
            "pi_features_extractor",
            "vf_features_extractor",
        ]
        # One deepcopy of all four: the same extractor may have several of the names, and stays one object.
        copies = copy.deepcopy({name: getattr(self.policy, name) for name in names})
        layers = nn.ModuleList(copies.values())
        layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._layers = _Copies(**copies)
        self.has_copies = True

        if self.is_bfloat16:
            layers.to(torch.bfloat16)
            preprocess = self._preprocess
            # Inputs have the type of the weights, which autocast would have seen to.
            self._preprocess = lambda observations: mapped(torch.Tensor.bfloat16, preprocess(observations))
            self._autocast = False


class RecurrentEvaluation(PolicyEvaluation):
    """Evaluate policies with an LSTM on padded sequences; what is returned has no padding.

    The LSTM sees whole sequences, while sb3-contrib's loop runs it step by step. That gives the same numbers, because a
    rollout's sequences are cut where episodes start.
    """

    policy: Any  # a RecurrentActorCriticPolicy of sb3-contrib

    def __init__(
        self,
        policy: ActorCriticPolicy,
        precision: str,
        calls_policy: bool,
        channels_last: bool,
    ) -> None:
        # The precision has no effect on LSTM policies, which the algorithms say in a warning.
        super().__init__(policy, "float32", calls_policy, channels_last)

    def __call__(self, samples: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if self.calls_policy:
            # Only this package's policies with masks have such an argument.
            options = {}
            if samples.action_masks is not None:
                options["action_masks"] = samples.action_masks
            values, log_prob, entropy = self.policy.evaluate_actions(
                samples.observations,
                actions,
                samples.lstm_states,
                samples.episode_starts,
                **options,
            )
        else:
            values, log_prob, entropy = self._evaluate(samples, actions)

        # Padding is dropped after the networks, because the LSTM needs sequences of equal length.
        present = samples.present
        if entropy is not None:
            entropy = entropy[present]
        return values.flatten()[present], log_prob[present], entropy

    def _evaluate(self, samples: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Do what sb3-contrib's ``evaluate_actions`` does."""
        policy = self.policy
        # One tensor, or two if actor and critic have an extractor each.
        features = policy.extract_features(samples.observations)
        pi_features = features
        vf_features = features
        if not policy.share_features_extractor:
            pi_features, vf_features = features

        starts = samples.episode_starts
        latent_pi, _ = whole_sequences(policy.lstm_actor, pi_features, samples.lstm_states.pi, starts)
        if policy.lstm_critic is not None:
            latent_vf, _ = whole_sequences(policy.lstm_critic, vf_features, samples.lstm_states.vf, starts)
        elif policy.shared_lstm:
            # As in sb3-contrib, the value loss does not train a shared LSTM.
            latent_vf = latent_pi.detach()
        else:
            latent_vf = policy.critic(vf_features)

        latent_pi = policy.mlp_extractor.forward_actor(latent_pi)
        latent_vf = policy.mlp_extractor.forward_critic(latent_vf)

        distribution = policy._get_action_dist_from_latent(latent_pi)
        values = policy.value_net(latent_vf)
        return values, distribution.log_prob(actions), distribution.entropy()


def whole_sequences(
    lstm: nn.LSTM,
    features: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    episode_starts: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Run an LSTM over sequences of equal length in one call.

    :param lstm: LSTM of the actor or critic
    :param features: inputs, ``(n_sequences * length, features)``
    :param states: hidden and cell states before the sequences, ``(layers, n_sequences, hidden)`` each
    :param episode_starts: 1 where an episode starts, at the first step of a sequence only, ``(n_sequences * length,)``
    :return: outputs ``(n_sequences * length, hidden)``, and the states after the sequences
    """
    hidden, cell = states
    starts = episode_starts.reshape(hidden.shape[1], -1)
    # A new episode starts from a state of zeros. The buffer stores the state that the episode before it ended with.
    kept = (1.0 - starts[:, 0])[None, :, None]

    # PyTorch's LSTM takes time first.
    sequences = features.reshape(*starts.shape, lstm.input_size).transpose(0, 1)
    output, after = lstm(sequences, (kept * hidden, kept * cell))
    return output.transpose(0, 1).flatten(end_dim=1), after
