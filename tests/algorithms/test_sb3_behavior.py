"""What users of SB3 expect of an on-policy algorithm, compared with expected values or with SB3's PPO."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from sb3_ano import ANO, PAPO
from tests.common import ALGORITHMS, SMALL, parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, TinyEnv, tiny_vec_env

ACTION_SPACES = [BOX_ACTIONS, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]
OBSERVATION_SPACES = [
    BOX_OBSERVATIONS,
    spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    spaces.Discrete(5),
    spaces.MultiDiscrete([2, 4]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    IMAGE_OBSERVATIONS,
    DICT_OBSERVATIONS,
]


def policy_for(space: spaces.Space) -> str:
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if space is IMAGE_OBSERVATIONS else "MlpPolicy"


def ano(env: Any = "CartPole-v1", policy: Any = "MlpPolicy", **options: Any) -> ANO:
    return ANO(policy, env, **{**SMALL, **options})


def like_ppo(env_of: Any, policy: Any = "MlpPolicy", total: int = 64, **options: Any) -> tuple[ANO, PPO]:
    """ANO with PPO's shape and PPO, trained alike."""
    settings = {**SMALL, "device": "cpu", **options}
    return (
        ANO(policy, env_of(), **settings, shaping="ppo", torch_compile=False).learn(total),
        PPO(policy, env_of(), **settings).learn(total),
    )


def assert_same(found: Any, expected: Any) -> None:
    distance = (parameters(found) - parameters(expected)).norm() / parameters(expected).norm()
    assert distance.item() <= 1e-6


def logged(model: Any, folder: Path, **options: Any) -> list[dict[str, float]]:
    """The lines that ``learn`` logs."""
    model.set_logger(configure(str(folder), ["json"]))
    model.learn(**options)
    model.logger.close()
    return [json.loads(line) for line in (folder / "progress.json").read_text().splitlines()]


def tiny(observation_space: spaces.Space = BOX_OBSERVATIONS, action_space: spaces.Space = ACTION_SPACES[1]) -> TinyEnv:
    return TinyEnv(copy.deepcopy(observation_space), copy.deepcopy(action_space))


# --- Predicting


