"""PettingZoo's parallel environments, with one policy for all agents."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_ano.envs.vector import from_vector_env, row_of

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

# Infos by their names. PettingZoo's are a dictionary of those, by the names of the agents.
_Infos: TypeAlias = dict[str, Any]


def from_parallel_env(env: "ParallelEnv") -> VecEnv:
    """Wrap a parallel environment of PettingZoo for one policy that all agents share.

    Every possible agent is one environment of the result, and all episodes end together, with the last agent's. An agent that
    ends before observes zeros from then on, its rewards are 0, and its actions are ignored. Masks of actions are those under
    ``"action_mask"`` in its infos or its observation, or allow everything. An agent that has ended may only take the first
    action, so that a policy with masks learns nothing from its further steps. ``infos[i]["agent"]`` is the name of an agent.

    :param env: parallel environment whose agents have equal spaces
    :raises ValueError: if spaces differ
    """
    return from_vector_env(_Agents(env))


class AgentReturns:
    """Collect the returns of each agent, as the argument ``callback`` of SB3's or sb3-contrib's ``evaluate_policy``."""

    def __init__(self) -> None:
        #: Returns of the episodes by the name of the agent.
        self.returns: dict[str, list[float]] = {}

    def __call__(self, variables: _Infos, _: _Infos) -> None:
        """Read the episode of an environment, if it ends.

        :param variables: local variables of the evaluation
        """
        info = variables["info"]
        if variables["done"]:
            returns = self.returns.setdefault(info["agent"], [])
            returns.append(float(info["episode"]["r"]))


class _Agents(VectorEnv):
    """The agents of a parallel environment; see :func:`from_parallel_env`."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # gymnasium's way

    def __init__(self, game: "ParallelEnv") -> None:
        self.game = game
        self.names = game.possible_agents
        self.num_envs = len(self.names)
        self.render_mode = game.render_mode
        self.single_observation_space = game.observation_space(self.names[0])
        self.single_action_space = game.action_space(self.names[0])

        # One policy acts for all of them.
        for name in self.names:
            found = (game.observation_space(name), game.action_space(name))
            if found != (self.single_observation_space, self.single_action_space):
                raise ValueError(f"agent {name!r} has the spaces {found}; allowed are those of {self.names[0]!r}")

        # What an agent observes after its end.
        nothing: Any = create_empty_array(self.single_observation_space, fn=np.zeros)
        self._padding = row_of(nothing, 0)
        # Codes of the actions, of which only the first one is set. An action without a choice has no gradient.
        start = getattr(self.single_action_space, "start", 0)
        first = np.asarray(spaces.flatten(self.single_action_space, start))
        self._first = first.astype(bool)

    def reset(self, *, seed: int | None = None, options: _Infos | None = None) -> tuple[VecEnvObs, _Infos]:
        observations, infos = self.game.reset(seed=seed, options=options)
        return self._observed(observations, infos)

    def step(self, actions: np.ndarray) -> tuple[VecEnvObs, np.ndarray, np.ndarray, np.ndarray, _Infos]:
        # PettingZoo takes no actions of agents that have ended.
        chosen = {}
        for name, action in zip(self.names, actions, strict=True):
            if name in self.game.agents:
                chosen[name] = action

        observations, rewards, terminated, truncated, infos = self.game.step(chosen)
        # The game removes agents that have ended, each at its own step.
        is_over = not self.game.agents

        earned = np.zeros(self.num_envs)
        cut = np.zeros(self.num_envs, dtype=bool)
        for row, name in enumerate(self.names):
            earned[row] = rewards.get(name, 0.0)
            # An agent that ended before has no value to come.
            if is_over:
                cut[row] = truncated.get(name, False) and not terminated[name]

        observed, batch = self._observed(observations, infos, is_over)
        if is_over:
            # As gymnasium's mode SAME_STEP has it: first observations, and the last ones under these keys.
            last = {"final_obs": observed, "final_info": batch}
            observed, batch = self.reset()
            batch |= last

        ended = is_over & ~cut
        return observed, earned, ended, cut, batch

    def _observed(
        self, observations: dict[str, VecEnvObs], infos: dict[str, _Infos], is_over: bool = False
    ) -> tuple[VecEnvObs, _Infos]:
        """Return observations and infos of all agents, and keep their masks."""
        rows = []
        batch: _Infos = {}
        self.masks = []

        for row, name in enumerate(self.names):
            info = {**infos.get(name, {}), "agent": name}
            self._add_info(batch, info, row)

            observation = self._padding
            mask = self._first
            # At the end of all episodes, no agent is left, but the last ones have observations.
            if is_over or name in self.game.agents:
                observation = observations.get(name, self._padding)
                mask = np.ones_like(mask)
                # PettingZoo's tasks have masks in either place.
                for source in (observation, info):
                    if isinstance(source, dict):
                        mask = source.get("action_mask", mask)

            rows.append(observation)
            self.masks.append(mask)

        # New arrays, because the step needs those of the last observations and of the first ones.
        arrays: Any = create_empty_array(self.single_observation_space, self.num_envs)
        observed: VecEnvObs = concatenate(self.single_observation_space, rows, arrays)
        return observed, batch

    def call(self, name: str, *args: object, **kwargs: object) -> list[Any]:
        """Return the masks of all agents, or what a method of the game returns, for each of them."""
        if name == "action_masks":
            return self.masks
        # The adapter asks for an attribute before it reads it, and the game itself is no environment of gymnasium.
        if name == "has_wrapper_attr":
            return [args == ("action_masks",)] * self.num_envs

        method = getattr(self.game, name)
        return [method(*args, **kwargs)] * self.num_envs

    def render(self) -> Any:
        # One image shows all agents.
        return [self.game.render()]

    def close_extras(self, **kwargs: object) -> None:
        self.game.close()
