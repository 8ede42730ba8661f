"""SB3's contract for vectorized environments, for every backend and for SB3's own class."""

import itertools
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize

from tests.envs.backends import ALL, ATARI, ATARI_ALE, BATCHED, ENVPOOL, MUJOCO, RandomPolicy, needs_envpool

every_backend = pytest.mark.parametrize("case", ALL)
mujoco_backends = pytest.mark.parametrize("case", MUJOCO)
atari_backends = pytest.mark.parametrize("case", ATARI)
batched_backends = pytest.mark.parametrize("case", BATCHED)


@pytest.fixture
def make(case):
    """Make environments of the case, which are closed at the end of the test."""
    made = []

    def make_and_remember(n_envs: int = 3, env_id: str = case.env_id, **kwargs) -> VecEnv:
        made.append(case.make(env_id, n_envs, **kwargs))
        return made[-1]

    yield make_and_remember
    for env in made:
        env.close()


def play(env: VecEnv, n_steps: int, seed: int = 0, reset: bool = True) -> list[tuple]:
    """Step with random actions; the first element is (observations of reset, ...)."""
    policy = RandomPolicy(env, seed)
    steps = [(env.reset(), None, None, None)] if reset else []
    return steps + [env.step(policy.actions()) for _ in range(n_steps)]


def observations(steps: list[tuple]) -> np.ndarray:
    return np.stack([step[0] for step in steps])


@every_backend
def test_steps_return_new_values_of_the_right_shapes_and_types(make):
    env = make()
    space, policy = env.observation_space, RandomPolicy(env)
    first = env.reset()
    assert (first.shape, first.dtype) == ((3, *space.shape), space.dtype)
    returned, copies = [], []
    for _ in range(120):
        returned.append(env.step(policy.actions()))
        copies.append(deepcopy(returned[-1]))
        obs, rewards, dones, infos = returned[-1]
        assert (obs.shape, obs.dtype) == ((3, *space.shape), space.dtype)
        assert all(space.contains(row) for row in obs)
        assert (rewards.shape, rewards.dtype, dones.shape, dones.dtype) == ((3,), np.float32, (3,), np.bool_)
        assert [type(info) for info in infos] == [dict] * 3
        for done, info in zip(dones, infos, strict=True):
            assert not info["TimeLimit.truncated"]
            assert ("terminal_observation" in info) == done
            if done:
                terminal = info["terminal_observation"]
                assert (terminal.shape, terminal.dtype) == (space.shape, space.dtype)
    np.testing.assert_equal(returned, copies)  # nothing was overwritten by later steps


@mujoco_backends
def test_an_episode_ends_and_the_next_one_starts_in_the_same_step(make):
    returns, lengths, last_time, ends = np.zeros(3), np.zeros(3, int), np.zeros(3), 0
    for (obs, rewards, dones, infos), (following, *_) in itertools.pairwise(play(make(), 200)[1:]):
        returns += rewards
        lengths += 1
        for index, (done, info) in enumerate(zip(dones, infos, strict=True)):
            assert ("episode" in info) == done
            assert not info["TimeLimit.truncated"]
            if not done:
                continue
            ends += 1
            # Hopper starts at height 1.25 and angle 0, give or take 5e-3, and ends below 0.7 or beyond 0.2.
            np.testing.assert_allclose(obs[index, :5], [1.25, 0, 0, 0, 0], atol=6e-3)
            height, angle = info["terminal_observation"][:2]
            assert height < 0.7 or abs(angle) > 0.2
            # After the next step it is elsewhere, but near: that step was played, from there.
            assert 0 < np.abs(following[index, :5] - obs[index, :5]).max() < 0.2
            episode = info["episode"]
            assert set(episode) == {"r", "l", "t"}
            assert (episode["r"], episode["l"]) == (pytest.approx(returns[index], abs=1e-3), lengths[index])
            assert episode["t"] >= last_time[index]
            last_time[index], returns[index], lengths[index] = episode["t"], 0, 0
    assert ends >= 5