@pytest.mark.parametrize("action_space", ACTION_SPACES, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("observation_space", OBSERVATION_SPACES, ids=str)
def test_predictions_have_the_shape_of_the_actions_with_and_without_a_batch(observation_space, action_space):
    env = tiny(observation_space, action_space)
    model = ano(env, policy_for(observation_space), n_steps=2, batch_size=2)
    one = model.observation_space.sample()
    batch = {key: np.stack([value] * 3) for key, value in one.items()} if isinstance(one, dict) else np.stack([one] * 3)
    for deterministic in (False, True):
        action, state = model.predict(one, deterministic=deterministic)
        assert state is None
        assert np.shape(action) == action_space.shape
        assert action_space.contains(action.astype(action_space.dtype) if action_space.shape else int(action))
        actions, _ = model.predict(batch, deterministic=deterministic)
        assert actions.shape == (3, *action_space.shape)
    # Deterministic predictions do not depend on the batch, or on anything drawn.
    np.testing.assert_allclose(actions, np.stack([action] * 3), rtol=1e-5)


@pytest.mark.parametrize(
    "observation", [np.zeros(3), np.zeros((2, 3)), np.zeros((1, 1, 4))], ids=lambda array: str(array.shape)
)
def test_observations_of_a_wrong_shape_are_refused(observation):
    with pytest.raises(ValueError, match="Unexpected observation shape"):
        ano().predict(observation)


def test_what_reset_returns_is_no_observation():
    with pytest.raises(ValueError, match="tuple"):
        ano().predict(gym.make("CartPole-v1").reset())


def test_actions_stay_in_their_bounds():
    env = TinyEnv(copy.deepcopy(BOX_OBSERVATIONS), spaces.Box(*np.array([[-1.0, 0.0], [0.5, 3.0]], np.float32)))
    seen = []
    step = env.step
    env.step = lambda action: seen.append(action) or step(action)
    model = ano(env, policy_kwargs={"log_std_init": 1.0}).learn(64)
    taken = np.array(seen)
    assert (taken >= env.action_space.low).all()
    assert (taken <= env.action_space.high).all()
    assert (taken == env.action_space.high).any()  # clipped
    assert (model.rollout_buffer.actions > env.action_space.high).any()  # but not in the buffer


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_evaluate_policy_scores_a_model(cls):
    model = cls("MlpPolicy", "CartPole-v1", **SMALL)
    env = Monitor(gym.make("CartPole-v1"))
    rewards, lengths = evaluate_policy(model, env, n_eval_episodes=3, return_episode_rewards=True)
    assert len(rewards) == 3
    assert rewards == lengths  # CartPole gives 1 a step


# --- Environments and spaces


@pytest.mark.parametrize(
    "make",
    [
        lambda: "CartPole-v1",
        lambda: gym.make("CartPole-v1"),
        lambda: Monitor(gym.make("CartPole-v1")),
        lambda: DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"))]),
        lambda: VecMonitor(DummyVecEnv([lambda: gym.make("CartPole-v1")])),
    ],
    ids=["id", "environment", "Monitor", "DummyVecEnv", "VecMonitor"],
)
def test_environments_of_all_kinds_are_the_same_environment(make):
    model = ano(make()).learn(128)
    expected = PPO("MlpPolicy", make(), **SMALL).learn(128)
    assert [info["l"] for info in model.ep_info_buffer][:3] == [info["l"] for info in expected.ep_info_buffer][:3]
    assert model.n_envs == model.get_env().num_envs == 1
    assert model.get_vec_normalize_env() is None


@pytest.mark.parametrize("observation_space", OBSERVATION_SPACES, ids=str)
def test_every_kind_of_observation_is_learned_from_as_by_ppo(observation_space):
    few = {"n_steps": 16, "batch_size": 16, "policy": policy_for(observation_space)}
    if observation_space is IMAGE_OBSERVATIONS:
        few["policy_kwargs"] = {"features_extractor_kwargs": {"features_dim": 16}}
    assert_same(*like_ppo(lambda: tiny_vec_env(observation_space, spaces.Discrete(3)), total=64, **few))


def test_images_are_transposed_unless_channels_come_first():
    last, first = (spaces.Box(0, 255, shape, np.uint8) for shape in ((36, 36, 3), (3, 36, 36)))
    for space in (last, first):
        model = ano(tiny(space), "CnnPolicy", n_steps=2, batch_size=2)
        assert model.observation_space.shape == (3, 36, 36)
        assert isinstance(model.get_env(), VecTransposeImage) == (space is last)
        assert isinstance(model.policy.features_extractor, NatureCNN)
        assert model.predict(np.zeros((3, 36, 36), np.uint8))[0].shape == ()


@pytest.mark.parametrize(
    ("policy", "space", "error", "message"),
    [
        ("MlpPolicy", DICT_OBSERVATIONS, ValueError, "MultiInputPolicy"),
        ("CnnPolicy", BOX_OBSERVATIONS, AssertionError, "CnnPolicy"),
        ("MultiInputPolicy", BOX_OBSERVATIONS, AttributeError, "spaces"),
    ],
)
def test_a_policy_of_another_kind_of_observations_is_refused_as_by_sb3(policy, space, error, message):
    for cls in (ANO, PPO):
        with pytest.raises(error, match=message):
            cls(policy, tiny(space))


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALGORITHMS)
def test_environments_in_processes_are_those_in_one(cls):
    runs = []
    for kind in (DummyVecEnv, SubprocVecEnv):
        env = make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=kind)
        runs.append(parameters(cls("MlpPolicy", env, **SMALL).learn(128)))
        env.close()
    assert torch.equal(*runs)


def test_frames_are_stacked():
    model = ano(VecFrameStack(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2)), 3), batch_size=64).learn(64)
    assert model.observation_space.shape == (12,)
    last = model.rollout_buffer.observations
    # A frame is the next frame's past, except at the beginning of an episode.
    goes_on = model.rollout_buffer.episode_starts[1:] == 0.0
    np.testing.assert_array_equal(last[1:, :, :8][goes_on], last[:-1, :, 4:][goes_on])


