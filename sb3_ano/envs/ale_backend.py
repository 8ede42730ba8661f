"""ale-py's own vectorised Atari games, stepped as one batch in C++ threads."""

import inspect
import os
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from sb3_ano.envs.atari import AtariProtocol
from sb3_ano.envs.batched import BatchedVecEnv, Transition, processors
from sb3_ano.envs.make import did_you_mean, unknown_settings
from sb3_ano.extras import missing_extra

try:
    from ale_py import roms
    from ale_py.registration import rom_id_to_name
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise missing_extra("atari", "ale-py") from error

_ROMS = {rom_id_to_name(rom): rom for rom in roms.get_all_rom_ids()}


def has_game(game: str) -> bool:
    """Whether ale-py has the game, for example ``SpaceInvaders``."""
    return game in _ROMS


class AleVecEnv(BatchedVecEnv):
    """A VecEnv over ale-py's ``AtariVectorEnv``.

    With ``episodic_life`` a lost life ends the learner's episode and the game goes on from the very next observation, which is
    also the terminal one: ale-py cannot play a step of one environment alone, as SB3's wrappers and EnvPool do there.

    :param env_id: names the game in errors and in the monitor file
    :param n_envs: number of environments
    :param atari: the protocol
    :param num_threads: threads that step them; None takes as many as there are processors, at most ``n_envs``
    :param env_kwargs: other settings of ``AtariVectorEnv``
    :raises ValueError: for an unknown game
    :raises TypeError: for settings that ``AtariVectorEnv`` does not know
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int,
        atari: AtariProtocol,
        *,
        num_threads: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        monitor_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not has_game(atari.game):
            hint = did_you_mean(f"{atari.game}-v5", [f"{game}-v5" for game in _ROMS])
            raise ValueError(f"env_id={env_id!r} is unknown to backend 'ale'{hint}")
        known = inspect.signature(AtariVectorEnv).parameters
        if unknown := set(env_kwargs or {}) - set(known):
            raise unknown_settings(unknown, f"ale-py's {env_id}", [*known, *inspect.signature(AtariProtocol).parameters])
        # Lives and clipping are ours: ale-py's clipping loses the score, and its final_obs are wrong with life_loss_info.
        self._games: Any = AtariVectorEnv(
            _ROMS[atari.game],
            n_envs,
            num_threads=min(n_envs, num_threads or processors()),
            autoreset_mode=AutoresetMode.SAME_STEP,
            reward_clipping=False,
            repeat_action_probability=atari.repeat_action_probability,
            full_action_space=atari.full_action_space,
            noop_max=atari.noop_max,
            frameskip=atari.frame_skip,
            stack_num=atari.frame_stack,
            img_height=atari.screen_size,
            img_width=atari.screen_size,
            max_num_frames_per_episode=atari.max_frames,
            **(env_kwargs or {}),
        )
        self._episodic_life, self._clip_reward = atari.episodic_life, atari.clip_reward
        self._lives = np.zeros(n_envs, np.int32)
        actions = spaces.Discrete(int(self._games.single_action_space.n))
        super().__init__(env_id, "ale", n_envs, atari.observation_space, actions, seed=seed, monitor_dir=monitor_dir)

    def _begin(self, seeds: list[int] | None) -> np.ndarray:
        observations, info = self._games.reset(seed=None if seeds is None else np.array([seed % 2**31 for seed in seeds]))
        self._lives = info["lives"]
        return observations

    def _advance(self, actions: np.ndarray) -> Transition:
        observations, scores, terminated, truncated, info = self._games.step(actions.astype(np.int32))
        over = terminated | truncated
        lives, previous = info["lives"], self._lives
        self._lives = lives
        if self._episodic_life:
            # A game that is over reports the lives of the next one.
            terminated = terminated | ((lives > 0) & (lives < previous) & ~over)
        rewards = (np.sign(scores) if self._clip_reward else scores).astype(np.float32)
        return Transition(observations, rewards, scores, terminated, truncated, over, info.get("final_obs"))

    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[np.ndarray, np.ndarray]:
        first = transition.observations[indices]
        terminal = first.copy()
        over = transition.over[indices]
        if over.any():
            terminal[over] = transition.details[indices[over]]
        return terminal, first

    def _release(self) -> None:
        self._games.close()
