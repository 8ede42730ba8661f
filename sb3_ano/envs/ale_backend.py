"""ale-py's vectorized Atari games, stepped as one batch in C++ threads."""

from typing import Any, cast

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from sb3_ano.envs.atari import AtariProtocol
from sb3_ano.envs.batched import BatchedVecEnv, Space, Transition
from sb3_ano.envs.make import require_known_settings
from sb3_ano.extras import hint, needs_extra

with needs_extra("atari", "ale-py"):
    from ale_py import roms
    from ale_py.registration import rom_id_to_name
    from ale_py.vector_env import AtariVectorEnv

# Those that change neither spaces nor the protocol.
_SETTINGS = ("maxpool", "thread_affinity_offset", "use_fire_reset")
# The emulator's names of all games, by the names in ids.
_ROMS = {rom_id_to_name(rom): rom for rom in roms.get_all_rom_ids()}


def has_game(game: str) -> bool:
    """Tell whether ale-py has the game, for example ``SpaceInvaders``."""
    return game in _ROMS


class AleVecEnv(BatchedVecEnv):
    """A VecEnv over ale-py's ``AtariVectorEnv``; further settings are ``maxpool``, ``use_fire_reset`` and
    ``thread_affinity_offset``.

    With ``episodic_life``, a lost life ends the learner's episode, and the game continues from the next observation, which is
    also the terminal one. Unlike SB3's wrappers and EnvPool, ale-py cannot play a step in only one of the environments.
    """

    backend = "ale"

    def _open(self, atari: AtariProtocol | None, env_kwargs: dict[str, object]) -> tuple[spaces.Box, Space]:
        if atari is None or not has_game(atari.game):
            games = [f"{game}-v5" for game in _ROMS]
            suggestion = hint(self.env_id, games)
            raise ValueError(f"env_id={self.env_id!r} is unknown to backend 'ale'{suggestion}")

        known = {*_SETTINGS, *vars(atari)} - {"game"}
        require_known_settings(env_kwargs, known, f"ale-py's {self.env_id}")

        # Lives and clipping are computed here: ale-py's clipping discards the score, and its final_obs are wrong with
        # life_loss_info.
        self._games: Any = AtariVectorEnv(
            _ROMS[atari.game],
            self.num_envs,
            num_threads=self.num_threads,
            autoreset_mode=AutoresetMode.SAME_STEP,
            reward_clipping=False,
            frameskip=atari.frame_skip,
            max_num_frames_per_episode=atari.max_frames,
            **atari.emulator_settings,
            **env_kwargs,
        )
        self._episodic_life = atari.episodic_life
        self._clip_reward = atari.clip_reward
        self._lives = np.zeros(self.num_envs, np.int32)

        action_space = spaces.Discrete(int(self._games.single_action_space.n))
        return atari.observation_space, action_space

    def _begin(self, seeds: list[int] | None) -> np.ndarray:
        seed = None
        # None continues with the present generators.
        if seeds is not None:
            # The emulator takes 31 bits.
            seed = np.array(seeds) % 2**31

        observations: np.ndarray
        observations, info = self._games.reset(seed=seed)
        # The first step compares with these.
        self._lives = info["lives"]
        return observations

    def _advance(self, actions: np.ndarray) -> Transition:
        observations, scores, terminated, truncated, info = self._games.step(actions.astype(np.int32))
        over = terminated | truncated

        lives = info["lives"]
        if self._episodic_life:
            # When a game is over, ale-py reports the lives of the next one.
            is_lost = (lives > 0) & (lives < self._lives) & ~over
            terminated = terminated | is_lost
        self._lives = lives

        rewards = scores
        if self._clip_reward:
            rewards = np.sign(scores)
        # ale-py's are int32, which SB3 could not add a bootstrapped value to.
        rewards = rewards.astype(np.float32)

        final = info.get("final_obs")
        return Transition(observations, rewards, scores, terminated, truncated, over, final)

    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[np.ndarray, np.ndarray]:
        first = cast(np.ndarray, transition.observations)[indices]
        # Another array, because the caller writes the first observations into the batch and keeps the terminal ones.
        terminal = first.copy()

        # After a lost life, the game continues from the observation that is also the terminal one.
        over = transition.over[indices]
        if over.any():
            final = cast(np.ndarray, transition.details)
            terminal[over] = final[indices[over]]
        return terminal, first

    def _release(self) -> None:
        self._games.close()
