"""ANO for sb3-contrib's policies: LSTM policies, policies with invalid action masking, and both at once."""

import warnings
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import contrib_buffers, contrib_policies
from sb3_ano.algorithms.ano import ANO
from sb3_ano.algorithms.policy_evaluation import choices
from sb3_ano.shaping import ShapingLike


class MaskableANO(ANO):
    """ANO with invalid action masking (Huang and Ontañón 2022); arguments, environments and policies are MaskablePPO's.

    The environment has a method ``action_masks``, which returns the actions that are allowed now, in the format of
    sb3-contrib: one bool per action, for MultiDiscrete and MultiBinary those of all dimensions in a row.
    The keyword arguments are those of :class:`~sb3_ano.algorithms.ano.ANO`.

    If masks allow no action, all are drawn with the same probability, as in MaskablePPO, with a warning once per training.

    :raises ValueError: if the environment has no masks, or masks of the wrong shape
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = MaskablePPO.policy_aliases
    policy_base: ClassVar[type[BasePolicy]] = MaskableActorCriticPolicy
    _default_buffers = contrib_buffers.MaskedRolloutBuffer, contrib_buffers.DictMaskedRolloutBuffer
    _use_masking = True
    _warned_of_masks = False

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
        self._warned_of_masks = False
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
        actions, states = policy.predict(observation, state, episode_start, deterministic, action_masks=action_masks)
        return actions, states

    def _make_actor(self, env: VecEnv) -> Any:
        inner = super()._make_actor(env)  # NumPy's or PyTorch's, or that of RecurrentANO
        return _MaskedActor(inner, env, self) if self._use_masking else inner

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_warned_of_masks"]


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
    }
    policy_base: ClassVar[type[BasePolicy]] = RecurrentActorCriticPolicy
    _default_buffers = contrib_buffers.SequenceRolloutBuffer, contrib_buffers.DictSequenceRolloutBuffer

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
        for name, plain in (("torch_compile", (False, "auto")), ("precision", ("float32",))):
            if getattr(self, name) not in plain:
                warnings.warn(f"{name}={getattr(self, name)!r} has no effect on recurrent policies", stacklevel=3)
        super()._setup_model()
        lstm: Any = self.policy.lstm_actor
        buffer = cast(RecurrentRolloutBuffer, self.rollout_buffer)
        buffer.hidden_state_shape = (self.n_steps, lstm.num_layers, self.n_envs, lstm.hidden_size)
        buffer.reset()
        shape = (lstm.num_layers, self.n_envs, lstm.hidden_size)
        zeros = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._last_lstm_states = self._next_lstm_states = RNNStates((zeros, zeros), (zeros, zeros))

    def _compiles(self) -> bool:
        return False

    def _make_actor(self, env: VecEnv) -> Any:
        return _RecurrentActor(self)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_last_lstm_states", "_next_lstm_states"]


class RecurrentMaskableANO(MaskableANO, RecurrentANO):
    """ANO for policies with an LSTM and invalid action masking; see :class:`RecurrentANO` and :class:`MaskableANO`."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": contrib_policies.MaskableMlpLstmPolicy,
        "CnnLstmPolicy": contrib_policies.MaskableCnnLstmPolicy,
        "MultiInputLstmPolicy": contrib_policies.MaskableMultiInputLstmPolicy,
    }
    policy_base: ClassVar[type[BasePolicy]] = contrib_policies.MaskedLstmPolicy
    _default_buffers = contrib_buffers.MaskedSequenceRolloutBuffer, contrib_buffers.DictMaskedSequenceRolloutBuffer  # type: ignore[assignment]

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
    :param model: algorithm
    :raises ValueError: if the environment has no masks
    """

    def __init__(self, inner: Any, env: VecEnv, model: Any) -> None:
        if not is_masking_supported(env):
            raise ValueError(
                "the environment has no method 'action_masks'; wrap it in sb3_contrib.common.wrappers.ActionMasker, or pass "
                "use_masking=False to learn"
            )
        self._inner, self._env, self._model = inner, env, model
        self._sizes = choices(model.action_space)
        self._starts = np.cumsum([0, *self._sizes[:-1]])
        self.values, self.terminal_values = inner.values, inner.terminal_values

    def __call__(self, observations: Any) -> Any:
        masks = np.asarray(get_action_masks(self._env), dtype=bool)
        if masks.shape[0] != self._env.num_envs or masks[0].size != sum(self._sizes):
            raise ValueError(f"action_masks has the shape {masks[0].shape}; allowed are {sum(self._sizes)} values")
        self._masks = masks.reshape(self._env.num_envs, -1)
        if not self._model._warned_of_masks:
            self._warn_of_impossible()
        return self._inner(observations, self._masks)

    def _warn_of_impossible(self) -> None:
        possible = np.logical_or.reduceat(self._masks, self._starts, axis=1)
        if possible.all():
            return
        self._model._warned_of_masks = True
        environment, dimension = np.argwhere(~possible)[0]
        where = f" in dimension {dimension}" if len(self._sizes) > 1 else ""
        warnings.warn(
            f"action_masks() of environment {environment} allows no action{where} at step "
            f"{self._model.num_timesteps // self._env.num_envs} of the training (environments and dimensions count from 0); "
            "any action is drawn, as in MaskablePPO, and nothing is learned from it. Allow one, or end the episode earlier",
            stacklevel=2,
        )

    def columns(self) -> dict[str, Any]:
        return {**self._inner.columns(), "action_masks": self._masks}

    @property
    def variables(self) -> dict[str, Any]:
        return {**self._inner.variables, "action_masks": self._masks, "use_masking": True}


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
        model, starts = self._model, self._flags(self._model._last_episode_starts)
        inputs = obs_as_tensor(observations, model.device)
        values: torch.Tensor = model.policy.predict_values(inputs, model._last_lstm_states.vf, starts)
        return values.cpu().numpy()

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

    @property
    def variables(self) -> dict[str, Any]:
        starts = self._flags(self._model._last_episode_starts)
        return {"lstm_states": self._model._next_lstm_states, "episode_starts": starts}

    def _flags(self, flags: Any) -> torch.Tensor:
        return torch.as_tensor(flags, dtype=torch.float32, device=self._model.device)
