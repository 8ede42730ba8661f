"""ANO for sb3-contrib's policies: LSTM policies, policies with invalid action masking, and both at once."""

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution, make_masked_proba_distribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticCnnPolicy,
    RecurrentActorCriticPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import CategoricalDistribution, Distribution, MultiCategoricalDistribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import MaybeCallback, TensorDict
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import actor, policy_evaluation
from sb3_ano.algorithms.ano import ANO
from sb3_ano.algorithms.arguments import inherit_signature
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer
from sb3_ano.algorithms.policy_evaluation import MASKED, PolicyEvaluation


class MaskableANO(ANO):
    """ANO with invalid action masking (Huang and Ontañón 2022); arguments, environments and policies are MaskablePPO's.

    The environment has a method ``action_masks``, which returns the actions that are allowed now, in the format of
    sb3-contrib: one bool per action, for MultiDiscrete and MultiBinary those of all dimensions in a row.
    The keyword arguments are those of :class:`~sb3_ano.algorithms.ano.ANO`.

    :raises ValueError: if the environment has no masks, or masks of the wrong shape, or allows no action
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = MaskablePPO.policy_aliases
    policy_base: ClassVar[type[BasePolicy]] = MaskableActorCriticPolicy
    _use_masking = True

    @inherit_signature(ANO, positional=MaskablePPO)
    def __init__(self, **arguments: Any):
        super().__init__(**arguments)

    def _setup_model(self) -> None:
        self._require_policy()
        space = getattr(self, "action_space", None)
        if space is not None and not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ValueError(
                f"env has the action space {space}, whose actions cannot be masked; allowed are Discrete, "
                "MultiDiscrete and MultiBinary"
            )
        kind = self.policy_class
        # SB3 passes an argument that sb3-contrib's maskable policies do not have.
        self.policy_class = lambda *spaces, use_sde, **options: kind(*spaces, **options)  # type: ignore[assignment]
        try:
            super()._setup_model()
        finally:
            self.policy_class = kind

    def _default_buffer(self) -> type[RolloutBuffer]:
        return DictMaskedRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else MaskedRolloutBuffer

    def learn(  # type: ignore[override]
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        use_masking: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train; see SB3. The arguments are in the order of MaskablePPO's.

        :param use_masking: whether to ask the environment for masks
        """
        self._use_masking = use_masking
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return actions and states; see SB3.

        :param action_masks: actions that are allowed, or None for all
        """
        policy: Any = self.policy
        return policy.predict(observation, state, episode_start, deterministic, action_masks=action_masks)

    def _make_actor(self, env: VecEnv) -> Any:
        fast = super()._make_actor(env)
        return _MaskedActor(fast, env, self.action_space) if self._use_masking else fast


class RecurrentANO(ANO):
    """ANO for policies with an LSTM; arguments and policies are those of sb3-contrib's RecurrentPPO.

    The LSTM sees whole sequences, which makes an update several times as fast as sb3-contrib's, whose loop restarts the
    LSTM at each step. The update is not compiled. The keyword arguments are those of :class:`~sb3_ano.algorithms.ano.ANO`.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]]
    policy_base: ClassVar[type[BasePolicy]] = RecurrentActorCriticPolicy
    _last_lstm_states: RNNStates
    _next_lstm_states: RNNStates

    @inherit_signature(ANO, positional=RecurrentPPO)
    def __init__(self, **arguments: Any):
        super().__init__(**arguments)

    def _setup_model(self) -> None:
        for name, plain in (("torch_compile", (False, "auto")), ("precision", ("float32",))):
            if getattr(self, name) not in plain:
                warnings.warn(f"{name}={getattr(self, name)!r} has no effect on recurrent policies", stacklevel=3)
        super()._setup_model()
        lstm: Any = self.policy.lstm_actor
        buffer = cast(RecurrentRolloutBuffer, self.rollout_buffer)
        buffer.hidden_state_shape = (self.n_steps, lstm.num_layers, self.n_envs, lstm.hidden_size)
        buffer.reset()
        zeros = torch.zeros(lstm.num_layers, self.n_envs, lstm.hidden_size, device=self.device)
        self._last_lstm_states = self._next_lstm_states = RNNStates((zeros, zeros), (zeros, zeros))

    def _default_buffer(self) -> type[RolloutBuffer]:
        return DictSequenceRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else SequenceRolloutBuffer

    def _compiles(self) -> bool:
        return False

    def _make_actor(self, env: VecEnv) -> Any:
        return _RecurrentActor(self)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_last_lstm_states", "_next_lstm_states"]