@mujoco_backends
def test_the_time_limit_truncates(make):
    steps = play(make(2, "HalfCheetah-v5"), 1001)
    for number, (_, _, dones, infos) in enumerate(steps[1:], start=1):
        assert list(dones) == [info["TimeLimit.truncated"] for info in infos] == [number == 1000] * 2
    ends = steps[1000][3]
    assert [info["episode"]["l"] for info in ends] == [1000, 1000]
    # HalfCheetah starts near rest; at the end it moves.
    assert np.abs(ends[0]["terminal_observation"]).max() > np.abs(steps[1000][0][0]).max()


@atari_backends
def test_the_frame_limit_truncates_a_game(make):
    steps = play(make(2, "Pong-v5", env_kwargs={"max_frames": 160}), 90)
    ends = [info for step in steps[1:] for info in step[3] if "episode" in info]
    assert len(ends) >= 4
    # ale-py and SB3's wrappers count the frames before the first action too.
    assert all(30 <= info["episode"]["l"] <= 40 for info in ends)
    assert all(info["TimeLimit.truncated"] for info in ends)


@every_backend
def test_seeds_decide_the_run(make):
    first, second, other = make(seed=5), make(), make(seed=6)
    assert list(second.seed(5)) == [5, 6, 7]
    expected = observations(play(first, 60))
    np.testing.assert_array_equal(observations(play(second, 60)), expected)
    assert (observations(play(other, 60)) != expected).any()
    play(second, 30, seed=9, reset=False)
    second.seed(5)
    np.testing.assert_array_equal(observations(play(second, 60)), expected)
    unseeded = [observations(play(make(2), 20)) for _ in range(3)]
    assert any((unseeded[0] != run).any() for run in unseeded[1:])


@every_backend
def test_environments_of_a_batch_differ_and_so_do_episodes(make):
    env = make(seed=0)
    policy = RandomPolicy(env)
    actions = [np.repeat(policy.actions()[:1], 3, axis=0) for _ in range(60)]
    runs = [np.stack([env.reset(), *(env.step(action)[0] for action in actions)]) for _ in range(3)]
    assert any((run[:, 0] != run[:, 1]).any() and (run[:, 1] != run[:, 2]).any() for run in runs)
    assert any((runs[0][:, index] != runs[1][:, index]).any() for index in range(3))


@every_backend
def test_environment_i_has_the_seed_plus_i_for_any_batch_size(make):
    alone, batch = make(1, seed=7), make(3, seed=5)
    policy = RandomPolicy(batch)
    np.testing.assert_array_equal(alone.reset()[0], batch.reset()[2])
    for _ in range(60):
        actions = policy.actions()
        np.testing.assert_array_equal(alone.step(actions[2:])[0][0], batch.step(actions)[0][2])


@atari_backends
@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_lost_life_ends_the_learners_episode_and_only_game_over_the_game(make, episodic_life):
    steps = play(make(2, env_kwargs={"episodic_life": episodic_life}), 400)[1:]
    ends = ["episode" in info for _, _, dones, infos in steps for done, info in zip(dones, infos, strict=True) if done]
    games, lives_lost = ends.count(True), ends.count(False)
    assert games >= 2
    # Breakout has five lives; two games may be unfinished.
    assert 4 * games <= lives_lost <= 4 * games + 8 if episodic_life else lives_lost == 0


@atari_backends
def test_the_score_is_the_games_although_rewards_are_clipped(make, case):
    learner = make(2, "SpaceInvaders-v5", seed=1)
    scores = make(2, "SpaceInvaders-v5", seed=1, env_kwargs={"clip_reward": False})
    counted, played, ends = np.zeros(2), np.zeros(2, int), 0
    for clipped, unclipped in zip(play(learner, 600)[1:], play(scores, 600)[1:], strict=True):
        for index in (0, 2):
            np.testing.assert_array_equal(clipped[index], unclipped[index])
        np.testing.assert_array_equal(clipped[1], np.sign(unclipped[1]))
        counted += unclipped[1]
        played += 1
        for index, info in enumerate(clipped[3]):
            if "episode" in info:
                ends += 1
                assert info["episode"]["r"] == counted[index]
                # SB3's Monitor is below its wrappers, and counts the steps that these play after a lost life.
                assert 0 <= info["episode"]["l"] - played[index] <= (10 if case.name == "gymnasium" else 0)
                counted[index] = played[index] = 0
    assert ends >= 2


