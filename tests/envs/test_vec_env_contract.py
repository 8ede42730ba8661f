"""What SB3 expects of vectorised environments, of every backend and of SB3's own."""

import itertools
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize

from tests.envs.backends import (
    ALL,
    ATARI,
    ATARI_ALE,
    ATARI_ENVPOOL,
    BATCHED,
    DIRECT,
    ENVPOOL,
    MUJOCO,
    RandomPolicy,
    needs_envpool,
)

every_backend = pytest.mark.parametrize("case", ALL)


@pytest.fixture
def make(case):
    """Environments of the case, closed at the end of the test."""
    made = []

    def make_and_remember(*args, **kwargs):
        made.append(case.envs(*args, **kwargs))
        return made[-1]

    yield make_and_remember
    for env in made:
        env.close()


def play(env: VecEnv, n_steps: int, seed: int = 0, reset: bool = True) -> list[tuple]:
    """Steps with random actions; the first element is (observations of reset, ...)."""
    policy = RandomPolicy(env, seed)
    steps = [(env.reset(), None, None, None)] if reset else []
    return steps + [env.step(policy.actions()) for _ in range(n_steps)]


def observations(steps: list[tuple]) -> np.ndarray:
    return np.stack([step[0] for step in steps])


@every_backend
def test_shapes_and_types_are_those_of_the_spaces(make):
    env = make(3)
    assert isinstance(env, VecEnv)
    space = env.observation_space
    first = env.reset()
    assert first.shape == (3, *space.shape)
    assert first.dtype == space.dtype
    for obs, rewards, dones, infos in play(env, 60, reset=False):
        assert obs.shape == (3, *space.shape)
        assert obs.dtype == space.dtype
        assert all(space.contains(one) for one in obs)
        assert (rewards.shape, rewards.dtype) == ((3,), np.float32)
        assert (dones.shape, dones.dtype) == ((3,), np.bool_)
        assert isinstance(infos, list)
        assert [type(info) for info in infos] == [dict] * 3
        for done, info in zip(dones, infos, strict=True):
            assert not info["TimeLimit.truncated"]
            assert ("terminal_observation" in info) == done
            if done:
                assert info["terminal_observation"].shape == space.shape
                assert info["terminal_observation"].dtype == space.dtype


@every_backend
def test_what_a_step_returns_is_never_overwritten(make):
    env = make(3)
    returned = play(env, 1)
    copies = deepcopy(returned)
    for _ in range(120):
        returned.append(env.step(RandomPolicy(env).actions()))
        copies.append(deepcopy(returned[-1]))
    for (obs, rewards, dones, infos), (obs_then, rewards_then, dones_then, infos_then) in zip(returned, copies, strict=True):
        np.testing.assert_array_equal(obs, obs_then)
        np.testing.assert_array_equal(rewards, rewards_then)
        np.testing.assert_array_equal(dones, dones_then)
        np.testing.assert_equal(infos, infos_then)


@pytest.mark.parametrize("case", MUJOCO)
def test_the_step_that_ends_an_episode_returns_the_first_observation_of_the_next(make):
    env = make(3)
    ends = 0
    steps = play(env, 150)
    for (obs, _, dones, infos), (following, *_) in itertools.pairwise(steps[1:]):
        for index in np.flatnonzero(dones):
            ends += 1
            # Hopper starts at height 1.25 and angle 0, give or take 5e-3, and ends below 0.7 or beyond 0.2.
            np.testing.assert_allclose(obs[index, :5], [1.25, 0, 0, 0, 0], atol=6e-3)
            height, angle = infos[index]["terminal_observation"][:2]
            assert height < 0.7 or abs(angle) > 0.2
            # A step later it is elsewhere, and not far: the step that followed was played, from there.
            assert 0 < np.abs(following[index, :5] - obs[index, :5]).max() < 0.2
    assert ends >= 5


@pytest.mark.parametrize("case", MUJOCO)
def test_a_terminated_episode_is_not_called_truncated(make):
    for _, _, dones, infos in play(make(3), 100)[1:]:
        assert not any(info["TimeLimit.truncated"] for info in infos)
        assert all(("episode" in info) == done for done, info in zip(dones, infos, strict=True))