class RecurrentMaskableANO(MaskableANO, RecurrentANO):
    """ANO for policies with an LSTM and invalid action masking; see :class:`RecurrentANO` and :class:`MaskableANO`."""

    policy_base: ClassVar[type[BasePolicy]]

    @inherit_signature(ANO, positional=RecurrentPPO)
    def __init__(self, **arguments: Any):
        ANO.__init__(self, **arguments)

    def _default_buffer(self) -> type[RolloutBuffer]:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        return DictMaskedSequenceRolloutBuffer if is_dict else MaskedSequenceRolloutBuffer

    def _make_actor(self, env: VecEnv) -> Any:
        recurrent = RecurrentANO._make_actor(self, env)
        return _MaskedActor(recurrent, env, self.action_space) if self._use_masking else recurrent


def with_masks(model: Any, env: VecEnv) -> Any:
    """Return a model whose ``predict`` asks environments for masks; a model that takes none is returned as it is.

    :param model: algorithm
    :param env: environments that it acts in
    """
    return _WithMasks(model, env) if isinstance(model, MaskableANO) and is_masking_supported(env) else model


class _WithMasks:
    def __init__(self, model: Any, env: VecEnv) -> None:
        self._model, self._env = model, env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def predict(self, *args: Any, **options: Any) -> Any:
        return self._model.predict(*args, **options, action_masks=get_action_masks(self._env))


# Acting


class _MaskedActor:
    """Ask the environments for masks before each step.

    :param inner: actor that takes masks
    :param env: training environment
    :param space: action space
    :raises ValueError: if the environment has no masks
    """

    def __init__(self, inner: Any, env: VecEnv, space: spaces.Space) -> None:
        if not is_masking_supported(env):
            raise ValueError(
                "the environment has no method 'action_masks'; wrap it in sb3_contrib.common.wrappers.ActionMasker, or pass "
                "use_masking=False to learn"
            )
        self._inner, self._env = inner, env
        self._sizes = _choices(space)
        self._starts = np.cumsum([0, *self._sizes[:-1]])
        self.values, self.terminal_values = inner.values, inner.terminal_values

    def __call__(self, observations: Any) -> Any:
        masks = np.asarray(get_action_masks(self._env), dtype=bool)
        if masks.shape[0] != self._env.num_envs or masks[0].size != sum(self._sizes):
            raise ValueError(
                f"action_masks() returned the shape {masks.shape[1:]}; allowed are {sum(self._sizes)} values, one per action"
            )
        self._masks = masks.reshape(self._env.num_envs, -1)
        possible = np.logical_or.reduceat(self._masks, self._starts, axis=1)
        if not possible.all():
            raise ValueError(f"action_masks() of environment {int(np.argmin(possible.all(axis=1)))} allows no action")
        return self._inner(observations, self._masks)

    def columns(self) -> dict[str, Any]:
        return {**self._inner.columns(), "action_masks": self._masks}


class _RecurrentActor:
    """Act with an LSTM policy, and keep its states in the model.

    :param model: algorithm with ``_last_lstm_states``, those before the current step
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def __call__(self, observations: Any, masks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        model, options = self._model, {} if masks is None else {"action_masks": masks}
        inputs, starts = obs_as_tensor(observations, model.device), self._flags(model._last_episode_starts)
        actions, values, log_probs, model._next_lstm_states = model.policy(inputs, model._last_lstm_states, starts, **options)
        return actions.cpu().numpy(), values.cpu().numpy(), log_probs.cpu().numpy()

    @torch.no_grad()
    def values(self, observations: Any) -> np.ndarray:
        model, inputs = self._model, obs_as_tensor(observations, self._model.device)
        return (
            model.policy.predict_values(inputs, model._last_lstm_states.vf, self._flags(model._last_episode_starts))
            .cpu()
            .numpy()
        )

    @torch.no_grad()
    def terminal_values(self, observations: list[Any], environments: list[int]) -> np.ndarray:
        policy, states = self._model.policy, self._model._next_lstm_states.vf
        values = []
        for observation, index in zip(observations, environments, strict=True):
            own = tuple(state[:, index : index + 1].contiguous() for state in states)
            values.append(policy.predict_values(policy.obs_to_tensor(observation)[0], own, self._flags([False])).cpu().numpy())
        return np.concatenate(values).reshape(-1)

    def columns(self) -> dict[str, Any]:
        """Return the states before the step; called once per step, at its end."""
        states = self._model._last_lstm_states
        self._model._last_lstm_states = self._model._next_lstm_states
        return {"lstm_states": states}

    def _flags(self, flags: Any) -> torch.Tensor:
        return torch.as_tensor(flags, dtype=torch.float32, device=self._model.device)


# Buffers


def _choices(space: Any) -> list[int]:
    """Return the numbers of actions in each dimension of an action space."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return [2] * spaces.flatdim(space) if isinstance(space, spaces.MultiBinary) else [int(size) for size in space.nvec]