def test_normalized_environments_train_as_with_ppo_and_are_saved_apart(tmp_path):
    def make() -> VecNormalize:
        return VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0), gamma=0.99)

    model, expected = like_ppo(make, n_steps=64, batch_size=64, total=256)
    assert_same(model, expected)
    normalize = model.get_vec_normalize_env()
    np.testing.assert_allclose(normalize.obs_rms.mean, expected.get_vec_normalize_env().obs_rms.mean)
    normalize.save(tmp_path / "normalize.pkl")
    model.save(tmp_path / "model")
    env = VecNormalize.load(str(tmp_path / "normalize.pkl"), make_vec_env("Pendulum-v1", 2, seed=0))
    loaded = ANO.load(tmp_path / "model", env=env)
    assert loaded.get_vec_normalize_env() is env
    np.testing.assert_array_equal(env.obs_rms.var, normalize.obs_rms.var)
    loaded.learn(128)


class Ending(gym.Env):
    """Rewards of 1; every other episode of 3 steps ends, and the others are cut off."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.episode, self.steps = self.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        done, cut_off = self.steps == 3, self.episode % 2 == 0
        info = {"is_success": not cut_off} if done else {}
        return np.full(2, self.steps / 3, np.float32), 1.0, done and not cut_off, done and cut_off, info


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_only_episodes_that_are_cut_off_are_bootstrapped(cls):
    model = cls("MlpPolicy", Ending(), **{**SMALL, "n_steps": 12, "batch_size": 12}, gamma=0.9)
    with torch.no_grad():
        value = model.policy.predict_values(torch.ones(1, 2)).item()
    model.learn(12)
    cut_off = 1.0 + 0.9 * value
    expected = [1, 1, 1, 1, 1, cut_off, 1, 1, 1, 1, 1, cut_off]
    assert model.rollout_buffer.rewards[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert model.rollout_buffer.episode_starts[:, 0].tolist() == [1, 0, 0] * 4


def test_success_and_returns_are_logged_over_the_window(tmp_path):
    model = ano(Ending(), n_steps=12, batch_size=12, stats_window_size=3)
    first, last = logged(model, tmp_path, total_timesteps=24)
    assert [info["r"] for info in model.ep_info_buffer] == [3.0] * 3
    assert list(model.ep_success_buffer) == [False, True, False]
    assert last["rollout/success_rate"] == pytest.approx(1 / 3)
    assert first["rollout/ep_rew_mean"] == first["rollout/ep_len_mean"] == 3.0


def test_training_returns_are_written_by_the_monitor(tmp_path):
    env = Monitor(Ending(), str(tmp_path / "train"), info_keywords=("is_success",))
    ano(env, n_steps=12, batch_size=12).learn(12)
    env.close()
    results = load_results(str(tmp_path))
    assert results["r"].tolist() == [3.0] * 4
    assert results["is_success"].tolist() == [True, False, True, False]


# --- Training in parts


def test_training_continues_where_it_stopped():
    def parts(cls: Any, **options: Any) -> Any:
        model = cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(64)
        episode = model.get_env().get_attr("_elapsed_steps")
        model.learn(64, reset_num_timesteps=False)
        assert model.num_timesteps == 128
        assert episode != [0]  # in the middle of an episode, which was not cut
        return model.learn(32)

    model, expected = parts(ANO, shaping="ppo", torch_compile=False), parts(PPO)
    assert_same(model, expected)
    assert model.num_timesteps == expected.num_timesteps == 32
    assert model._n_updates == expected._n_updates


def test_schedules_follow_the_progress_of_ppo():
    def run(cls: Any) -> list[float]:
        seen: list[float] = []
        model = cls("MlpPolicy", "CartPole-v1", **SMALL, learning_rate=lambda progress: seen.append(progress) or 1e-3)
        seen.clear()
        model.learn(64).learn(64, reset_num_timesteps=False)
        return sorted(set(seen), reverse=True)

    assert run(ANO) == run(PPO) == [0.5, 0.25, 0.0]


def test_seeds_decide_everything():
    models = [ano(seed=seed).learn(64) for seed in (1, 1, 2)]
    assert torch.equal(parameters(models[0]), parameters(models[1]))
    assert not torch.equal(parameters(models[0]), parameters(models[2]))
    model = ano(seed=None)
    draws = []
    for _ in range(2):
        model.set_random_seed(5)
        draws.append((torch.rand(1).item(), np.random.rand(), model.action_space.sample(), model.get_env().reset().tolist()))
    assert draws[0] == draws[1]


# --- Callbacks


class Counting(BaseCallback):
    """Counts its calls and looks at what SB3 promises to its callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def _init_callback(self) -> None:
        self.calls.append("init")

    def _on_training_start(self) -> None:
        assert self.training_env is self.model.get_env()
        assert self.logger is self.model.logger
        assert {"total_timesteps", "self"} <= set(self.locals)
        self.calls.append("start")

    def _on_rollout_start(self) -> None:
        self.calls.append("rollout")

    def _on_step(self) -> bool:
        assert {"actions", "rewards", "new_obs", "dones", "infos", "values", "log_probs", "obs_tensor"} <= set(self.locals)
        assert self.num_timesteps == self.model.num_timesteps == self.n_calls * self.training_env.num_envs
        return True

    def _on_rollout_end(self) -> None:
        self.calls.append("end of rollout")

    def _on_training_end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_callbacks_are_called_as_in_sb3(cls):
    callback = Counting()
    cls("MlpPolicy", tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2)), **SMALL).learn(128, callback=callback)
    assert callback.n_calls == 64
    assert callback.calls == ["init", "start", *["rollout", "end of rollout"] * 2, "end"]