@pytest.mark.parametrize("case", MUJOCO)
def test_the_time_limit_truncates(case):
    env = case.make("HalfCheetah-v5", 2)
    steps = play(env, 1001)
    env.close()
    for number, (_, _, dones, infos) in enumerate(steps[1:], start=1):
        assert list(dones) == [number == 1000] * 2
        assert [info["TimeLimit.truncated"] for info in infos] == [number == 1000] * 2
    ends = steps[1000][3]
    assert [info["episode"]["l"] for info in ends] == [1000, 1000]
    # HalfCheetah starts near rest and at 0; at the end it moves.
    assert np.abs(ends[0]["terminal_observation"]).max() > np.abs(steps[1000][0][0]).max()


@pytest.mark.parametrize("case", ATARI)
def test_the_frame_limit_truncates_a_game(case):
    env = case.make("Pong-v5", 2, env_kwargs={"max_frames": 160})
    steps = play(env, 90)
    env.close()
    lengths = [info["episode"]["l"] for _, _, _, infos in steps[1:] for info in infos if "episode" in info]
    truncated = [info["TimeLimit.truncated"] for _, _, dones, infos in steps[1:] for info in infos if "episode" in info]
    assert len(lengths) >= 4
    # ale-py and SB3's wrappers count the frames before the first action too.
    assert all(30 <= length <= 40 for length in lengths)
    assert all(truncated)


