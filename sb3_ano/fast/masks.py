"""Masks of actions in a rollout, as sb3-contrib has them."""

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._system import warn_user
from sb3_ano.fast.act import Acted, Actor, Observations
from sb3_ano.fast.engine import Accelerated
from sb3_ano.fast.policy import choices


class MaskedActor(Actor):
    """Ask the environments for masks before each step.

    :param inner: actor that takes masks
    :param env: training environment
    :param model: on-policy algorithm
    :raises ValueError: if the environment has no masks
    """

    def __init__(self, inner: Actor, env: VecEnv, model: Accelerated) -> None:
        # On demand, because sb3-contrib takes time to import.
        from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

        if not is_masking_supported(env):
            raise ValueError(
                "the environment has no method 'action_masks'; wrap it in sb3_contrib.common.wrappers.ActionMasker, or pass "
                "use_masking=False to learn"
            )
        # The values of observations do not depend on masks.
        self._inner = inner
        self._env = env
        self._model = model
        self._get_masks = get_action_masks
        self._sizes = choices(model.action_space)
        # Where each dimension starts in a row of masks.
        self._starts = np.cumsum([0, *self._sizes[:-1]])
        self.holds_copies = inner.holds_copies
        self.values = inner.values  # type: ignore[method-assign]
        self.terminal_values = inner.terminal_values  # type: ignore[method-assign]

    def __call__(self, observations: Observations, masks: np.ndarray | None = None) -> Acted:
        # At each step, because which actions are allowed depends on the state. The argument is not used: nobody passes masks.
        masks = np.asarray(self._get_masks(self._env), dtype=bool)
        if masks.shape[0] != self._env.num_envs or masks[0].size != sum(self._sizes):
            raise ValueError(f"action_masks has the shape {masks[0].shape}; allowed are {sum(self._sizes)} values")
        self._masks = masks.reshape(self._env.num_envs, -1)

        # Looked for until it is found once, because this reads all masks.
        if not self._model.engine.warned_of_masks:
            self._warn_of_impossible()
        return self._inner(observations, self._masks)

    def _warn_of_impossible(self) -> None:
        possible = np.logical_or.reduceat(self._masks, self._starts, axis=1)
        if possible.all():
            return

        self._model.engine.warned_of_masks = True
        environment, dimension = np.argwhere(~possible)[0]
        where = ""
        if len(self._sizes) > 1:
            where = f" in dimension {dimension}"
        step = self._model.num_timesteps // self._env.num_envs
        warn_user(
            f"action_masks() of environment {environment} allows no action{where} at step "
            f"{step} of the training (environments and dimensions count from 0); "
            "any action is drawn, as in MaskablePPO, and nothing is learned from it. Allow one, or end the episode earlier"
        )

    def stored(self) -> dict[str, Any]:
        return {**self._inner.stored(), "action_masks": self._masks}

    def variables(self) -> dict[str, Any]:
        return {**self._inner.variables(), "action_masks": self._masks, "use_masking": True}