def test_callbacks_come_alone_in_lists_and_as_functions():
    first, second = Counting(), Counting()
    for callback in (first, [first, second], CallbackList([first, second])):
        first.n_calls = second.n_calls = 0
        ano().learn(32, callback=callback)
        assert (first.n_calls, second.n_calls) == (32, 0 if callback is first else 32)
    steps = []
    model = ano().learn(
        64, callback=lambda local_variables, global_variables: steps.append(local_variables["n_steps"]) or len(steps) < 10
    )
    assert steps == list(range(10))
    assert model.num_timesteps == 10


def test_events_come_every_n_steps():
    times = []

    class Remember(BaseCallback):
        def _on_step(self) -> bool:
            times.append(self.num_timesteps)
            return True

    ano().learn(100, callback=EveryNTimesteps(n_steps=20, callback=Remember()))
    assert times == [20, 40, 60, 80, 100, 120]


def test_stopping_on_episodes_thresholds_and_stagnation(tmp_path):
    model = ano(Ending(), n_steps=12, batch_size=12).learn(120, callback=StopTrainingOnMaxEpisodes(max_episodes=5))
    assert model.num_timesteps == 15
    reached = StopTrainingOnRewardThreshold(reward_threshold=2.5)
    evaluation = EvalCallback(Monitor(Ending()), reached, eval_freq=10, n_eval_episodes=1, verbose=0, warn=False)
    assert ano(Ending(), n_steps=12, batch_size=12).learn(120, callback=evaluation).num_timesteps == 10
    assert evaluation.best_mean_reward == 3.0
    stagnation = StopTrainingOnNoModelImprovement(max_no_improvement_evals=2, min_evals=0)
    evaluation = EvalCallback(
        Monitor(Ending()), callback_after_eval=stagnation, eval_freq=10, n_eval_episodes=1, verbose=0, warn=False
    )
    model = ano(Ending(), n_steps=12, batch_size=12).learn(120, callback=evaluation)
    assert model.num_timesteps == 40  # the first evaluation is the best, and three are not better


def test_evaluations_are_logged_and_the_best_model_is_kept(tmp_path):
    evaluation = EvalCallback(
        Monitor(Ending()),
        eval_freq=24,
        n_eval_episodes=2,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
        warn=False,
    )
    lines = logged(ano(Ending(), n_steps=12, batch_size=12), tmp_path, total_timesteps=48, callback=evaluation)
    assert [line["eval/mean_reward"] for line in lines if "eval/mean_reward" in line] == [3.0, 3.0]
    stored = np.load(tmp_path / "evaluations.npz")
    assert stored["timesteps"].tolist() == [24, 48]
    assert stored["results"].tolist() == [[3.0, 3.0]] * 2
    assert stored["ep_lengths"].tolist() == [[3, 3]] * 2
    assert type(ANO.load(tmp_path / "best_model")) is ANO