@every_backend
def test_one_seed_gives_one_run(make):
    first, second, third = make(3, seed=5), make(3), make(3, seed=6)
    second.seed(5)
    runs = [observations(play(env, 80)) for env in (first, second, third)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()


@every_backend
def test_seeding_again_starts_the_run_again(make):
    env = make(3)
    env.seed(5)
    before = observations(play(env, 80))
    play(env, 30, seed=9, reset=False)
    assert list(env.seed(5)) == [5, 6, 7]
    np.testing.assert_array_equal(observations(play(env, 80)), before)


@every_backend
def test_environments_of_a_batch_differ_and_so_do_episodes(make):
    env = make(3, seed=0)
    policy = RandomPolicy(env)
    actions = [np.repeat(policy.actions()[:1], 3, axis=0) for _ in range(60)]
    runs = []
    for _ in range(3):
        first = env.reset()
        runs.append(np.stack([first, *(env.step(action)[0] for action in actions)]))
    assert any((run[:, 0] != run[:, 1]).any() and (run[:, 1] != run[:, 2]).any() for run in runs)
    assert any((runs[0][:, index] != runs[1][:, index]).any() for index in range(3))


@every_backend
def test_runs_without_a_seed_differ(make):
    runs = [observations(play(make(2), 20)) for _ in range(3)]
    assert any((runs[0] != other).any() for other in runs[1:])


@every_backend
def test_environment_i_has_the_seed_plus_i(make, case):
    # Whichever the batch size: what an environment does depends on its own seed only.
    alone = make(1, seed=7)
    batch = make(3, seed=5)
    policy = RandomPolicy(batch)
    np.testing.assert_array_equal(alone.reset()[0], batch.reset()[2])
    for _ in range(60):
        actions = policy.actions()
        np.testing.assert_array_equal(alone.step(actions[2:])[0][0], batch.step(actions)[0][2])


@pytest.mark.parametrize("case", MUJOCO)
def test_episode_statistics_equal_those_counted_outside(make):
    env = make(3)
    returns, lengths, seen = np.zeros(3), np.zeros(3, int), 0
    last = np.zeros(3)
    for _, rewards, dones, infos in play(env, 200)[1:]:
        returns += rewards
        lengths += 1
        for index in np.flatnonzero(dones):
            seen += 1
            episode = infos[index]["episode"]
            assert set(episode) == {"r", "l", "t"}
            assert episode["r"] == pytest.approx(returns[index], abs=1e-3)
            assert episode["l"] == lengths[index]
            assert episode["t"] >= last[index]
            last[index] = episode["t"]
            returns[index] = lengths[index] = 0
    assert seen >= 5


@pytest.mark.parametrize("case", ATARI)
def test_a_lost_life_ends_the_learners_episode_and_only_game_over_the_game(make):
    env = make(2)
    lives_lost, games = 0, 0
    for _, _, dones, infos in play(env, 400)[1:]:
        for index in np.flatnonzero(dones):
            if "episode" in infos[index]:
                games += 1
            else:
                lives_lost += 1
    assert games >= 2
    # Breakout has five lives; two games may be unfinished.
    assert 4 * games <= lives_lost <= 4 * games + 8


@pytest.mark.parametrize("case", ATARI)
def test_without_episodic_life_only_game_over_is_done(make):
    env = make(2, env_kwargs={"episodic_life": False})
    ends = [info for _, _, dones, infos in play(env, 400)[1:] for done, info in zip(dones, infos, strict=True) if done]
    assert len(ends) >= 2
    assert all("episode" in info for info in ends)


@pytest.mark.parametrize("case", ATARI)
def test_the_score_is_the_games_although_rewards_are_clipped(case):
    learner = case.make("SpaceInvaders-v5", 2, seed=1)
    scores = case.make("SpaceInvaders-v5", 2, seed=1, env_kwargs={"clip_reward": False})
    counted, played = np.zeros(2), np.zeros(2, int)
    policy = RandomPolicy(learner)
    learner.reset(), scores.reset()
    ends = 0
    for _ in range(700):
        actions = policy.actions()
        obs, rewards, dones, infos = learner.step(actions)
        same_obs, raw, same_dones, _ = scores.step(actions)
        np.testing.assert_array_equal(obs, same_obs)
        np.testing.assert_array_equal(dones, same_dones)
        np.testing.assert_array_equal(rewards, np.sign(raw))
        counted += raw
        played += 1
        for index in np.flatnonzero(dones):
            if "episode" in infos[index]:
                ends += 1
                assert infos[index]["episode"]["r"] == counted[index]
                # SB3's Monitor is below its wrappers, and counts the steps that these play after a lost life.
                assert 0 <= infos[index]["episode"]["l"] - played[index] <= (10 if case.name == "gymnasium" else 0)
                counted[index] = played[index] = 0
    learner.close(), scores.close()
    assert ends >= 2


@pytest.mark.parametrize("case", ATARI)
def test_observations_are_four_stacked_pictures_newest_last(make):
    env = make(2)
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    steps = play(env, 20)
    for (before, *_), (after, _, dones, _) in itertools.pairwise(steps[4:]):
        if not dones.any():
            np.testing.assert_array_equal(after[:, :-1], before[:, 1:])


@every_backend
def test_the_monitor_file_holds_every_episode(make, tmp_path):
    env = make(2, monitor_dir=str(tmp_path))
    steps = play(env, 400 if env.observation_space.dtype == np.uint8 else 100)
    env.close()
    episodes = [info["episode"] for step in steps[1:] for info in step[3] if "episode" in info]
    assert len(episodes) >= 2
    results = load_results(str(tmp_path))
    assert sorted(results["r"]) == pytest.approx(sorted(episode["r"] for episode in episodes))
    assert sorted(results["l"]) == sorted(episode["l"] for episode in episodes)
    assert list(tmp_path.glob("0.monitor.csv"))


@every_backend
def test_evaluate_policy_reads_the_true_episodes(make):
    env = make(2)
    # The repository's tests make errors of warnings, and this warns where SB3 sees no Monitor.
    returns, lengths = evaluate_policy(RandomPolicy(env), env, n_eval_episodes=2, return_episode_rewards=True)
    assert len(returns) == len(lengths) == 2
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(gym.wrappers.RescaleAction) == [False, False]
    if env.observation_space.dtype == np.uint8:
        assert min(lengths) > 80, "a game of Breakout has five lives"


@pytest.mark.parametrize("case", MUJOCO)
def test_normalisation_works_on_top_and_its_statistics_can_be_saved(make, tmp_path):
    env = VecNormalize(make(3))
    play(env, 50)
    env.save(str(tmp_path / "vecnormalize.pkl"))
    loaded = VecNormalize.load(str(tmp_path / "vecnormalize.pkl"), make(3))
    np.testing.assert_array_equal(loaded.obs_rms.mean, env.obs_rms.mean)
    terminal = [info for step in play(env, 100)[1:] for info in step[3] if "terminal_observation" in info]
    assert terminal
    assert all(np.abs(info["terminal_observation"]).max() <= 10.0 for info in terminal)


@pytest.mark.parametrize("case", BATCHED)
@pytest.mark.filterwarnings("ignore:The environment is already wrapped with a `Monitor` wrapper:UserWarning")
def test_vec_monitor_works_on_top(make):
    env = VecMonitor(make(2, env_kwargs=None))
    assert any("episode" in info for step in play(env, 150)[1:] for info in step[3])


@every_backend
def test_frame_stacks_work_on_top(make):
    env = make(2)
    n_channels = env.observation_space.shape[0]
    stacked = VecFrameStack(env, 2)
    assert stacked.reset().shape[1] == 2 * n_channels
    play(stacked, 40, reset=False)


@every_backend
def test_ppo_trains_and_its_model_is_loaded_with_environments_of_another_number(make, tmp_path):
    env = make(2)
    atari = env.observation_space.dtype == np.uint8
    small = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 0, "device": "cpu"}
    PPO("CnnPolicy" if atari else "MlpPolicy", env, **small).learn(32).save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", env=make(1), device="cpu").learn(16).num_timesteps == 16


