"""Evaluate SB3's actor-critic policies in a form that can be compiled, and find out where that equals SB3's own code."""

import contextlib
import copy
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution, make_proba_distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs
from torch.nn import functional as F

from sb3_ano._compat import has_hooks, packed_linear
from sb3_ano.algorithms.buffers import RolloutSamples, mapped

# Methods that the collection and the update do the work of, or rely on. Others may be overridden, because they are called.
_EVALUATING = (
    *("__call__", "__getattr__", "_call_impl", "_wrapped_call_impl", "forward", "evaluate_actions", "predict_values"),
    *("extract_features", "_get_action_dist_from_latent", "obs_to_tensor", "unscale_action"),
    *("device", "squash_output", "parameters", "named_parameters", "modules", "named_modules", "children"),
)
# Weights of a layer from which on packing them for a rollout pays.
_PACKED = 2**18
#: Logit of an action that is not allowed, as in sb3-contrib.
MASKED = -1e8
_STOCK = (
    *("torch.nn.modules.", "stable_baselines3.common.torch_layers", "stable_baselines3.common.policies"),
    *("sb3_contrib.common.maskable.policies", "sb3_contrib.common.recurrent.policies", "sb3_ano.algorithms.contrib"),
)


def customization(policy: ActorCriticPolicy) -> str | None:
    """Say what makes a policy compute something else than SB3's own code does with its modules; None if nothing does.

    Such a policy is called at every step, as in SB3. Overridden methods count. Hooks count, and methods that were replaced on
    an instance, of the policy or of a module in it. Custom classes of modules do not count, because modules are called.
    """
    kind, base = type(policy), base_of(policy)
    for name in _EVALUATING:
        if getattr(kind, name) is not getattr(base, name):
            return f"{kind.__name__} overrides {name}"
    for path, module in policy.named_modules():
        where = f"policy.{path}" if path else "policy"
        replaced = replaced_method(module, _EVALUATING if module is policy else None)
        if replaced is not None:
            return f"{where}.{replaced} was replaced"
        if has_hooks(module):
            return f"{where} has hooks"
    replaced = replaced_method(policy.action_dist)
    return None if replaced is None else f"policy.action_dist.{replaced} was replaced"


