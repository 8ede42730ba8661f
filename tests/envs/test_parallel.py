"""PettingZoo's parallel environments as vectorized environments."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano import ANO, MaskableANO
from sb3_ano.envs import AgentReturns, from_parallel_env


class Race:
    """Three agents, whose episodes end after 2, 4 and 6 steps; the last one is truncated. It has PettingZoo's interface.

    :param has_masks: whether infos have masks: an agent may not take the action that is its own number
    """

    possible_agents = ("first", "second", "third")
    render_mode = "rgb_array"

    def __init__(self, has_masks: bool = False) -> None:
        self.has_masks = has_masks
        self.closed = False
        self.seeds: list[int | None] = []

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-100.0, 100.0, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.seeds.append(seed)
        self.agents = [*self.possible_agents]
        self.time = 0
        return self.observations(), self.infos()

    def observations(self) -> dict[str, np.ndarray]:
        return {name: np.float32([self.number(name) + 1, self.time + 1]) for name in self.agents}

    def infos(self) -> dict[str, dict[str, Any]]:
        if not self.has_masks:
            return {name: {} for name in self.agents}
        return {name: {"action_mask": np.arange(4) != self.number(name)} for name in self.agents}

    def number(self, name: str) -> int:
        return self.possible_agents.index(name)

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        assert [*actions] == self.agents
        self.time += 1
        if self.has_masks:
            assert all(action != self.number(name) for name, action in actions.items())
        observations, infos = self.observations(), self.infos()
        rewards = {name: 10.0 * self.number(name) + float(action) for name, action in actions.items()}
        over = {name: self.time == 2 * (self.number(name) + 1) for name in self.agents}
        terminated = {name: over[name] and name != "third" for name in self.agents}
        truncated = {name: over[name] and name == "third" for name in self.agents}
        self.agents = [name for name in self.agents if not over[name]]
        return observations, rewards, terminated, truncated, infos

    def render(self) -> np.ndarray:
        return np.zeros((4, 4, 3), np.uint8)

    def track(self) -> str:
        return "oval"

    def close(self) -> None:
        self.closed = True


def test_agents_end_together_and_those_that_ended_before_observe_zeros():
    game = Race()
    env = from_parallel_env(game)
    env.seed(7)
    assert env.reset().tolist() == [[1, 1], [2, 1], [3, 1]]
    assert game.seeds == [7]
    for step in range(1, 7):
        observations, rewards, dones, infos = env.step(np.array([1, 2, 3]))
        alive = np.array([step < 2, step < 4, step < 6])
        # At the end, the observations are those of the next episode.
        expected = (
            [[row + 1, step + 1] if alive[row] else [0, 0] for row in range(3)] if step < 6 else [[1, 1], [2, 1], [3, 1]]
        )
        assert observations.tolist() == expected
        assert rewards.tolist() == [1.0 * (step <= 2), 12.0 * (step <= 4), 23.0]
        assert dones.tolist() == [step == 6] * 3
        assert [info["agent"] for info in infos] == [*Race.possible_agents]
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False, True]
    assert [info["terminal_observation"].tolist() for info in infos] == [[0, 0], [0, 0], [3, 7]]
    assert [float(info["episode"]["r"]) for info in infos] == [2.0, 48.0, 138.0]
    assert env.env_method("track") == ["oval"] * 3
    assert env.render().shape == (4, 4, 3)
    env.close()
    assert game.closed


def test_masks_are_the_games_and_leave_one_action_to_agents_that_ended():
    env = from_parallel_env(Race(has_masks=True))
    env.reset()
    for step in range(6):
        masks = np.stack(env.env_method("action_masks"))
        expected = ~np.eye(3, 4, dtype=bool)
        for row in range(3):
            if step >= 2 * (row + 1):
                expected[row] = [True, False, False, False]
        np.testing.assert_array_equal(masks, expected)
        env.step(np.array([1, 2, 3]))
    assert np.stack(from_reset(Race()).env_method("action_masks")).all()


def from_reset(game: Race) -> Any:
    env = from_parallel_env(game)
    env.reset()
    return env


@pytest.mark.parametrize("algorithm", [ANO, MaskableANO])
def test_algorithms_train_and_each_agent_is_evaluated(algorithm):
    env = from_parallel_env(Race(has_masks=algorithm is MaskableANO))
    model = algorithm("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=1, seed=0).learn(384)
    evaluate = evaluate_masked if algorithm is MaskableANO else evaluate_policy
    collected = AgentReturns()
    evaluate(model, env, n_eval_episodes=6, callback=collected)
    assert {name: len(returns) for name, returns in collected.returns.items()} == dict.fromkeys(Race.possible_agents, 2)
    assert min(collected.returns["third"]) >= 120.0 > max(collected.returns["second"])


def test_different_spaces_give_one_line():
    game = Race()
    game.action_space = lambda agent: spaces.Discrete(4 if agent == "first" else 3)
    with pytest.raises(ValueError, match="agent 'second' has the spaces .*; allowed are those of 'first'"):
        from_parallel_env(game)


def test_a_task_of_pettingzoo_plays_as_by_itself():
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    games = SimpleNamespace(ours=spread.parallel_env(max_cycles=5), theirs=spread.parallel_env(max_cycles=5))
    env = from_parallel_env(games.ours)
    env.seed(3)
    names = games.theirs.possible_agents
    observations = env.reset()
    expected, _ = games.theirs.reset(seed=3)
    random = np.random.default_rng(0)
    for _ in range(12):
        np.testing.assert_array_equal(observations, np.stack([expected[name] for name in names]))
        actions = random.integers(5, size=3)
        observations, rewards, dones, infos = env.step(actions)
        expected, earned, _, _, _ = games.theirs.step(dict(zip(names, actions, strict=True)))
        np.testing.assert_array_equal(rewards, np.float32([earned[name] for name in names]))
        if dones.all():
            assert all(info["TimeLimit.truncated"] for info in infos)
            np.testing.assert_array_equal(infos[1]["terminal_observation"], expected[names[1]])
            expected, _ = games.theirs.reset()
    env.close()