def test_checkpoints_are_named_after_their_steps(tmp_path):
    env = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0))
    callback = CheckpointCallback(save_freq=16, save_path=str(tmp_path), name_prefix="ano", save_vecnormalize=True)
    model = ano(env).learn(64, callback=callback)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        f"ano_{part}{steps}_steps.{end}" for steps in (32, 64) for part, end in (("", "zip"), ("vecnormalize_", "pkl"))
    }
    first, last = (ANO.load(tmp_path / f"ano_{steps}_steps") for steps in (32, 64))
    assert (first.num_timesteps, last.num_timesteps) == (32, 64)
    assert not torch.equal(parameters(last), parameters(model))  # saved before the update
    assert torch.equal(parameters(first), parameters(last))


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_a_progress_bar_goes_to_the_end(capsys):
    ano().learn(32, progress_bar=True)
    assert "32/32" in capsys.readouterr().out


# --- Logs


def test_loggers_write_tables_csv_and_json(tmp_path, capsys):
    model = ano()
    model.set_logger(configure(str(tmp_path), ["stdout", "csv", "json"]))
    model.learn(64, log_interval=1)
    model.logger.close()
    table = capsys.readouterr().out
    assert all(name in table for name in ("rollout/", "ep_rew_mean", "time/", "total_timesteps", "train/", "approx_kl"))
    lines = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert [line["time/total_timesteps"] for line in lines] == [32, 64]
    assert [line["time/iterations"] for line in lines] == [1, 2]
    assert lines[1]["train/n_updates"] == SMALL["n_epochs"]  # those before the line
    assert (tmp_path / "progress.csv").read_text().splitlines()[0].count("train/") > 10


@pytest.mark.parametrize(("interval", "steps"), [(1, [32, 64, 96, 128]), (2, [64, 128]), (None, [])])
def test_a_line_is_logged_every_log_interval(interval, steps, tmp_path):
    lines = logged(ano(), tmp_path, total_timesteps=128, log_interval=interval)
    assert [line["time/total_timesteps"] for line in lines] == steps


def test_lines_may_be_logged_every_n_steps(tmp_path):
    lines = logged(ano(), tmp_path, total_timesteps=100, callback=LogEveryNTimesteps(n_steps=50), log_interval=None)
    assert [line["time/total_timesteps"] for line in lines] == [50, 100]


def test_tensorboard_runs_are_numbered_and_continued(tmp_path):
    model = ano(tensorboard_log=str(tmp_path))
    model.learn(32).learn(32)
    model.learn(32, reset_num_timesteps=False)
    model.learn(32, tb_log_name="mine")
    model.logger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ANO_1", "ANO_2", "mine_1"]
    assert len(list((tmp_path / "ANO_2").iterdir())) == 2  # the second one was continued


def test_verbosity_decides_what_is_printed(capsys):
    ano(verbose=0).learn(32)
    assert capsys.readouterr().out == ""
    ano(verbose=1).learn(32)
    out = capsys.readouterr().out
    assert "Using cpu device" in out
    assert "rollout/" in out


# --- Policies


@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {"net_arch": []},
        {"net_arch": [16]},
        {"net_arch": {"pi": [8], "vf": [16, 16]}},
        {"net_arch": {"vf": [8]}},
        {"activation_fn": torch.nn.ELU, "ortho_init": False},
        {"log_std_init": -1.0, "optimizer_kwargs": {"eps": 1e-7}},
        {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.5}},
        {"squash_output": True},
    ],
    ids=str,
)
def test_policies_are_built_and_trained_as_by_ppo(policy_kwargs):
    sde = {"use_sde": True} if policy_kwargs.get("squash_output") else {}
    few = {"n_steps": 32, "batch_size": 16, "policy_kwargs": policy_kwargs, **sde}
    model, expected = like_ppo(lambda: "Pendulum-v1", total=32, **few)
    assert str(model.policy) == str(expected.policy)
    assert_same(model, expected)