@atari_backends
def test_observations_are_four_stacked_images_newest_last(make):
    env = make(2)
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    for (before, *_), (after, _, dones, _) in itertools.pairwise(play(env, 20)[4:]):
        if not dones.any():
            np.testing.assert_array_equal(after[:, :-1], before[:, 1:])


@every_backend
def test_the_monitor_file_holds_every_episode(make, case, tmp_path):
    env = make(2, monitor_dir=str(tmp_path))
    steps = play(env, 400 if case.atari else 100)
    env.close()
    assert env.close() is None  # a second call does nothing
    episodes = [info["episode"] for step in steps[1:] for info in step[3] if "episode" in info]
    assert len(episodes) >= 2
    results = load_results(str(tmp_path))
    assert sorted(results["r"]) == pytest.approx(sorted(episode["r"] for episode in episodes))
    assert sorted(results["l"]) == sorted(episode["l"] for episode in episodes)
    assert (tmp_path / "0.monitor.csv").exists()


@every_backend
def test_evaluate_policy_reads_the_true_episodes(make, case):
    env = make(2)
    # Warnings are errors here, and evaluate_policy warns if it finds no Monitor.
    returns, lengths = evaluate_policy(RandomPolicy(env), env, n_eval_episodes=2, return_episode_rewards=True)
    assert len(returns) == len(lengths) == 2
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(gym.wrappers.RescaleAction) == [False, False]
    if case.atari:
        assert min(lengths) > 80, "a game of Breakout has five lives"


@mujoco_backends
def test_normalization_works_on_top_and_its_statistics_can_be_saved(make, tmp_path):
    env = VecNormalize(make())
    terminal = [info["terminal_observation"] for step in play(env, 100)[1:] for info in step[3] if "episode" in info]
    assert terminal
    assert np.abs(terminal).max() <= 10.0
    env.save(str(tmp_path / "vecnormalize.pkl"))
    loaded = VecNormalize.load(str(tmp_path / "vecnormalize.pkl"), make())
    np.testing.assert_array_equal(loaded.obs_rms.mean, env.obs_rms.mean)


@every_backend
@pytest.mark.filterwarnings("ignore:The environment is already wrapped with a `Monitor` wrapper:UserWarning")
def test_wrappers_of_sb3_work_on_top(make):
    env = make(2)
    stacked = VecFrameStack(VecMonitor(env), 2)
    assert stacked.reset().shape[1] == 2 * env.observation_space.shape[0]
    assert any("episode" in info for step in play(stacked, 150, reset=False) for info in step[3])


@every_backend
def test_ppo_trains_and_its_model_loads_with_another_number_of_environments(make, case, tmp_path):
    small = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 0, "device": "cpu"}
    PPO("CnnPolicy" if case.atari else "MlpPolicy", make(2), **small).learn(32).save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", env=make(1), device="cpu").learn(16).num_timesteps == 16


@every_backend
def test_attributes_that_sb3_reads_are_available(make):
    env = make()
    assert env.get_attr("render_mode") == [env.render_mode] * 3
    assert [space == env.action_space for space in env.get_attr("action_space")] == [True] * 3
    assert (len(env.get_attr("spec", indices=[0, 2])), len(env.get_attr("spec", indices=1))) == (2, 1)
    assert env.has_attr("observation_space")
    assert not env.has_attr("no_such_attribute")


@batched_backends
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("get_attr", ["sim"]),
        ("set_attr", ["sim", 1]),
        ("env_method", ["look"]),
        ("render", []),
        ("set_options", [{"low": 1}]),
    ],
)
def test_methods_that_need_single_environments_raise(make, case, method, arguments):
    with pytest.raises(NotImplementedError, match=f"backend '{case.name}' cannot .*; backend='gymnasium' can"):
        getattr(make(2), method)(*arguments)


