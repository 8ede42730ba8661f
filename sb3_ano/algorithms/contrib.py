"""ANO for sb3-contrib's policies: LSTM policies, policies with invalid action masking, and both at once."""

from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._system import warn_user
from sb3_ano.algorithms import contrib_buffers, contrib_policies
from sb3_ano.algorithms.ano import ANO
from sb3_ano.shaping import ShapingLike


class MaskableANO(ANO):
    """ANO with invalid action masking (Huang and Ontañón 2022); arguments, environments and policies are MaskablePPO's.

    The environment has a method ``action_masks``, which returns the actions that are allowed now, in the format of
    sb3-contrib: one bool per action, for MultiDiscrete and MultiBinary those of all dimensions in a row.
    The keyword arguments are those of :class:`~sb3_ano.algorithms.ano.ANO`.

    If masks allow no action, all are drawn with the same probability, as in MaskablePPO, with a warning once per training.

    :raises ValueError: if the environment has no masks, or masks of the wrong shape
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        **MaskablePPO.policy_aliases,
        "AsymmetricPolicy": contrib_policies.MaskableAsymmetricPolicy,
    }
    policy_base: ClassVar[type[BasePolicy]] = MaskableActorCriticPolicy
    _use_masking = True

    def __init__(
        self,
        policy: str | type[MaskableActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        shaping: ShapingLike = "ano",
        clip_range_high: float | str | Schedule | None = None,
        desired_kl: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        # Without gSDE, which has no masks: its actions are continuous.
        super().__init__(
            policy,  # type: ignore[arg-type]  # sb3-contrib's maskable policies do not derive from SB3's
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            n_epochs=n_epochs,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_range=clip_range,
            clip_range_vf=clip_range_vf,
            normalize_advantage=normalize_advantage,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            target_kl=target_kl,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
            shaping=shaping,
            clip_range_high=clip_range_high,
            desired_kl=desired_kl,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )

    def _setup_model(self) -> None:
        # Before anything is built, because sb3-contrib raises NotImplementedError for other spaces.
        self._require_policy()
        # Without an environment there is no space, which the base class reports.
        space = getattr(self, "action_space", None)
        if space is not None and not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ValueError(
                f"env has the action space {space}, whose actions cannot be masked; allowed are Discrete, "
                "MultiDiscrete and MultiBinary"
            )

        # SB3's choice would have no masks.
        if self.rollout_buffer_class is None:
            self.rollout_buffer_class = MaskableRolloutBuffer
            if isinstance(self.observation_space, spaces.Dict):
                self.rollout_buffer_class = MaskableDictRolloutBuffer

        kind = self.policy_class
        # SB3 passes an argument that sb3-contrib's maskable policies do not have.
        self.policy_class = lambda *spaces, use_sde, **options: kind(*spaces, **options)  # type: ignore[assignment]

        try:
            super()._setup_model()
        finally:
            # Also if the policy cannot be built: files and messages name the class.
            self.policy_class = kind

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
        # Kept for collect_rollouts: SB3's learn calls it without the argument.
        self._use_masking = use_masking
        # Masks that allow no action are warned about once per training, and a training is a call of learn.
        self.engine.warned_of_masks = False

        return super().learn(
            total_timesteps,
            callback,
            log_interval,
            tb_log_name,
            reset_num_timesteps,
            progress_bar,
        )

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
        # Maskable policies are no subclasses of SB3's in the eyes of type checkers.
        policy: Any = self.policy
        actions, states = policy.predict(
            observation,
            state,
            episode_start,
            deterministic,
            action_masks=action_masks,
        )
        return actions, states

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        # What learn was told, not the argument, which nobody passes.
        return super().collect_rollouts(
            env,
            callback,
            rollout_buffer,
            n_rollout_steps,
            self._use_masking,
        )


class RecurrentANO(ANO):
    """ANO for policies with an LSTM; arguments and policies are those of sb3-contrib's RecurrentPPO.

    The LSTM sees whole sequences, while sb3-contrib's loop runs it step by step: trainings were 1.0 (images) to 3.5 times
    (small networks, many epochs) as fast as RecurrentPPO's, see docs/performance.md. The update is not compiled. The keyword
    arguments are those of :class:`~sb3_ano.algorithms.ano.ANO`.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": contrib_policies.MlpLstmPolicy,
        "CnnLstmPolicy": contrib_policies.CnnLstmPolicy,
        "MultiInputLstmPolicy": contrib_policies.MultiInputLstmPolicy,
        "AsymmetricLstmPolicy": contrib_policies.AsymmetricLstmPolicy,
    }
    policy_base: ClassVar[type[BasePolicy]] = RecurrentActorCriticPolicy
    #: Rollout buffers for plain observations and for Dict.
    _sequence_buffers: ClassVar[tuple[type[RolloutBuffer], type[RolloutBuffer]]] = (
        RecurrentRolloutBuffer,
        RecurrentDictRolloutBuffer,
    )

    def __init__(
        self,
        policy: str | type[RecurrentActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 128,
        batch_size: int = 128,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        shaping: ShapingLike = "ano",
        clip_range_high: float | str | Schedule | None = None,
        desired_kl: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            n_epochs=n_epochs,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_range=clip_range,
            clip_range_vf=clip_range_vf,
            normalize_advantage=normalize_advantage,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            target_kl=target_kl,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
            shaping=shaping,
            clip_range_high=clip_range_high,
            desired_kl=desired_kl,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )

    def _setup_model(self) -> None:
        # The constructor takes both, so that code that makes any algorithm of this package need not know this one.
        if self.torch_compile not in (False, "auto"):
            warn_user(f"torch_compile={self.torch_compile!r} has no effect on recurrent policies")
        if self.precision != "float32":
            warn_user(f"precision={self.precision!r} has no effect on recurrent policies")

        # The shape of the states, which buffers with sequences need, is known when there is a policy.
        self.rollout_buffer_class = _no_buffer  # type: ignore[assignment]
        super()._setup_model()
        # It is an attribute of files, in which a function of this module has no place.
        self.rollout_buffer_class = None

        assert isinstance(self.policy, RecurrentActorCriticPolicy)  # _require_policy rejects others
        lstm = self.policy.lstm_actor
        state_shape = (lstm.num_layers, self.n_envs, lstm.hidden_size)

        plain_buffer, dict_buffer = self._sequence_buffers
        buffer_class: Any = plain_buffer
        if isinstance(self.observation_space, spaces.Dict):
            buffer_class = dict_buffer

        # The states of each step belong to the rollout: sequences of the update start from them.
        self.rollout_buffer = buffer_class(
            self.n_steps,
            self.observation_space,
            self.action_space,
            (self.n_steps, *state_shape),
            self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
        )

        # States before the first step: actor and critic start from zeros, as in sb3-contrib.
        zeros = torch.zeros(state_shape, dtype=torch.float32, device=self.device)
        self._last_lstm_states = RNNStates((zeros, zeros), (zeros, zeros))

    def _excluded_save_params(self) -> list[str]:
        # As in sb3-contrib: a loaded model starts new episodes.
        return [*super()._excluded_save_params(), "_last_lstm_states"]


class RecurrentMaskableANO(MaskableANO, RecurrentANO):
    """ANO for policies with an LSTM and invalid action masking; see :class:`RecurrentANO` and :class:`MaskableANO`."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": contrib_policies.MaskableMlpLstmPolicy,
        "CnnLstmPolicy": contrib_policies.MaskableCnnLstmPolicy,
        "MultiInputLstmPolicy": contrib_policies.MaskableMultiInputLstmPolicy,
        "AsymmetricLstmPolicy": contrib_policies.MaskableAsymmetricLstmPolicy,
    }
    policy_base: ClassVar[type[BasePolicy]] = contrib_policies.MaskedLstmPolicy
    _sequence_buffers = contrib_buffers.MaskedSequenceRolloutBuffer, contrib_buffers.DictMaskedSequenceRolloutBuffer

    def __init__(
        self,
        policy: str | type[contrib_policies.MaskedLstmPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 128,
        batch_size: int = 128,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        shaping: ShapingLike = "ano",
        clip_range_high: float | str | Schedule | None = None,
        desired_kl: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        # MaskableANO's constructor takes other arguments, and adds nothing.
        RecurrentANO.__init__(
            self,
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            n_epochs=n_epochs,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_range=clip_range,
            clip_range_vf=clip_range_vf,
            normalize_advantage=normalize_advantage,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            target_kl=target_kl,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
            shaping=shaping,
            clip_range_high=clip_range_high,
            desired_kl=desired_kl,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )


def _no_buffer(*args: object, **options: object) -> None:
    """Stand in for a class of rollout buffers."""


def with_masks(model: Any, env: VecEnv) -> Any:
    """Return a model whose ``predict`` asks environments for masks; a model that takes none is returned as it is.

    :param model: algorithm
    :param env: environments that it acts in
    """
    if isinstance(model, MaskableANO) and is_masking_supported(env):
        return _WithMasks(model, env)
    return model


class _WithMasks:
    def __init__(self, model: MaskableANO, env: VecEnv) -> None:
        self._model = model
        self._env = env

    def __getattr__(self, name: str) -> Any:
        # Evaluation and video read other attributes of a model, too.
        return getattr(self._model, name)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        # Of the states that the environments are in now, which the observations are of.
        masks = get_action_masks(self._env)
        return self._model.predict(observation, state, episode_start, deterministic, masks)
