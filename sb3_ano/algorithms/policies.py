"""What the update and the collection ask of an SB3 actor-critic policy."""

import copy
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs
from torch.nn import functional as F

#: Turns a batch of raw observations into the input of a features extractor.
Preprocessing: TypeAlias = Callable[[Any], Any]

_SB3_LAYERS = (MlpExtractor, FlattenExtractor, NatureCNN, CombinedExtractor)
#: The methods that :class:`PolicyEvaluation` replaces by its own. A policy that overrides one is asked itself.
_REPLACED = ("forward", "evaluate_actions", "extract_features", "predict_values", "_get_action_dist_from_latent")


def overridden_method(policy: ActorCriticPolicy) -> str | None:
    """The first method of SB3's own policy that this one overrides, among those that matter here; None if it is standard.

    A hook on the policy counts, because it is called with ``forward``.
    """
    if policy._forward_hooks or policy._forward_pre_hooks:
        return "forward"
    for name in _REPLACED:
        if name in vars(policy) or getattr(type(policy), name) is not getattr(ActorCriticPolicy, name):
            return name
    return None


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices with instructions made for it."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def preprocessing(space: spaces.Space, normalize_images: bool) -> Preprocessing:
    """SB3's ``preprocess_obs`` for one space, in PyTorch alone, so that it can be compiled.

    Images come out in the memory format ``channels_last``, in which convolutions are faster.

    :param space: observation space
    :param normalize_images: whether images are divided by 255
    """
    if isinstance(space, spaces.Dict):
        parts = {key: preprocessing(part, normalize_images) for key, part in space.spaces.items()}
        return lambda observations: {key: part(observations[key]) for key, part in parts.items()}
    if isinstance(space, spaces.Box):
        scale = 255.0 if normalize_images and is_image_space(space) else None
        if len(space.shape) != 3:
            return lambda observations: observations.float() if scale is None else observations.float() / scale
        layout = torch.channels_last
        if scale is None:
            return lambda observations: observations.to(torch.float32, memory_format=layout)
        return lambda observations: observations.to(torch.float32, memory_format=layout) / scale
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


def _as_bfloat16(inputs: Any) -> Any:
    return {key: part.bfloat16() for key, part in inputs.items()} if isinstance(inputs, dict) else inputs.bfloat16()


class PolicyEvaluation(torch.nn.Module):
    """Values, log-probabilities and entropies of a policy: a module, so that its parameters can be replaced in a call.

    :param policy: actor and critic
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks; the heads,
        the distribution, and all that follows are computed in float32
    """

    def __init__(self, policy: ActorCriticPolicy, precision: str = "float32") -> None:
        super().__init__()
        self.policy = policy
        self.standard = overridden_method(policy) is None
        self._autocast = precision == "bfloat16"
        self._device_type = policy.device.type
        if self.standard:
            self._preprocess = preprocessing(policy.observation_space, policy.normalize_images)
        self._frozen: Any = None

    def forward(
        self, observations: PyTorchObs, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What ``policy.evaluate_actions`` returns.

        :param observations: as the rollout buffer gives them
        :param actions: ``(batch, action_dim)``, or ``(batch,)`` for Discrete
        :return: values ``(batch, 1)``, log-probabilities ``(batch,)``, entropies ``(batch,)`` or None
        """
        if not self.standard:
            return self.policy.evaluate_actions(observations, actions)
        latent_pi, latent_vf = self.latents(observations)
        distribution = self.policy._get_action_dist_from_latent(latent_pi)
        log_prob, entropy = distribution.log_prob(actions), distribution.entropy()
        if torch.compiler.is_compiling():
            # The distribution belongs to the policy: no tensor of the graph may stay behind in it.
            distribution.distribution = None  # type: ignore[assignment]
            if hasattr(distribution, "_latent_sde"):
                distribution._latent_sde = None
        return self.policy.value_net(latent_vf), log_prob, entropy

    def act(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``policy(observations)`` returns: sampled actions, values ``(batch, 1)``, log-probabilities ``(batch,)``."""
        if not self.standard:
            return self.policy(observations)
        latent_pi, latent_vf = self.latents(observations)
        values = self.policy.value_net(latent_vf)
        distribution = self.policy._get_action_dist_from_latent(latent_pi)
        actions = distribution.get_actions()
        log_prob = distribution.log_prob(actions)
        return actions.reshape(-1, *self.policy.action_space.shape), values, log_prob  # type: ignore[misc]

    def values(self, observations: PyTorchObs) -> torch.Tensor:
        """What ``policy.predict_values`` returns, ``(batch, 1)``."""
        if not self.standard:
            return self.policy.predict_values(observations)
        return self.policy.value_net(self.latents(observations)[1])

    def latents(self, observations: PyTorchObs) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the action head and of the value head, float32."""
        layers = self.policy if self._frozen is None else self._frozen
        inputs = self._preprocess(observations)
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._autocast):
            if self.policy.share_features_extractor:
                latent_pi, latent_vf = layers.mlp_extractor(layers.features_extractor(inputs))
            else:
                latent_pi = layers.mlp_extractor.forward_actor(layers.pi_features_extractor(inputs))
                latent_vf = layers.mlp_extractor.forward_critic(layers.vf_features_extractor(inputs))
        return latent_pi.float(), latent_vf.float()

    def freeze(self) -> None:
        """Go on with a copy of the layers as they are now, laid out for many small batches on the CPU.

        What every forward pass would do anew is done once: weights of convolutions in ``channels_last``, and, for bfloat16,
        weights of that type. Layers other than SB3's own stay as they are.
        """
        names = ["mlp_extractor", "features_extractor"]
        if not self.policy.share_features_extractor:
            names = ["mlp_extractor", "pi_features_extractor", "vf_features_extractor"]
        originals = {name: getattr(self.policy, name) for name in names}
        hooked = any(
            part._forward_hooks or part._forward_pre_hooks for layer in originals.values() for part in layer.modules()
        )
        if not self.standard or hooked or any(type(layer) not in _SB3_LAYERS for layer in originals.values()):
            return
        self._frozen = types.SimpleNamespace(**copy.deepcopy(originals))
        for layer in vars(self._frozen).values():
            layer.to(memory_format=torch.channels_last)
            if self._autocast:
                layer.to(torch.bfloat16)
        if self._autocast:
            preprocess = self._preprocess
            self._preprocess = lambda observations: _as_bfloat16(preprocess(observations))
            self._autocast = False