class Sum(BaseFeaturesExtractor):
    """Two features: the sum of the observation, weighted, and 1."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 2) -> None:
        super().__init__(observation_space, features_dim)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        total = observations.flatten(1).sum(dim=1, keepdim=True)
        return torch.cat([self.weight * total, torch.ones_like(total)], dim=1)


class Optimist(ActorCriticPolicy):
    """Values each observation 1 higher."""

    def predict_values(self, obs: Any) -> torch.Tensor:
        return super().predict_values(obs) + 1.0

    def forward(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
        actions, values, log_prob = super().forward(obs, deterministic)
        return actions, values + 1.0, log_prob


@pytest.mark.parametrize("shared", [True, False])
def test_custom_extractors_are_trained_as_by_ppo(shared):
    options = {"policy_kwargs": {"features_extractor_class": Sum, "share_features_extractor": shared}}
    model, expected = like_ppo(lambda: "CartPole-v1", **options)
    assert_same(model, expected)
    assert model.policy.pi_features_extractor.weight.item() != 1.0
    assert (model.policy.pi_features_extractor is model.policy.vf_features_extractor) is shared


def test_custom_policies_are_asked_themselves():
    model, expected = like_ppo(lambda: "CartPole-v1", policy=Optimist)
    assert_same(model, expected)
    with torch.no_grad():
        plain = ActorCriticPolicy.predict_values(model.policy, torch.zeros(1, 4))
        assert (model.policy.predict_values(torch.zeros(1, 4)) - plain).item() == pytest.approx(1.0)


def test_a_policy_is_saved_and_loaded_alone(tmp_path):
    model = ano().learn(32)
    model.policy.save(tmp_path / "policy.pth")
    policy = ActorCriticPolicy.load(tmp_path / "policy.pth")
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        policy.predict(observations, deterministic=True)[0], model.predict(observations, deterministic=True)[0]
    )


# --- State-dependent exploration


@pytest.mark.parametrize(
    "options", [{}, {"sde_sample_freq": 8}, {"policy_kwargs": {"use_expln": True, "full_std": False}}], ids=str
)
def test_state_dependent_exploration_is_that_of_ppo(options):
    model, expected = like_ppo(lambda: "Pendulum-v1", use_sde=True, **options)
    assert_same(model, expected)
    assert model.logger.name_to_value["train/std"] == pytest.approx(expected.logger.name_to_value["train/std"], rel=1e-5)


def test_noise_depends_on_the_state_alone_until_it_is_drawn_again():
    model = ano("Pendulum-v1", use_sde=True)
    observation = np.array([0.1, 0.2, 0.3], np.float32)
    first, again = (model.predict(observation)[0] for _ in range(2))
    assert np.array_equal(first, again)
    model.policy.reset_noise()
    assert not np.array_equal(model.predict(observation)[0], first)
    assert not np.array_equal(first, model.predict(observation, deterministic=True)[0])
    with pytest.raises(ValueError, match="continuous actions"):
        ano("CartPole-v1", use_sde=True)


# --- Saving, loading, parameters


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_parameters_are_got_and_set(cls):
    model, other = (cls("MlpPolicy", "CartPole-v1", **{**SMALL, "seed": seed}).learn(32) for seed in (0, 1))
    saved = model.get_parameters()
    assert set(saved) == {"policy", "policy.optimizer"}
    other.set_parameters(saved)
    assert torch.equal(parameters(other), parameters(model))
    state, expected = (each.policy.optimizer.state_dict()["state"] for each in (other, model))
    assert all(torch.equal(state[index]["exp_avg"], expected[index]["exp_avg"]) for index in expected)
    # What was got does not follow the model, nor the model what was set.
    model.learn(32)
    assert not torch.equal(parameters(other), parameters(model))
    assert torch.equal(torch.cat([part.flatten() for part in saved["policy"].values()]).sort()[0], parameters(other).sort()[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda saved: saved | {"other": {}}, ValueError, "other is an invalid object name"),
        (lambda saved: {"policy": saved["policy"]}, ValueError, "do not match"),
        (lambda saved: saved | {"policy": {}}, RuntimeError, "Missing key"),
    ],
    ids=["unknown", "missing", "empty"],
)
def test_parameters_that_do_not_fit_are_refused_as_by_sb3(change, error, message):
    for cls in (ANO, PPO):
        model = cls("MlpPolicy", "CartPole-v1", **SMALL)
        with pytest.raises(error, match=message):
            model.set_parameters(change(model.get_parameters()))
    model.set_parameters({"policy": model.get_parameters()["policy"]}, exact_match=False)


@pytest.mark.parametrize("place", ["path", "str", "with .zip", "stream", "open file"])
def test_models_are_saved_to_paths_and_streams(place, tmp_path):
    model = ano().learn(32)
    if place == "stream":
        target: Any = io.BytesIO()
        model.save(target)
        target.seek(0)
        loaded = ANO.load(target)
    elif place == "open file":
        with open(tmp_path / "model.any", "wb") as file:
            model.save(file)
        with open(tmp_path / "model.any", "rb") as file:
            loaded = ANO.load(file)
    else:
        target = {"path": tmp_path / "model", "str": str(tmp_path / "model"), "with .zip": tmp_path / "model.zip"}[place]
        model.save(target)
        loaded = ANO.load(target)
    assert torch.equal(parameters(loaded), parameters(model))


def test_a_loaded_model_continues_as_the_saved_one(tmp_path):
    """The same updates after loading, in environments that start anew, as with PPO."""

    def run(cls: Any, **options: Any) -> Any:
        cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(64).save(tmp_path / cls.__name__)
        loaded = cls.load(tmp_path / cls.__name__, env=gym.make("CartPole-v1"), n_epochs=3)
        assert loaded.num_timesteps == 64
        assert loaded._last_obs is None
        loaded.set_random_seed(3)
        return loaded.learn(64, reset_num_timesteps=False)

    model, expected = run(ANO, shaping="ppo", torch_compile=False), run(PPO)
    assert model.num_timesteps == expected.num_timesteps == 128
    assert model._n_updates == expected._n_updates == 4 + 6
    assert_same(model, expected)


def test_load_takes_other_numbers_of_environments_and_set_env_does_not(tmp_path):
    model = ano().learn(32)
    model.save(tmp_path / "model")
    loaded = ANO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 3)).learn(96)
    assert (loaded.n_envs, loaded.rollout_buffer.rewards.shape) == (3, (32, 3))
    with pytest.raises(AssertionError, match="number of environments"):
        model.set_env(make_vec_env("CartPole-v1", 3))
    for cls in (ANO, PPO):
        with pytest.raises(ValueError, match="spaces do not match"):
            cls("MlpPolicy", "CartPole-v1", **SMALL).set_env(gym.make("Pendulum-v1"))


def test_set_env_resets_unless_told_not_to():
    model = ano().learn(32)
    last = model._last_obs
    model.set_env(model.get_env(), force_reset=False)
    assert model._last_obs is last
    model.set_env(gym.make("CartPole-v1"))
    assert model._last_obs is None


def test_attributes_are_excluded_included_and_replaced(tmp_path):
    model = ano(gamma=0.9, learning_rate=1e-3).learn(32)
    model.save(tmp_path / "less", exclude=["gamma"])
    assert ANO.load(tmp_path / "less").gamma == 0.99  # the constructor's
    model.save(tmp_path / "more", include=["rollout_buffer"])
    assert ANO.load(tmp_path / "more").gamma == 0.9
    replaced = ANO.load(tmp_path / "more", custom_objects={"learning_rate": 5e-4, "clip_range": LinearSchedule(0.3, 0.1, 1.0)})
    assert replaced.lr_schedule(1.0) == 5e-4
    assert replaced.clip_range(0.0) == pytest.approx(0.1)
    assert ANO.load(tmp_path / "more", gamma=0.5, n_steps=64, batch_size=64).rollout_buffer.buffer_size == 64
    with pytest.raises(ValueError, match="policy kwargs do not equal"):
        ANO.load(tmp_path / "more", policy_kwargs={"net_arch": [3]})


def test_a_model_predicts_without_an_environment(tmp_path):
    model = ano().learn(32)
    model.save(tmp_path / "model")
    loaded = ANO.load(tmp_path / "model")
    assert loaded.get_env() is None
    observation = np.ones(4, np.float32)
    assert loaded.predict(observation, deterministic=True)[0] == model.predict(observation, deterministic=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [*ALGORITHMS, PPO])
def test_cart_pole_is_learned(cls):
    few = {"max_epoch_kl": None} if cls is PAPO else {}
    env = make_vec_env("CartPole-v1", 8, seed=0)
    settings = {
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "learning_rate": 1e-3,
        "seed": 0,
    }
    model = cls("MlpPolicy", env, **settings, **few).learn(40_000)
    mean, _ = evaluate_policy(model, Monitor(gym.make("CartPole-v1")), n_eval_episodes=10)
    assert mean > 300.0
