"""One run: what is written down is what happened, and writing it down changes nothing."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.bench.experiments import training
from sb3_ano.bench.experiments.plan import Run, make_plan, parse_grid
from sb3_ano.bench.experiments.recording import measure_update
from sb3_ano.bench.experiments.suites import Evaluation, Suite, Task
from sb3_ano.bench.experiments.training import commit, make_envs, make_model, normalized, train
from sb3_ano.bench.store import checksum, verify
from sb3_ano.envs import make_vec_env

SMALL = {"n_envs": 2, "n_steps": 64, "batch_size": 32, "n_epochs": 2, "learning_rate": "lin_1e-3", "normalize": True}


def small_run(label: str, env_id: str = "Pendulum-v1", steps: int = 512, points: int = 1, **hyperparameters) -> Run:
    task = Task(env_id, steps, SMALL | hyperparameters)
    return make_plan(Suite("small", (task,), evaluation=Evaluation(points, episodes=3)), [label], 1)[0]


def learnt(run: Run):
    """The model after ``learn`` alone, with the monitor files of SB3 as a second record of the episodes."""
    env, evaluation = make_envs(run, 1)
    evaluation.close()
    env, _ = normalized(run, env, evaluation)
    model = make_model(run, env, "cpu").learn(run.total_timesteps, log_interval=None)
    env.close()
    return model


@pytest.mark.parametrize(("label", "algorithm"), [("ppo", PPO), ("ano", ANO)])
def test_recording_changes_neither_the_training_nor_the_episodes(label, algorithm, tmp_path, monkeypatch):
    run = small_run(label, "CartPole-v1", points=3)
    (tmp_path / "run").mkdir()
    train(run, tmp_path / "run")

    def with_monitor_files(*args, **kwargs):
        number = len(list(tmp_path.glob("monitor*")))
        return make_vec_env(*args, monitor_dir=tmp_path / f"monitor{number}", **kwargs)

    monkeypatch.setattr(training, "make_vec_env", with_monitor_files)
    alone = learnt(run)
    recorded = algorithm.load(tmp_path / "run" / "model.zip")
    for name, parameter in alone.policy.state_dict().items():
        assert torch.equal(parameter, recorded.policy.state_dict()[name]), name

    episodes = pd.read_parquet(tmp_path / "run" / "episodes.parquet")
    monitored = [pd.read_csv(file, skiprows=1) for file in (tmp_path / "monitor0").glob("*.csv")]
    assert len(monitored) == 2
    # A step of one environment is one of both.
    rows = pd.concat(one.assign(timesteps=2 * one["l"].cumsum()) for one in monitored).sort_values(["timesteps", "r"])
    assert len(rows) > 5
    np.testing.assert_array_equal(
        episodes.sort_values(["timesteps", "episode_return"])[["timesteps", "episode_return", "episode_length"]],
        rows[["timesteps", "r", "l"]],
    )
    assert episodes["wall_seconds"].is_monotonic_increasing


def test_the_evaluation_is_that_of_sb3_with_the_saved_model_and_normalisation(tmp_path):
    run = small_run("ano")
    train(run, tmp_path)
    evaluations = pd.read_parquet(tmp_path / "evaluations.parquet")
    assert evaluations["timesteps"].tolist() == [512] * 3
    assert evaluations["episode"].tolist() == [0, 1, 2]
    _, fresh = make_envs(run, 1)
    env = VecNormalize.load(str(tmp_path / "vecnormalize.pkl"), fresh)
    env.training = env.norm_reward = False
    returns, lengths = evaluate_policy(ANO.load(tmp_path / "model.zip"), env, 3, return_episode_rewards=True)
    np.testing.assert_allclose(evaluations["episode_return"], returns, rtol=1e-12)
    assert evaluations["episode_length"].tolist() == lengths == [200] * 3


def test_evaluations_are_evenly_apart_and_the_last_one_is_at_the_end(tmp_path):
    run = small_run("ppo", points=4, normalize=False, steps=600)
    done: list[int] = []
    train(run, tmp_path, report=done.append)
    assert done == [128, 256, 384, 512, 640]  # rollouts of 128 steps
    evaluations = pd.read_parquet(tmp_path / "evaluations.parquet")
    assert evaluations["timesteps"].unique().tolist() == [256, 384, 512, 640]  # the first ends after 150, 300, 450 and 600
    diagnostics = pd.read_parquet(tmp_path / "diagnostics.parquet")
    assert diagnostics["timesteps"].tolist() == done
    assert diagnostics["wall_seconds"].is_monotonic_increasing
    np.testing.assert_allclose(diagnostics["learning_rate"], [1e-3 * max(0, 1 - step / 600) for step in done], atol=1e-12)
    assert not (tmp_path / "vecnormalize.pkl").exists()


def test_a_run_tells_what_it_was_and_vouches_for_its_files(tmp_path):
    run = small_run("trpo", target_kl=0.02)
    train(run, tmp_path, threads=1)
    content = verify(tmp_path)
    assert content["run_id"] == "Pendulum-v1__trpo__learning_rate=0.001,target_kl=0.02__seed0"
    assert {key: content[key] for key in run.specification()} == json.loads(json.dumps(run.specification()))
    assert (content["n_envs"], content["threads"], content["timesteps"]) == (2, 1, 512)
    assert content["versions"]["torch"] == torch.__version__
    assert content["commit"] == commit()
    assert 0 < content["wall_seconds"] < content["process_seconds"]
    assert set(content["checksum"]) == {file.name for file in tmp_path.iterdir()} - {"run.json"}
    assert content["checksum"]["model.zip"] == checksum(tmp_path / "model.zip")
    diagnostics = pd.read_parquet(tmp_path / "diagnostics.parquet")
    assert diagnostics["clip_fraction"].isna().all()  # TRPO has no radius
    assert (diagnostics["approx_kl"] > 0).all()


def test_seeds_share_no_environment():
    runs = [dataclasses.replace(small_run("ppo", n_envs=4), seed=seed) for seed in (0, 1)]
    first = []
    for run in runs:
        for env in make_envs(run, 1):
            if env.num_envs == 4:
                make_model(run, env, "cpu")
            first += [tuple(observation) for observation in env.reset()]
            env.close()
    assert len(set(first)) == len(first) == 2 * (4 + 3)


def gaussian_log_ratio(mean, std, new_mean, new_std, actions) -> np.ndarray:
    """Sum over the actions' dimensions of the difference of two Gaussian log-densities."""
    old = -0.5 * ((actions - mean) / std) ** 2 - np.log(std)
    new = -0.5 * ((actions - new_mean) / new_std) ** 2 - np.log(new_std)
    return (new - old).sum(axis=1)


