"""SB3's contract for vectorized environments, for every backend and for SB3's own class."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from tests.envs.backends import ATARI, BATCHED, ENVPOOL, MUJOCO, RandomPolicy, cases, needs_all

pytestmark = needs_all
every_backend, mujoco_backends, atari_backends, batched_backends = map(cases, (MUJOCO | ATARI, MUJOCO, ATARI, BATCHED))

#: Of the infos of a batch.
KEYS = {"TimeLimit.truncated", "terminal_observation", "episode"}


@pytest.fixture
def make(case):
    """Make environments of the case, which are closed at the end of the test."""
    envs = []
    yield lambda n_envs=3, env_id=case.env_id, **kwargs: envs.append(case.make(env_id, n_envs, **kwargs)) or envs[-1]
    for env in envs:
        env.close()


def play(env: VecEnv, n_steps: int) -> list[tuple]:
    """Reset, and step with random actions."""
    policy = RandomPolicy(env)
    env.reset()
    return [env.step(policy.actions()) for _ in range(n_steps)]


@every_backend
def test_steps_return_new_values_of_the_right_shapes_and_types(make, case):
    env = make()
    space, policy = env.observation_space, RandomPolicy(env)
    if case.atari:
        assert space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    # Those of processes are not rounded, as SubprocVecEnv's.
    reward_type = np.float64 if case.name == "process" else np.float32
    obs = env.reset()
    assert (obs.shape, obs.dtype) == ((3, *space.shape), space.dtype)
    returned, copies = [], []
    for step in range(120):
        before = obs
        returned.append(env.step(policy.actions()))
        copies.append(deepcopy(returned[-1]))
        obs, rewards, dones, infos = returned[-1]
        assert (obs.shape, obs.dtype) == ((3, *space.shape), space.dtype)
        assert all(space.contains(row) for row in obs)
        assert (rewards.shape, rewards.dtype, dones.shape, dones.dtype) == ((3,), reward_type, (3,), np.bool_)
        assert [type(info) for info in infos] == [dict] * 3
        for done, info in zip(dones, infos, strict=True):
            assert not info["TimeLimit.truncated"]
            assert set(info) <= KEYS or case.name not in ("envpool", "ale")
            assert ("terminal_observation" in info) == done
            if done:
                terminal = info["terminal_observation"]
                assert (terminal.shape, terminal.dtype) == (space.shape, space.dtype)
        if case.atari and step > 3 and not dones.any():  # four stacked images, the newest last
            np.testing.assert_array_equal(obs[:, :-1], before[:, 1:])
    np.testing.assert_equal(returned, copies)  # nothing was overwritten by later steps
    # What SB3 reads of environments.
    assert getattr(env, "backend", "dummy") == case.name
    assert env.get_attr("render_mode") == [env.render_mode] * 3
    assert [space == env.action_space for space in env.get_attr("action_space")] == [True] * 3
    assert (len(env.get_attr("spec", indices=[0, 2])), len(env.get_attr("spec", indices=1))) == (2, 1)
    assert (env.has_attr("observation_space"), env.has_attr("no_such_attribute")) == (True, False)


@every_backend
def test_algorithms_wrappers_and_evaluations_of_sb3_work_on_top(make, case):
    policy = "CnnPolicy" if case.atari else "MlpPolicy"
    # Warnings are errors here, and it warns if its environment is of another type.
    evaluation = EvalCallback(make(1), n_eval_episodes=1, eval_freq=10**6)
    PPO(policy, make(2), n_steps=2, batch_size=4, n_epochs=1).learn(4, callback=evaluation)
    env = VecFrameStack(VecNormalize(make(2), norm_obs=not case.atari), 2)
    model = PPO(policy, env, n_steps=64, batch_size=128, n_epochs=1).learn(128)  # episodes end
    size, *image = make(1).observation_space.shape
    assert model.rollout_buffer.obs_shape == (2 * size, *image)
    assert env.venv.ret_rms.count == pytest.approx(128, abs=0.01)


@mujoco_backends
def test_the_time_limit_truncates(make):
    steps = play(make(2, "HalfCheetah-v5"), 1001)
    for number, (_, _, dones, infos) in enumerate(steps, start=1):
        assert list(dones) == [info["TimeLimit.truncated"] for info in infos] == [number == 1000] * 2
    observations, _, _, ends = steps[999]
    assert [info["episode"]["l"] for info in ends] == [1000, 1000]
    # HalfCheetah starts near rest; at the end it moves.
    assert np.abs(ends[0]["terminal_observation"]).max() > np.abs(observations[0]).max()


@pytest.mark.slow
@every_backend
def test_environment_i_plays_by_the_seed_plus_i(make, case):
    env_id = "SpaceInvaders-v5" if case.atari else case.env_id  # where every frame differs
    first, second, alone, other = (make(n, env_id, seed=seed) for n, seed in ((3, 5), (3, None), (1, 7), (3, 6)))
    policy = RandomPolicy(first)
    actions = [np.repeat(policy.actions()[:1], 3, axis=0) for _ in range(20)]  # the same in all environments

    def run(env: VecEnv) -> np.ndarray:
        return np.stack([env.reset(), *(env.step(action[: env.num_envs])[0] for action in actions)])

    assert list(second.seed(5)) == [5, 6, 7]
    expected = run(first)
    np.testing.assert_array_equal(run(second), expected)
    np.testing.assert_array_equal(run(alone)[:, 0], expected[:, 2])
    for different in (run(other), run(second), np.roll(expected, 1, axis=1)):  # the next episodes, the neighbors
        assert (different != expected).any()
    second.seed(5)
    np.testing.assert_array_equal(run(second), expected)
    unseeded = [run(make(2, env_id)) for _ in range(3)]
    assert any((unseeded[0] != others).any() for others in unseeded[1:])


@atari_backends
@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_lost_life_ends_the_learners_episode_and_only_game_over_or_the_frame_limit_the_game(make, episodic_life):
    steps = play(make(2, env_kwargs={"episodic_life": episodic_life}), 400)
    ends = ["episode" in info for _, _, dones, infos in steps for done, info in zip(dones, infos, strict=True) if done]
    games, lives_lost = ends.count(True), ends.count(False)
    assert games >= 2
    # Breakout has five lives; two games may be unfinished.
    assert 4 * games <= lives_lost <= 4 * games + 8 if episodic_life else lives_lost == 0
    steps = play(make(2, "Pong-v5", env_kwargs={"max_frames": 160, "episodic_life": episodic_life}), 90)
    ends = [info for step in steps for info in step[3] if "episode" in info]
    assert len(ends) >= 4
    # ale-py and SB3's wrappers count the frames before the first action too.
    assert all(30 <= info["episode"]["l"] <= 40 and info["TimeLimit.truncated"] for info in ends)


@pytest.mark.slow
@atari_backends
def test_the_score_is_the_games_although_rewards_are_clipped(make, case):
    learner = make(2, "SpaceInvaders-v5", seed=1)
    scores = make(2, "SpaceInvaders-v5", seed=1, env_kwargs={"clip_reward": False})
    counted, played, ends = np.zeros(2), np.zeros(2, int), 0
    for clipped, unclipped in zip(play(learner, 600), play(scores, 600), strict=True):
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


@every_backend
def test_evaluate_policy_and_the_monitor_file_have_the_true_episodes(make, case, tmp_path):
    env = make(2, monitor_dir=str(tmp_path))
    # Warnings are errors here, and evaluate_policy warns if it finds no Monitor.
    returns, lengths = evaluate_policy(RandomPolicy(env), env, n_eval_episodes=2, return_episode_rewards=True)
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(gym.wrappers.RescaleAction) == [False, False]
    assert min(lengths) > 80 or not case.atari, "a game of Breakout has five lives"
    steps = play(env, 400 if case.atari else 100)
    env.close()
    assert env.close() is None  # a second call does nothing
    episodes = [info["episode"] for step in steps for info in step[3] if "episode" in info]
    assert len(episodes) >= 2
    results = load_results(str(tmp_path))
    written = list(zip(results["l"], results["r"].round(3), strict=True))
    assert sorted(written[-len(episodes) :]) == sorted((episode["l"], round(episode["r"], 3)) for episode in episodes)
    assert {*zip(lengths, np.round(returns, 3), strict=True)} <= {*written}
    assert (tmp_path / "0.monitor.csv").exists()


@batched_backends
def test_steps_out_of_order_invalid_actions_and_methods_of_single_environments_raise(make, case):
    env = make(2)
    actions = RandomPolicy(env).actions()
    with pytest.raises(RuntimeError, match=r"call reset\(\) before the first step"):
        env.step(actions)
    env.reset()
    with pytest.raises(RuntimeError, match=r"step_async\(\) before step_wait\(\)"):
        env.step_wait()
    with pytest.raises(ValueError, match="of shape .* are not allowed"):
        env.step(actions[:1])
    for wrong in (-1, env.action_space.n) if case.atari else ():
        with pytest.raises(ValueError, match=r"are not in Discrete"):
            env.step(np.array([0, wrong]))
    calls = {"get_attr": ["sim"], "set_attr": ["sim", 1], "env_method": ["look"], "render": [], "set_options": [{"low": 1}]}
    for method, arguments in [*calls.items(), ("set_options", [[{}, {"low": 1}]])]:
        with pytest.raises(NotImplementedError, match=f"backend '{case.name}' cannot .*; backend='gymnasium' can"):
            getattr(env, method)(*arguments)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


@pytest.mark.slow
@batched_backends
def test_threads_change_nothing(make):
    runs = [play(make(6, seed=3, num_threads=threads), 50) for threads in (1, 2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_equal(first[:3], second[:3])
    assert any(step[2].sum() > 1 for step in runs[0]), "several ended together"


def bare_library(case, seed: int):
    """Make one environment of the bare library, which restarts in the step after the end of an episode.

    :return: first observation; function of the actions that returns observation, reward, and whether the episode has ended
    """
    if case.name == "ale":
        from ale_py.vector_env import AtariVectorEnv

        library = AtariVectorEnv("breakout", 1, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    else:
        import envpool

        settings = {"episodic_life": True, "reward_clip": True} if case.atari else {}
        library = envpool.make_gymnasium(case.env_id, num_envs=1, seed=[seed], **settings)

    def step(actions):
        obs, rewards, terminated, truncated, _ = library.step(actions)
        return obs[0].copy(), rewards[0], bool(terminated[0] or truncated[0])

    first = library.reset(seed=seed)[0] if case.name == "ale" else library.reset()[0]
    return first[0].copy(), step


@batched_backends
def test_every_environment_plays_as_in_the_bare_library(make, case):
    env, libraries = make(3, seed=4), [bare_library(case, seed) for seed in (4, 5, 6)]
    np.testing.assert_array_equal(env.reset(), [first for first, _ in libraries])
    policy, ends, returns, lengths = RandomPolicy(env), 0, np.zeros(3), np.zeros(3, int)
    for _ in range(400):
        actions = policy.actions()
        obs, _, dones, infos = env.step(actions)
        lengths += 1
        for index, (_, step) in enumerate(libraries):
            expected, reward, ended = step(actions[index : index + 1])
            returns[index] += reward
            assert dones[index] or not ended  # also at a lost life, which changes nothing in ale-py
            if ended:
                ends += 1
                np.testing.assert_array_equal(infos[index]["terminal_observation"], expected)
                expected, *_ = step(actions[index : index + 1])
                if not case.atari:
                    episode = infos[index]["episode"]
                    assert set(episode) == {"r", "l", "t"}
                    assert (episode["r"], episode["l"]) == (pytest.approx(returns[index], abs=1e-3), lengths[index])
                    returns[index] = lengths[index] = 0
            np.testing.assert_array_equal(obs[index], expected)
    assert ends >= 4


@cases({"envpool": ENVPOOL})
@pytest.mark.parametrize("name", ["Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d"])
@pytest.mark.parametrize("version", ["v4", "v5"])
def test_envpools_tasks_are_gymnasiums(make, name, version):
    pool, env = make(4, f"{name}-{version}", seed=0), gym.make(f"{name}-{version}").unwrapped
    for ours, theirs in ((pool.observation_space, env.observation_space), (pool.action_space, env.action_space)):
        assert (ours, ours.dtype) == (theirs, theirs.dtype)
    env.reset(seed=0)
    hidden = env.model.nq + env.model.nv - pool.observation_space.shape[0]
    if name in ("Ant", "Humanoid"):  # they observe and reward forces, which are not part of the state
        return
    # The dynamics do not depend on the position, the only part of the state that observations lack.
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


@every_backend
def test_a_reset_in_mid_episode_starts_a_new_one(make, case):
    env = make(2, "Breakout-v5" if case.atari else "HalfCheetah-v5", env_kwargs={"noop_max": 30} if case.atari else {})
    policy = RandomPolicy(env)
    started = [env.reset()]
    finished = 0
    for steps in (37, 61):
        for _ in range(steps):
            finished += sum("episode" in info for info in env.step(policy.actions())[3])
        started.append(env.reset())
    assert finished == 0

    # The statistics and the time limit count from the last reset.
    scores = np.zeros(2)
    ended = {}
    for step in range(1, 1001):
        _, rewards, dones, infos = env.step(policy.actions())
        scores += rewards
        for index in np.flatnonzero(dones):
            if "episode" in infos[index] and index not in ended:
                ended[index] = (step, infos[index]["episode"])
                if not case.atari:
                    assert infos[index]["TimeLimit.truncated"]
                    assert (step, infos[index]["episode"]["r"]) == (1000, pytest.approx(scores[index], abs=1e-2))
        if len(ended) == 2:
            break
    assert len(ended) == 2
    for step, episode in ended.values():
        # SB3's Monitor also counts the steps that its wrappers play after resets and lost lives.
        assert 0 <= episode["l"] - step <= (15 if case.name == "gymnasium" else 0)


@atari_backends
@pytest.mark.parametrize("after", ["mid-life", "a lost life", "a reset"])
def test_a_reset_of_a_game_starts_a_new_one_with_all_lives(make, after):
    env = make(1)
    policy = RandomPolicy(env)
    env.reset()
    lost = 0
    while lost < 2:
        lost += int(env.step(policy.actions())[2][0])
    if after == "mid-life":
        assert not env.step(policy.actions())[2][0]
    if after == "a reset":
        env.reset()
    env.reset()

    lives = 0
    infos: list = [{}]
    while "episode" not in infos[0]:
        _, _, dones, infos = env.step(policy.actions())
        lives += int(dones[0])
    assert lives == 5  # Breakout's
