"""Environments of tensors under SB3's contract, and the examples against gymnasium."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common import vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano import ANO
from sb3_ano.envs import VecNormalize, from_tensor_env
from tests.envs.tensor_envs import EXAMPLES, DictEnv, MaskedEnv, Simulator


@pytest.mark.parametrize(("name", "task"), [("TensorCartPole", "CartPole-v1"), ("TensorPendulum", "Pendulum-v1")])
def test_the_examples_move_as_gymnasium_does(name, task):
    env = getattr(EXAMPLES, name)(3, max_steps=60)
    env.seed(0)
    env.reset()
    others = [gym.make(task).unwrapped for _ in range(3)]
    state = env.state.double().numpy()
    for other, row in zip(others, state, strict=True):
        other.reset()
        other.state = np.array(row)

    env.action_space.seed(0)
    for _ in range(1, 60):
        actions = np.stack([env.action_space.sample() for _ in range(3)])
        observations, rewards, dones, infos = env.step(actions)
        for index, other in enumerate(others):
            expected, reward, terminated, _, _ = other.step(actions[index])
            if terminated:
                assert dones[index]
                assert not infos[index]["TimeLimit.truncated"]
                observations[index] = infos[index]["terminal_observation"]
            np.testing.assert_allclose(observations[index], expected, rtol=2e-4, atol=2e-4)
            assert rewards[index] == pytest.approx(reward, abs=1e-3)
        if dones.any():
            assert name == "TensorCartPole"
            return
    assert name == "TensorPendulum"
    _, _, dones, infos = env.step(actions)
    assert dones.all()
    assert all(info["TimeLimit.truncated"] and info["episode"]["l"] == 60 for info in infos)


def test_statistics_of_episodes_do_not_depend_on_when_they_are_read():
    actions = torch.randint(0, 5, (40, 4), generator=torch.Generator().manual_seed(0))
    read: dict[int, list] = {}
    for every in (1, 3, 40):
        env = DictEnv()
        env.reset_tensors()
        read[every] = []
        for number, row in enumerate(actions, start=1):
            env.step_tensors(row)
            if number % every == 0 or number == len(actions):
                read[every] += [(index, episode["r"], episode["l"]) for index, episode in env.end_rollout()]
    np.testing.assert_allclose(read[3], read[1], rtol=1e-12)
    np.testing.assert_allclose(read[40], read[1], rtol=1e-12)

    # By hand: the first environment's episodes have five steps.
    of_first = [(total, length) for index, total, length in read[1] if index == 0]
    for number, (total, length) in enumerate(of_first):
        rewards = actions[5 * number : 5 * number + 5, 0] / 5.0 + 0.1 * torch.arange(1, 6)
        assert length == 5
        assert total == pytest.approx(rewards.sum().item(), rel=1e-5)
    assert len(of_first) == 8


def test_ends_have_sb3s_infos():
    env = DictEnv()
    env.reset()
    seen = set()
    for _ in range(30):
        observations, rewards, dones, infos = env.step(np.full(4, 2))
        assert rewards.dtype == np.float32
        for index, info in enumerate(infos):
            assert ("terminal_observation" in info) == ("episode" in info) == dones[index]
            if dones[index]:
                seen.add(info["TimeLimit.truncated"])
                assert info["terminal_observation"]["place"][0] == pytest.approx(info["episode"]["l"] / 20.0)
                assert observations["place"][index, 0] == 0.0
    assert seen == {True, False}


def test_numpy_arrays_share_no_memory_with_tensors():
    env = EXAMPLES.TensorCartPole(2)
    before = env.reset()
    kept = before.copy()
    env.state.add_(1.0)
    np.testing.assert_array_equal(before, kept)


def test_seeds_repeat_episodes():
    def first(seed):
        env = EXAMPLES.TensorPendulum(3)
        env.seed(seed)
        return env.reset()

    np.testing.assert_array_equal(first(1), first(1))
    assert not np.array_equal(first(1), first(2))


def test_a_batch_has_no_single_environments():
    env = DictEnv()
    assert env.get_attr("backend") == ["tensor"] * 4
    assert not env.has_attr("action_masks")
    with pytest.raises(NotImplementedError, match="one batch"):
        env.set_attr("age", 0)
    with pytest.raises(NotImplementedError, match="one batch"):
        env.env_method("reset")
    with pytest.raises(RuntimeError, match="step_async"):
        env.step_wait()
    masked = MaskedEnv()
    masked.reset()
    assert masked.has_attr("action_masks")
    np.testing.assert_array_equal(np.stack(masked.env_method("action_masks")), masked.action_masks())


@pytest.mark.parametrize("key", ["final_observation", "final_obs", ""])
def test_simulators_are_wrapped(key):
    simulator = Simulator(key)
    env = from_tensor_env(simulator)
    assert env.action_space == spaces.Box(-100.0, 100.0, (2,), np.float32)
    observations = env.reset()
    assert observations.keys() == {"kind", "place"}
    for _ in range(5):
        _, _, dones, infos = env.step(np.ones((4, 2), np.float32))
    assert dones.tolist() == [True, False, False, False]
    assert ("terminal_observation" in infos[0]) == bool(key)
    env.close()
    assert simulator.closed


def test_groups_of_observations_are_chosen():
    env = from_tensor_env(Simulator(), group="place")
    assert env.observation_space.shape == (4,)
    assert env.reset().shape == (4, 4)
    with pytest.raises(ValueError, match="group='policy' is not in the observation space"):
        from_tensor_env(Simulator(), group="policy")
    simulator = Simulator()
    simulator.single_observation_space = spaces.Dict({"place": env.observation_space})
    assert from_tensor_env(simulator).observation_space.shape == (4,)


def steps_of_both(make, normalize_options, steps=40):
    """The same steps with the class on the device, and in NumPy."""
    on_device, in_numpy = VecNormalize(make(), **normalize_options), vec_env.VecNormalize(make(), **normalize_options)
    on_device.reset()
    in_numpy.reset()
    for number in range(steps):
        actions = torch.full((4,), number % 5)
        step = on_device.step_tensors(actions)
        expected = in_numpy.step(actions.numpy())
        yield step, expected
        if number % 8 == 7:
            on_device.end_rollout()
            assert pickle.dumps(on_device)
            assert copy.deepcopy(on_device).obs_rms is not on_device.obs_rms
            parts = on_device.obs_rms if isinstance(on_device.obs_rms, dict) else {"": on_device.obs_rms}
            for key, statistics in parts.items():
                other = in_numpy.obs_rms[key] if key else in_numpy.obs_rms
                np.testing.assert_allclose(statistics.mean, other.mean, rtol=1e-6)
                np.testing.assert_allclose(statistics.var, other.var, rtol=1e-6)
                assert statistics.count == pytest.approx(other.count)
            np.testing.assert_allclose(on_device.ret_rms.var, in_numpy.ret_rms.var, rtol=1e-6)
            np.testing.assert_allclose(on_device.returns, in_numpy.returns, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"norm_reward": False}, {"norm_obs_keys": ["place"]}, {"training": False}])
def test_normalization_on_the_device_is_sb3s(options):
    options = {"norm_obs_keys": ["place"], "clip_obs": 1.5, **options}
    for step, (observations, rewards, dones, infos) in steps_of_both(DictEnv, options):
        np.testing.assert_allclose(step.observations["place"].numpy(), observations["place"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(step.observations["kind"].numpy(), observations["kind"])
        np.testing.assert_allclose(step.rewards.numpy(), rewards, rtol=1e-6, atol=1e-6)
        for index in np.flatnonzero(dones):
            final = infos[index]["terminal_observation"]["place"]
            np.testing.assert_allclose(step.final_observations["place"][index].numpy(), final, rtol=1e-6, atol=1e-6)


def test_agents_are_evaluated_saved_and_loaded(tmp_path):
    env = EXAMPLES.TensorCartPole(4, max_steps=30)
    model = ANO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=2, seed=0, device="cpu").learn(256)
    model.save(tmp_path / "agent")
    loaded = ANO.load(tmp_path / "agent", env=env, device="cpu")
    mean, _ = evaluate_policy(loaded, EXAMPLES.TensorCartPole(2, max_steps=30), n_eval_episodes=4)
    assert 5 <= mean <= 30
    single = gym.make("CartPole-v1")
    actions, _ = loaded.predict(single.reset(seed=0)[0])
    assert single.action_space.contains(int(actions))
    loaded.learn(64)