@pytest.mark.parametrize("label", ["ppo", "ano", "trpo"])
def test_the_measure_of_an_update_is_the_closed_form_of_two_gaussians(label):
    run = small_run(label, "Pendulum-v1", learning_rate=1e-9, normalize=False)
    model = learnt(dataclasses.replace(run, total_timesteps=128))
    buffer = model.rollout_buffer
    shift, scale = 0.3, 1.25
    actions, old_log_prob, values = (getattr(buffer, name).reshape(128, -1) for name in ("actions", "log_probs", "values"))
    assert values.shape == (128, 1)
    with torch.no_grad():
        log_std = model.policy.log_std.exp().numpy().copy()
        observations = torch.as_tensor(buffer.observations.reshape(128, -1))
        mean = model.policy.get_distribution(observations).distribution.mean.numpy()
        # What was collected is what the distribution of the collection says.
        density = gaussian_log_ratio(0.0, 1.0, mean, log_std, actions)
        model.policy.action_net.bias += shift
        model.policy.log_std += np.log(scale)
    if label != "trpo":  # whose step does not depend on the learning rate
        standard = -0.5 * (actions**2).sum(axis=1) - 0.5 * np.log(2 * np.pi)
        np.testing.assert_allclose(old_log_prob[:, 0], standard + density, atol=1e-4)
    after = gaussian_log_ratio(0.0, 1.0, mean + shift, log_std * scale, actions)
    standard = -0.5 * (actions**2).sum(axis=1) - 0.5 * np.log(2 * np.pi)
    log_ratio = standard + after - old_log_prob[:, 0]
    ratio = np.exp(log_ratio)
    found = measure_update(model)
    assert found["approx_kl"] == pytest.approx(float((ratio - 1 - log_ratio).mean()), rel=1e-4)
    assert found["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert found["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-5)
    outside = float((np.abs(ratio - 1) > 0.2).mean())
    assert 0.1 < outside < 0.9
    if label == "trpo":
        assert np.isnan(found["clip_fraction"])
    else:
        assert found["clip_fraction"] == outside


def test_the_same_update_measures_the_same_for_sb3_and_for_us(tmp_path):
    found = []
    for label in ("ppo", "ano:shaping=ppo"):
        folder = tmp_path / label.replace(":", "-")
        folder.mkdir()
        train(small_run(label, "CartPole-v1", normalize=False, vf_coef=0.5, ent_coef=0.0), folder)
        found.append(
            pd.read_parquet(folder / "diagnostics.parquet")[["approx_kl", "ratio_mean", "ratio_max", "clip_fraction"]]
        )
    assert (found[0]["approx_kl"][:3] > 0).all()
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_kwargs": {"activation_fn": "tahn"}}, "activation_fn='tahn' is not allowed; allowed are elu, gelu"),
        ({"clip_range": -0.1}, "clip_range=-0.1 is not a radius"),
    ],
)
def test_hyperparameters_that_are_not_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        learnt(small_run("ano", **changes))


def test_the_grid_reaches_the_model():
    suite = Suite("small", (Task("Pendulum-v1", 128, SMALL),))
    (run,) = make_plan(suite, ["papo"], 1, parse_grid(["omega=0.01", "clip_range=0.3", "n_epochs=3"]))
    model = learnt(run)
    assert (model.omega1, model.omega2, model.n_epochs, model.clip_range(1.0)) == (0.01, 0.01, 3, 0.3)


def test_the_environments_are_those_of_the_suite():
    env = gym.make("Pendulum-v1", g=2.0)
    task = Task("Pendulum-v1", 128, SMALL, env_kwargs={"g": 2.0})
    (run,) = make_plan(Suite("small", (task,)), ["ppo"], 1)
    ours, evaluation = make_envs(run, 1)
    assert ours.get_attr("unwrapped")[0].g == evaluation.get_attr("unwrapped")[0].g == env.unwrapped.g