@batched_backends
def test_steps_out_of_order_and_invalid_actions_raise(make):
    env = make(2)
    actions = RandomPolicy(env).actions()
    with pytest.raises(RuntimeError, match=r"call reset\(\) before the first step"):
        env.step(actions)
    env.reset()
    with pytest.raises(RuntimeError, match=r"step_async\(\) before step_wait\(\)"):
        env.step_wait()
    with pytest.raises(ValueError, match="of shape .* are not allowed"):
        env.step(actions[:1])
    for wrong in (-1, env.action_space.n) if isinstance(env.action_space, gym.spaces.Discrete) else ():
        with pytest.raises(ValueError, match=r"are not in Discrete"):
            env.step(np.array([0, wrong]))
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


@batched_backends
def test_threads_change_nothing(make):
    runs = [play(make(6, seed=3, num_threads=threads), 50) for threads in (1, 2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_equal(first[:3], second[:3])
    assert any(step[2].sum() > 1 for step in runs[0][1:]), "several ended together"


def require_equal_to_bare(env: VecEnv, step, first: np.ndarray, n_steps: int, least_ends: int) -> None:
    """Compare one environment with the bare library, which restarts in the step after the end of an episode.

    :param step: function of the actions that returns observation and whether the episode ended; the next call then restarts
    :param first: observation of the library's reset
    """
    policy, ends = RandomPolicy(env), 0
    np.testing.assert_array_equal(env.reset()[0], first)
    for _ in range(n_steps):
        actions = policy.actions()
        returned, _, dones, infos = env.step(actions)
        expected, ended = step(actions)
        assert dones[0] or not ended  # also at a lost life, which changes nothing
        if ended:
            ends += 1
            np.testing.assert_array_equal(infos[0]["terminal_observation"], expected)
            expected, _ = step(actions)
        np.testing.assert_array_equal(returned[0], expected)
    assert ends >= least_ends


@needs_envpool
@pytest.mark.parametrize("case", [ENVPOOL])
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Breakout-v5"])
def test_envpool_equals_the_bare_pool(make, env_id):
    import envpool

    settings = {"episodic_life": True, "reward_clip": True} if env_id == "Breakout-v5" else {}
    pool = envpool.make_gymnasium(env_id, num_envs=1, seed=[4], **settings)

    def step(actions):
        obs, _, terminated, truncated, _ = pool.step(actions)
        return obs[0].copy(), bool(terminated[0] or truncated[0])

    require_equal_to_bare(make(1, env_id, seed=4), step, pool.reset()[0][0].copy(), 400, least_ends=5)


@pytest.mark.parametrize("case", [ATARI_ALE])
def test_ale_equals_the_bare_games(make):
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    games = AtariVectorEnv("breakout", 1, autoreset_mode=AutoresetMode.NEXT_STEP)

    def step(actions):
        obs, _, terminated, truncated, _ = games.step(actions)
        return obs[0].copy(), bool(terminated[0] or truncated[0])

    require_equal_to_bare(make(1, seed=4), step, games.reset(seed=4)[0][0].copy(), 600, least_ends=2)


@pytest.mark.parametrize("case", [ENVPOOL])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "HalfCheetah-v5", "Hopper-v4", "Walker2d-v5", "Swimmer-v4"])
def test_a_step_of_envpool_is_a_step_of_gymnasium(make, env_id):
    """The dynamics do not depend on the position, the only part of the state that observations lack."""
    pool, env = make(4, env_id, seed=0), gym.make(env_id).unwrapped
    env.reset(seed=0)
    hidden = env.model.nq + env.model.nv - pool.observation_space.shape[0]
    policy, before = RandomPolicy(pool), pool.reset()
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


@pytest.mark.parametrize("case", [ENVPOOL])
@pytest.mark.parametrize("name", ["Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d"])
@pytest.mark.parametrize("version", ["v4", "v5"])
def test_envpools_spaces_are_gymnasiums(make, name, version):
    pool, env = make(1, f"{name}-{version}"), gym.make(f"{name}-{version}")
    for ours, theirs in ((pool.observation_space, env.observation_space), (pool.action_space, env.action_space)):
        assert ours == theirs
        assert ours.dtype == theirs.dtype