@every_backend
def test_attributes_that_sb3_asks_for_are_there(make, case):
    env = make(3)
    assert env.get_attr("render_mode") == [env.render_mode] * 3
    assert [space == env.action_space for space in env.get_attr("action_space")] == [True] * 3
    assert len(env.get_attr("spec", indices=[0, 2])) == len(env.get_attr("spec", indices=1)) + 1 == 2
    assert env.has_attr("observation_space")
    assert not env.has_attr("no_such_attribute")


@every_backend
def test_closing_twice_is_harmless(make):
    env = make(2)
    env.reset()
    env.close()
    assert env.close() is None


@pytest.mark.parametrize("case", BATCHED)
def test_what_needs_single_environments_is_refused_with_the_way_out(make, case):
    env = make(2)
    for refused in (
        lambda: env.get_attr("sim"),
        lambda: env.set_attr("sim", 1),
        lambda: env.env_method("look"),
        lambda: env.render(),
        lambda: env.set_options({"low": 1}),
    ):
        with pytest.raises(NotImplementedError, match=f"backend '{case.name}'|backend='gymnasium'"):
            refused()


@pytest.mark.parametrize("case", BATCHED)
def test_steps_out_of_order_are_refused(make):
    env = make(2)
    with pytest.raises(RuntimeError, match=r"call reset\(\) before the first step"):
        env.step(RandomPolicy(env).actions())
    env.reset()
    with pytest.raises(RuntimeError, match=r"step_async\(\) before step_wait\(\)"):
        env.step_wait()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


@pytest.mark.parametrize("case", BATCHED)
def test_actions_that_are_none_are_refused(make):
    env = make(2)
    env.reset()
    with pytest.raises(ValueError, match="of shape .* are not allowed"):
        env.step(RandomPolicy(env).actions()[:1])
    if isinstance(env.action_space, gym.spaces.Discrete):
        for wrong in (-1, env.action_space.n):
            with pytest.raises(ValueError, match=r"are not in Discrete"):
                env.step(np.array([0, wrong]))


@pytest.mark.parametrize("case", [ENVPOOL, ATARI_ENVPOOL, ATARI_ALE])
def test_threads_change_nothing(make):
    runs = [play(make(9, seed=3, num_threads=threads), 60) for threads in (1, 2)]
    np.testing.assert_array_equal(observations(runs[0]), observations(runs[1]))
    for one, other in zip(runs[0][1:], runs[1][1:], strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])
    assert any(step[2].sum() > 1 for step in runs[0][1:]), "several ended together"