class MaskedSamples(NamedTuple):
    """Samples of a rollout with masks; the other fields are those of ``RolloutSamples``.

    :param action_masks: actions that were allowed, bool ``(batch, n)``
    """

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    td_errors: torch.Tensor
    action_masks: torch.Tensor


class _Masks(RolloutBuffer):
    """Keep the masks of each step."""

    def reset(self) -> None:
        super().reset()
        self.action_masks = np.ones((self.buffer_size, self.n_envs, sum(_choices(self.action_space))), dtype=bool)


class MaskedRolloutBuffer(_Masks, FlatRolloutBuffer):
    """The default buffer of MaskableANO."""

    samples: ClassVar[Any] = MaskedSamples


class DictMaskedRolloutBuffer(_Masks, DictFlatRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""

    samples: ClassVar[Any] = MaskedSamples


class _Sequences(RolloutBuffer):
    """Hand out padded sequences, and the numbers of the loss without padding.

    The LSTM needs observations of sequences, all of the same length. The loss is a mean over samples; it gets only those.
    """

    def __init__(
        self, buffer_size: int, observation_space: spaces.Space, action_space: spaces.Space, *args: Any, **options: Any
    ):
        # The shape of the states is known when there is a policy.
        states = (buffer_size, 0, options.get("n_envs", 1), 0)
        super().__init__(buffer_size, observation_space, action_space, states, *args, **options)  # type: ignore[arg-type]

    def _get_samples(self, batch_inds: np.ndarray, env_change: Any = None, env: Any = None) -> Any:  # type: ignore[override]
        if env_change is None:
            env_change = (np.arange(self.buffer_size * self.n_envs) % self.buffer_size == 0)[:, None]
        samples: Any = super()._get_samples(batch_inds, env_change, env)  # type: ignore[call-arg]
        present = samples.mask > 1e-8
        scalars = {name: getattr(samples, name)[present] for name in ("old_values", "old_log_prob", "advantages", "returns")}
        # MultiBinary actions are integers in sb3-contrib, with which its RecurrentPPO fails.
        return SimpleNamespace(**{**samples._asdict(), **scalars, "actions": samples.actions.float(), "present": present})


class _MaskedSequences(_Masks, _Sequences):
    """The same, with masks."""

    def add(self, *args: Any, action_masks: np.ndarray | None = None, **options: Any) -> None:
        """Store one step; see sb3-contrib.

        :param action_masks: actions that were allowed, ``(n_envs, n)``, or None for all
        """
        if action_masks is not None:
            self.action_masks[self.pos] = action_masks
        super().add(*args, **options)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:  # type: ignore[override]
        if not self.generator_ready:
            self.action_masks = self.swap_and_flatten(self.action_masks)
        return super().get(batch_size)

    def _get_samples(self, batch_inds: np.ndarray, env_change: Any = None, env: Any = None) -> Any:  # type: ignore[override]
        samples = super()._get_samples(batch_inds, env_change, env)
        masks = self.pad(self.action_masks[batch_inds])  # type: ignore[attr-defined]
        # Padding allows all actions: it must not make NaN.
        samples.action_masks = masks.reshape(len(samples.present), -1) | ~samples.present[:, None]
        return samples


class SequenceRolloutBuffer(_Sequences, RecurrentRolloutBuffer):
    """The default buffer of RecurrentANO."""


class DictSequenceRolloutBuffer(_Sequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""


class MaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentRolloutBuffer):  # type: ignore[misc]
    """The default buffer of RecurrentMaskableANO."""


class DictMaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""


# Policies and their evaluation


def _plain_distribution(space: spaces.Space) -> Distribution:
    """Return SB3's distribution whose logits can be masked; MultiBinary has two actions per dimension, as in sb3-contrib."""
    sizes = _choices(space)
    return CategoricalDistribution(sizes[0]) if isinstance(space, spaces.Discrete) else MultiCategoricalDistribution(sizes)


class _WholeSequences(RecurrentActorCriticPolicy):
    """Run the LSTM over whole sequences, because a rollout's sequences are cut where episodes start."""

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        # For Discrete observations it is a NumPy integer, which PyTorch's LSTM rejects.
        extractor._features_dim = int(extractor.features_dim)
        return extractor

    @staticmethod
    def _process_sequence(features: Any, lstm_states: Any, episode_starts: Any, lstm: Any) -> Any:
        starts = episode_starts.reshape(lstm_states[0].shape[1], -1)
        if bool(starts[:, 1:].any()):
            return RecurrentActorCriticPolicy._process_sequence(features, lstm_states, episode_starts, lstm)
        kept = (1.0 - starts[:, 0])[None, :, None]
        sequences = features.reshape(*starts.shape, lstm.input_size).transpose(0, 1)
        output, states = lstm(sequences, (kept * lstm_states[0], kept * lstm_states[1]))
        return output.transpose(0, 1).flatten(end_dim=1), states


class MlpLstmPolicy(_WholeSequences, RecurrentActorCriticPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class CnnLstmPolicy(_WholeSequences, RecurrentActorCriticCnnPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class MultiInputLstmPolicy(_WholeSequences, RecurrentMultiInputActorCriticPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class _MaskedPolicy(RecurrentActorCriticPolicy):
    """Apply masks to the distribution of a recurrent policy."""

    def _build(self, lr_schedule: Any) -> None:
        self._masks: Any = None
        self.action_dist = _plain_distribution(self.action_space)
        super()._build(lr_schedule)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor, latent_sde: None = None) -> Distribution:
        logits = self.action_net(latent_pi)
        if self._masks is not None:
            masks = torch.as_tensor(self._masks, dtype=torch.bool, device=logits.device).reshape(logits.shape)
            logits = torch.where(masks, logits, MASKED)
        return self.action_dist.proba_distribution(action_logits=logits)

    @contextlib.contextmanager
    def _masked(self, masks: Any) -> Iterator[None]:
        self._masks = masks
        try:
            yield
        finally:
            self._masks = None

    def forward(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Act; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().forward(*args, **options)

    def evaluate_actions(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Evaluate actions; see sb3-contrib's recurrent policies.

        :param action_masks: actions that were allowed, or None for all
        """
        with self._masked(action_masks):
            return super().evaluate_actions(*args, **options)

    def predict(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Return actions and states; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().predict(*args, **options)


class MaskableMlpLstmPolicy(_MaskedPolicy, MlpLstmPolicy):
    """The MlpLstmPolicy with masks."""


class MaskableCnnLstmPolicy(_MaskedPolicy, CnnLstmPolicy):
    """The CnnLstmPolicy with masks."""


class MaskableMultiInputLstmPolicy(_MaskedPolicy, MultiInputLstmPolicy):
    """The MultiInputLstmPolicy with masks."""


class MaskedEvaluation(PolicyEvaluation):
    """Evaluate sb3-contrib's maskable policies with SB3's distributions of masked logits, which can be compiled."""

    @staticmethod
    def make_distribution(policy: Any) -> Distribution:
        return make_masked_proba_distribution(policy.action_space)

    def __init__(self, policy: Any, precision: str = "float32") -> None:
        super().__init__(policy, precision)
        self._plain = _plain_distribution(policy.action_space)

    def _distribution(self, latent_pi: torch.Tensor, masks: torch.Tensor | None) -> Distribution:
        logits = self.policy.action_net(latent_pi)
        if masks is not None:  # in float32 in sb3-contrib's buffer
            logits = torch.where(masks.bool(), logits, MASKED)
        return self._plain.proba_distribution(action_logits=logits)


class RecurrentEvaluation(PolicyEvaluation):
    """Evaluate recurrent policies on padded sequences; what is returned has no padding."""

    @staticmethod
    def make_distribution(policy: Any) -> Distribution:
        masked = isinstance(policy, _MaskedPolicy)
        return _plain_distribution(policy.action_space) if masked else PolicyEvaluation.make_distribution(policy)

    def __call__(self, samples: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        masks = {"action_masks": samples.action_masks} if hasattr(samples, "action_masks") else {}
        sequences = (samples.observations, actions, samples.lstm_states, samples.episode_starts)
        values, log_prob, entropy = self.policy.evaluate_actions(*sequences, **masks)  # type: ignore[call-arg]
        present = samples.present
        return values.flatten()[present], log_prob[present], None if entropy is None else entropy[present]


RecurrentANO.policy_aliases = {
    "MlpLstmPolicy": MlpLstmPolicy,
    "CnnLstmPolicy": CnnLstmPolicy,
    "MultiInputLstmPolicy": MultiInputLstmPolicy,
}
RecurrentMaskableANO.policy_aliases = {
    "MlpLstmPolicy": MaskableMlpLstmPolicy,
    "CnnLstmPolicy": MaskableCnnLstmPolicy,
    "MultiInputLstmPolicy": MaskableMultiInputLstmPolicy,
}
RecurrentMaskableANO.policy_base = _MaskedPolicy
policy_evaluation.EVALUATIONS |= {
    MaskableActorCriticPolicy: MaskedEvaluation,
    RecurrentActorCriticPolicy: RecurrentEvaluation,
    _MaskedPolicy: RecurrentEvaluation,
}
actor.SAMPLERS[MaskableCategoricalDistribution] = actor._categorical_sampler