def choices(space: Any) -> list[int]:
    """Return the numbers of values in each dimension of a discrete space."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return [2] * spaces.flatdim(space) if isinstance(space, spaces.MultiBinary) else [int(size) for size in space.nvec]


def base_of(policy: Any) -> type:
    """Return the most special class of :data:`EVALUATIONS` that a policy is an instance of."""
    return next((base for base in reversed(EVALUATIONS) if isinstance(policy, base)), ActorCriticPolicy)


def replaced_method(instance: Any, names: Iterable[str] | None = None) -> str | None:
    """Return the name of the first method of a class that was replaced on this instance of it, or None.

    :param instance: any object
    :param names: names of the methods that count; None for all
    """
    kind, attributes = type(instance), vars(instance)
    candidates = attributes if names is None else attributes.keys() & set(names)
    return next((name for name in candidates if callable(getattr(kind, name, None))), None)


class Traits(NamedTuple):
    """The properties of a policy that decide how it is evaluated; compiled code is made for one of these.

    :param customization: reason to call the policy's own methods, see :func:`customization`, or None
    :param stock: whether all code of the policy is SB3's and PyTorch's, which keeps nothing between two calls but tensors
    :param channels_last: whether images are given to the features extractor in that memory format
    :param normalize_images: whether images are divided by 255
    :param observation_space: observation space
    """

    customization: str | None
    stock: bool
    channels_last: bool
    normalize_images: bool
    observation_space: spaces.Space[Any]

    @classmethod
    def of(cls, policy: ActorCriticPolicy) -> "Traits":
        """Inspect a policy as it is now."""
        reason = customization(policy)
        extractors = [policy.features_extractor, policy.pi_features_extractor, policy.vf_features_extractor]
        # SB3's convolutions are faster in channels_last, but a custom extractor may read how its input lies in memory.
        channels_last = all(type(part) in (NatureCNN, CombinedExtractor) and _is_stock(part) for part in extractors)
        stock = reason is None and has_stock_distribution(policy) and _is_stock(policy)
        return cls(reason, stock, channels_last, policy.normalize_images, policy.observation_space)


def has_stock_distribution(policy: ActorCriticPolicy) -> bool:
    """Tell whether the distribution of actions is of the class that SB3 makes for the action space."""
    return type(policy.action_dist) is type(EVALUATIONS[base_of(policy)].make_distribution(policy))


def _is_stock(module: torch.nn.Module) -> bool:
    """Tell whether a module and all modules in it are instances of SB3's and PyTorch's own classes."""
    return all(type(part).__module__.startswith(_STOCK) for part in module.modules())


def preprocessing(space: spaces.Space[Any], normalize_images: bool, channels_last: bool = False) -> Callable[[Any], Any]:
    """Return SB3's ``preprocess_obs`` for one space, in PyTorch alone, so that it can be compiled.

    :param space: observation space
    :param normalize_images: whether images are divided by 255
    :param channels_last: whether images come out in that memory format, in which convolutions are faster
    """
    if isinstance(space, spaces.Dict):
        parts = {key: preprocessing(part, normalize_images, channels_last) for key, part in space.spaces.items()}
        return lambda observations: {key: part(observations[key]) for key, part in parts.items()}
    if isinstance(space, spaces.Box):
        turned = channels_last and len(space.shape) == 3

        def as_floats(observations: torch.Tensor) -> torch.Tensor:
            if turned:  # while a number is a single byte
                observations = observations.contiguous(memory_format=torch.channels_last)
            return observations.to(torch.float32)

        if normalize_images and is_image_space(space):
            return lambda observations: as_floats(observations) / 255.0
        return as_floats
    if isinstance(space, spaces.Discrete):
        size = int(space.n)
        return lambda observations: F.one_hot(observations.long(), size).float()
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(size) for size in space.nvec]

        def one_hot(observations: torch.Tensor) -> torch.Tensor:
            columns = observations.long().reshape(len(observations), -1).unbind(dim=1)
            return torch.cat([F.one_hot(column, size) for column, size in zip(columns, sizes, strict=True)], dim=1).float()

        return one_hot
    return lambda observations: observations.float()


class PolicyEvaluation:
    """Compute values, log-probabilities and entropies of a policy.

    :param policy: actor and critic
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks; the heads,
        the distribution, and all that follows are computed in float32
    """

    @staticmethod
    def make_distribution(policy: Any) -> Distribution:
        """Make the distribution of actions that the base class of a policy makes."""
        return make_proba_distribution(policy.action_space, policy.use_sde)

    def __init__(self, policy: ActorCriticPolicy, precision: str = "float32") -> None:
        self.policy = policy
        self.traits = Traits.of(policy)
        self._standard = self.traits.customization is None
        self._bfloat16 = self._autocast = precision == "bfloat16"
        self._device_type = policy.device.type
        self._preprocess = preprocessing(policy.observation_space, policy.normalize_images, self.traits.channels_last)
        self._layers: Any = policy

    def __call__(
        self, samples: RolloutSamples, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what ``policy.evaluate_actions`` returns.

        :param samples: minibatch of the rollout buffer
        :param actions: its actions, ``(batch, action_dim)``, or ``(batch,)`` for Discrete
        :return: values ``(batch, 1)``, log-probabilities ``(batch,)``, entropies ``(batch,)`` or None
        """
        masks = getattr(samples, "action_masks", None)
        if not self._standard:
            return self.policy.evaluate_actions(samples.observations, actions, **_given(action_masks=masks))
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
        self, observations: PyTorchObs, masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what ``policy(observations)`` does: actions, values ``(batch, 1)``, log-probabilities ``(batch,)``.

        :param observations: observations of one step
        :param masks: actions that are allowed, for policies that take masks
        """
        if not self._standard:
            acted: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.policy(observations, **_given(action_masks=masks))
            return acted
        # The order of SB3's forward, which differs.
        latent_pi, latent_vf = self._latents(observations)
        values = self.policy.value_net(latent_vf)
        distribution = self._distribution(latent_pi, masks)
        actions = distribution.get_actions()
        log_prob = distribution.log_prob(actions)
        return actions.reshape(-1, *self.policy.action_space.shape), values, log_prob  # type: ignore[misc]

    def heads(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of the action head ``(batch, n)`` and of the value head ``(batch, 1)`` of SB3's policies."""
        latent_pi, latent_vf = self._latents(observations)
        return self.policy.action_net(latent_pi), self.policy.value_net(latent_vf)

    def values(self, observations: PyTorchObs) -> torch.Tensor:
        """Return the values of observations, ``(batch, 1)``, as ``policy.predict_values`` does."""
        if not self._standard:
            return self.policy.predict_values(observations)
        inputs = self._preprocess(observations)
        with self._precision():
            latent_vf = self._layers.mlp_extractor.forward_critic(self._layers.vf_features_extractor(inputs))
        values: torch.Tensor = self.policy.value_net(self._as_float32(latent_vf))
        return values

    def _distribution(self, latent_pi: torch.Tensor, masks: torch.Tensor | None) -> Distribution:
        return self.policy._get_action_dist_from_latent(latent_pi)

    def _latents(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of the action head and of the value head."""
        layers = self._layers
        inputs = self._preprocess(observations)
        with self._precision():
            if self.policy.share_features_extractor:
                latent_pi, latent_vf = layers.mlp_extractor(layers.features_extractor(inputs))
            else:
                latent_pi = layers.mlp_extractor.forward_actor(layers.pi_features_extractor(inputs))
                latent_vf = layers.mlp_extractor.forward_critic(layers.vf_features_extractor(inputs))
        return self._as_float32(latent_pi), self._as_float32(latent_vf)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device_type, dtype=torch.bfloat16) if self._autocast else contextlib.nullcontext()

    def _as_float32(self, latent: torch.Tensor) -> torch.Tensor:
        return latent.float() if self._bfloat16 else latent

    def make_inference_copy(self, batch_size: int) -> None:
        """Continue with a copy of SB3's own layers as they are now, laid out for many small batches on the CPU.

        Every forward pass would otherwise convert weights again: those of convolutions to ``channels_last``, those of large
        layers to oneDNN's blocks, and, for bfloat16, all weights to that type. Custom layers are not copied.

        :param batch_size: number of observations of a forward pass
        """
        names = ["mlp_extractor", "features_extractor", "pi_features_extractor", "vf_features_extractor"]
        originals = {name: getattr(self.policy, name) for name in names}
        if not (self._standard and all(map(_is_stock, originals.values()))):
            return
        copies = copy.deepcopy(originals)
        layers: Any = torch.nn.ModuleList(copies.values())  # the same extractor may have several of the names
        layers.to(memory_format=torch.channels_last)
        if self._bfloat16:
            layers.to(torch.bfloat16)
        for part in layers.modules():
            if type(part) is torch.nn.Linear and part.weight.numel() >= _PACKED:
                part.forward = packed_linear(part, batch_size)  # type: ignore
        self._layers = types.SimpleNamespace(**copies)
        if self._bfloat16:
            preprocess = self._preprocess
            self._preprocess = lambda observations: mapped(torch.Tensor.bfloat16, preprocess(observations))
            self._autocast = False


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


#: Base classes of the policies whose own code is known, and the classes that compute the same. contrib.py adds sb3-contrib's.
EVALUATIONS: dict[type, type[PolicyEvaluation]] = {ActorCriticPolicy: PolicyEvaluation}


def make_evaluation(policy: ActorCriticPolicy, precision: str) -> PolicyEvaluation:
    """Make the evaluation of a policy.

    :param policy: actor and critic
    :param precision: precision of its layers
    """
    return EVALUATIONS[base_of(policy)](policy, precision)