def same_step(step, first, actions):
    """Play one environment that restarts in the step after the end, as if it restarted in the same step.

    :param step: action -> (observation, ended); in the step after an end it ignores the action
    :return: pairs (observation returned, terminal observation or None)
    """
    played = [(first, None)]
    for action in actions:
        obs, ended = step(action)
        played.append((step(action)[0], obs) if ended else (obs, None))
    return played


def assert_equals(env: VecEnv, played, actions) -> None:
    np.testing.assert_array_equal(env.reset()[0], played[0][0])
    for action, (obs, terminal) in zip(actions, played[1:], strict=True):
        returned, _, dones, infos = env.step(np.array([action]))
        np.testing.assert_array_equal(returned[0], obs)
        if terminal is not None:
            assert dones[0]
            np.testing.assert_array_equal(infos[0]["terminal_observation"], terminal)


@needs_envpool
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Breakout-v5"])
def test_envpool_plays_what_the_bare_pool_plays(env_id):
    import envpool

    settings = {"episodic_life": True, "reward_clip": True} if env_id == "Breakout-v5" else {}
    pool = envpool.make_gymnasium(env_id, num_envs=1, seed=[4], **settings)

    def step(action):
        obs, _, terminated, truncated, _ = pool.step(np.array([action]))
        return obs[0].copy(), bool(terminated[0] or truncated[0])

    env = ENVPOOL.values[0].make(env_id, 1, seed=4)
    policy = RandomPolicy(env)
    actions = [policy.actions()[0] for _ in range(400)]
    played = same_step(step, pool.reset()[0][0].copy(), actions)
    assert sum(terminal is not None for _, terminal in played) >= 5
    assert_equals(env, played, actions)
    env.close()


@pytest.mark.parametrize("case", [ATARI_ALE])
def test_ale_plays_what_the_bare_games_play(make, case):
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    games = AtariVectorEnv("breakout", 1, autoreset_mode=AutoresetMode.NEXT_STEP)

    def step(action):
        obs, _, terminated, truncated, _ = games.step(np.array([action]))
        return obs[0].copy(), bool(terminated[0] or truncated[0])

    env = make(1, seed=4)
    policy = RandomPolicy(env)
    actions = [policy.actions()[0] for _ in range(600)]
    played = same_step(step, games.reset(seed=4)[0][0].copy(), actions)
    assert sum(terminal is not None for _, terminal in played) >= 2
    assert_equals(env, played, actions)


@needs_envpool
@pytest.mark.parametrize("case", [DIRECT])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "HalfCheetah-v5", "Hopper-v4", "Walker2d-v5", "Swimmer-v4"])
def test_a_step_of_envpool_is_a_step_of_gymnasium(case, env_id):
    """The dynamics do not depend on the place, the only part of the state that observations lack."""
    pool = ENVPOOL.values[0].make(env_id, 4, seed=0)
    env = gym.make(env_id).unwrapped
    env.reset(seed=0)
    hidden = env.model.nq + env.model.nv - pool.observation_space.shape[0]
    policy = RandomPolicy(pool)
    before = pool.reset()
    for _ in range(30):
        # Small actions keep velocities below 10, where Hopper and Walker2d clip their observations.
        actions = 0.1 * policy.actions()
        after, rewards, dones, _ = pool.step(actions)
        for index in np.flatnonzero(~dones):
            state = np.concatenate([np.zeros(hidden), before[index]])
            env.set_state(state[: env.model.nq], state[env.model.nq :])
            obs, reward, *_ = env.step(actions[index])
            np.testing.assert_allclose(obs, after[index], atol=1e-4)
            assert reward == pytest.approx(rewards[index], abs=1e-4)
        before = after
    pool.close()


@needs_envpool
@pytest.mark.parametrize("name", ["Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d"])
@pytest.mark.parametrize("version", ["v4", "v5"])
@pytest.mark.parametrize("case", [DIRECT])
def test_envpools_spaces_are_gymnasiums(case, name, version):
    pool = ENVPOOL.values[0].make(f"{name}-{version}", 1)
    env = gym.make(f"{name}-{version}")
    assert pool.observation_space == env.observation_space
    assert pool.observation_space.dtype == env.observation_space.dtype
    assert pool.action_space == env.action_space
    assert pool.action_space.dtype == env.action_space.dtype
