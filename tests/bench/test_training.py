"""One run: its files, no influence of recording on the training, and resumption after a kill."""

import contextlib
import dataclasses
import inspect
import json
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_ano._arguments import constructor_parameters
from sb3_ano._system import commit
from sb3_ano.bench import recording, training
from sb3_ano.bench.algorithms import CLASSES
from sb3_ano.bench.results import RunFiles, read_run
from sb3_ano.bench.runner import check_runs
from sb3_ano.bench.training import make_env, make_model, train, wrapped
from tests.bench.common import assert_same_run, small_run
from tests.common import parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, TinyEnv, TwoAllowed

NORMALIZED = {"hyperparameters": {"normalize": True}}


def trained_alone(run):
    """Return the model after ``learn`` without any recording."""
    with contextlib.closing(wrapped(run, make_env(run, run.hyperparameters["n_envs"]))) as env:
        return make_model(run, env).learn(run.total_timesteps)


@pytest.mark.parametrize(
    ("label", "deterministic", "normalize"), [("ppo", True, True), ("ano", False, True), ("ano", True, {"norm_obs": False})]
)
def test_recording_and_evaluating_change_neither_training_nor_episodes(label, deterministic, normalize, tmp_path, monkeypatch):
    run = small_run(label, "CartPole-v1", points=3, deterministic=deterministic, hyperparameters={"normalize": normalize})
    train(run, tmp_path / "run")

    def with_monitor_files(*args, make=training.make_vec_env, **kwargs):
        return make(*args, monitor_dir=tmp_path / f"monitor{len(list(tmp_path.glob('monitor*')))}", **kwargs)

    monkeypatch.setattr(training, "make_vec_env", with_monitor_files)
    assert torch.equal(parameters(trained_alone(run)), parameters(CLASSES[label].load(tmp_path / "run" / "model.zip")))

    episodes = RunFiles(tmp_path / "run", {}).episodes()
    files = [pd.read_csv(file, skiprows=1) for file in (tmp_path / "monitor0").glob("*.csv")]
    # A step of one environment is one of both.
    rows = pd.concat(part.assign(timesteps=2 * part["l"].cumsum()) for part in files)
    assert len(rows) > 5
    columns = ["timesteps", "r", "l"]
    np.testing.assert_array_equal(*(table.sort_values(columns)[columns] for table in (episodes, rows)))
    assert load_results(str(tmp_path / "run"))["r"].tolist() == episodes["r"].tolist()  # SB3 reads the file, too


# Resume within a run: a run that is killed at 99 % started again at 0.
@pytest.mark.parametrize("label", ["ano", *(pytest.param(label, marks=pytest.mark.slow) for label in ("ppo", "trpo"))])
def test_a_killed_run_resumes_from_its_checkpoint_as_if_nothing_had_happened(label, tmp_path, monkeypatch):
    assert inspect.signature(train).parameters["checkpoint_seconds"].default == 60.0
    run = small_run(label, points=4, steps=640, **NORMALIZED)
    whole, killed = (tmp_path / name / run.name for name in ("whole", "killed"))
    train(run, whole)
    measure, measured = recording.measure_update, []

    def killing(model, rollout):
        measured.append(model.num_timesteps)
        if measured == [128, 256, 384]:
            raise KeyboardInterrupt
        return measure(model, rollout)

    monkeypatch.setattr(recording, "measure_update", killing)
    with pytest.raises(KeyboardInterrupt):
        train(run, killed, checkpoint_seconds=0.0)
    train(run, killed, checkpoint_seconds=0.0)
    assert measured == [128, 256, 384, 384, 512, 640]  # the last checkpoint is that after 256 steps
    made, resumed = read_run(whole), read_run(killed)
    assert (made.document["resumed_at"], resumed.document["resumed_at"]) == (None, 256)
    assert_same_run(made, resumed)
    assert resumed.updates()["time/seconds"].is_monotonic_increasing
    assert not (killed / "checkpoints").exists()


def test_the_files_tell_what_was_run_and_the_evaluation_is_that_of_sb3_with_the_saved_model(tmp_path, monkeypatch):
    hyperparameters, steps = {"normalize": {"clip_obs": 5.0}}, [128, 256, 384, 512, 640]
    run = small_run("ano", grid=["clip_range=0.1"], points=4, steps=600, hyperparameters=hyperparameters)
    passed = [0]  # in seconds, of a clock on which measurements and evaluations take an hour each
    clock = {name: lambda name=name: getattr(time, name)() + sum(passed) for name in ("time", "perf_counter")}
    monkeypatch.setattr(recording, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + sum(passed) * 10**9, **clock))
    for name in ("measure_update", "evaluate_policy"):
        slow = getattr(recording, name)
        monkeypatch.setattr(recording, name, lambda *args, slow=slow, **more: passed.append(3600) or slow(*args, **more))
    path = tmp_path / run.name
    train(run, path)
    made = read_run(path)
    document, updates = made.document, made.updates()
    expected = {**dataclasses.asdict(run), "imports": [], "name": run.name, "changed": {"clip_range": 0.1}, "threads": 1}
    expected |= {"timesteps": 640, "backend": "auto", "backend_used": "gymnasium", "commit": commit()}
    assert document.items() >= expected.items()
    # PyPI's wheels do not name their build in their metadata.
    assert document["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert 0 < updates["time/seconds"].iloc[-1] <= document["seconds"] + 0.0005 < 3600  # the rows have milliseconds
    assert {file.name for file in path.iterdir()} == {*document["sha256"], "run.json"} == {*training.FILES, "run.json"}
    assert updates["time/total_timesteps"].tolist() == steps
    np.testing.assert_allclose(updates["train/learning_rate"], [1e-3 * max(0, 1 - step / 600) for step in steps], atol=1e-12)
    with np.load(path / "evaluations.npz") as content:
        assert content["timesteps"].tolist() == steps[1:]  # due after 150, 300, 450 and 600
        assert content["results"].shape == content["ep_lengths"].shape == (4, 3)
        results, lengths = content["results"][-1], content["ep_lengths"][-1]
    fresh = make_env(run, 3)
    env = VecNormalize.load(str(path / "vecnormalize.pkl"), fresh)
    assert (env.clip_obs, env.gamma) == (5.0, run.hyperparameters["gamma"])
    env.training = env.norm_reward = False
    env.seed(500_000 + 3 * env.num_envs)
    returns, expected = evaluate_policy(CLASSES["ano"].load(path / "model.zip"), env, 3, return_episode_rewards=True)
    np.testing.assert_allclose(results, returns, rtol=1e-12)
    assert made.evaluations().iloc[-1].tolist() == pytest.approx([640, np.mean(returns), np.std(returns)])
    assert lengths.tolist() == expected == [200] * 3


def test_frames_are_stacked_above_the_normalization_as_in_the_zoo(tmp_path):
    run = small_run("ppo", points=2, hyperparameters={"normalize": True, "frame_stack": 3, "learning_rate": 1e-3})
    check_runs([run])
    train(run, tmp_path)
    env = VecFrameStack(VecNormalize(make_vec_env(run.env_id, 2), gamma=run.hyperparameters["gamma"]), 3)
    arguments = {name: value for name, value in run.hyperparameters.items() if name in constructor_parameters(PPO)}
    expected = PPO(env=env, seed=0, device="cpu", **arguments).learn(run.total_timesteps)
    made = PPO.load(tmp_path / "model.zip")
    assert torch.equal(parameters(made), parameters(expected))
    env = VecFrameStack(VecNormalize.load(str(tmp_path / "vecnormalize.pkl"), make_env(run, 3)), 3)
    env.venv.training = env.venv.norm_reward = False
    env.seed(500_000 + env.num_envs)
    last = RunFiles(tmp_path, {}).evaluations().iloc[-1].tolist()
    assert last == pytest.approx([512, *evaluate_policy(made, env, 3)])


@pytest.mark.parametrize("label", [name for name in CLASSES if "_" in name])
def test_algorithms_with_lstm_policies_and_masks_are_trained_and_evaluated(label, tmp_path, monkeypatch):
    env_id = "TwoAllowed-v0" if "mask" in label else "CartPole-v1"
    monkeypatch.setitem(gym.registry, "TwoAllowed-v0", gym.envs.registration.EnvSpec("TwoAllowed-v0", TwoAllowed))
    run = small_run(label, env_id, steps=256, points=2)
    train(run, tmp_path)
    made = RunFiles(tmp_path, {})
    assert made.evaluations()["timesteps"].tolist() == [128, 256]
    updates = made.updates()
    # Over the whole rollout it is about that of the last minibatches, if masks and states are those of the rollout.
    np.testing.assert_allclose(updates["update/kl_after"], updates["train/approx_kl"], rtol=1.0, atol=1e-5)
    assert np.isfinite(updates["update/outside_after"]).all()


@pytest.mark.parametrize("label", ["ppo", "ppo_lstm"])
def test_an_accelerated_run_is_another_run_with_the_same_numbers_to_rounding(label, tmp_path):
    runs = {name: small_run(name, steps=256) for name in (label, f"{label}:accelerate=true", f"{label}:accelerate=false")}
    plain, accelerated, default = (run.identity for run in runs.values())
    assert plain == default != accelerated
    for run in runs.values():
        train(run, tmp_path / run.algorithm)
    rows = [RunFiles(tmp_path / run.algorithm, {}).updates().drop(columns="time/seconds") for run in runs.values()]
    pd.testing.assert_frame_equal(rows[0], rows[2])
    columns = ["train/loss", "train/approx_kl", "update/kl_after"]
    pd.testing.assert_frame_equal(rows[0][columns], rows[1][columns], rtol=1e-3, atol=1e-4)


def test_accelerate_is_an_option_of_algorithms_of_other_packages_and_is_true_or_false():
    with pytest.raises(ValueError, match="unknown option of ano 'accelerate'"):
        small_run("ano:accelerate=true")
    with pytest.raises(ValueError, match="accelerate='fast' is not allowed; allowed are True and False"):
        trained_alone(small_run("ppo:accelerate=fast"))


def test_seeds_share_no_environment_and_algorithms_have_the_same():
    first = {}
    for label, seed in (("ppo", 0), ("ppo", 1), ("ano", 1), ("trpo", 1)):
        run = small_run(label, seed=seed, hyperparameters={"n_envs": 4})
        train_env, evaluation = make_env(run, 4), make_env(run, 3)
        make_model(run, train_env)
        evaluation.seed(1_000_000 * seed + 500_000)
        first[label, seed] = [tuple(observation) for env in (train_env, evaluation) for observation in env.reset()]
    assert first["ppo", 1] == first["ano", 1] == first["trpo", 1]
    assert len({*first["ppo", 0], *first["ppo", 1]}) == 2 * (4 + 3)


def test_modules_that_register_tasks_are_imported_where_a_run_is_trained(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(gym.registry, "Mine-v0", None)
    (tmp_path / "my_own_tasks.py").write_text("import gymnasium as gym\ngym.registry['Mine-v0'] = gym.spec('Pendulum-v1')\n")
    run = json.loads(json.dumps(dataclasses.asdict(small_run("ano", "Mine-v0", steps=128, imports=["my_own_tasks"]))))
    training.train_request({"run": run, "directory": str(tmp_path / "run")})
    assert len(RunFiles(tmp_path / "run", {}).evaluations()) == 1


def test_env_wrapper_is_around_the_environments_of_training_and_evaluation(tmp_path, monkeypatch):
    pytest.importorskip("rl_zoo3")
    for name in ("Bare-v0", "Stacked-v0"):
        monkeypatch.setitem(gym.registry, name, dataclasses.replace(gym.spec("Pendulum-v1"), id=name))
    gym.registry["Stacked-v0"].entry_point = lambda **settings: FrameStackObservation(PendulumEnv(**settings), 2)
    wrapper = {"env_wrapper": [{"gymnasium.wrappers.FrameStackObservation": {"stack_size": 2}}]}
    ours, bare = (small_run("ano", "Bare-v0", points=2, hyperparameters=part) for part in (wrapper, {}))
    theirs = small_run("ano", "Stacked-v0", points=2)
    check_runs([ours])
    for run in (ours, theirs):
        train(run, tmp_path / run.name)
    assert ours.identity != bare.identity
    assert_same_run(read_run(tmp_path / ours.name), read_run(tmp_path / theirs.name))
    assert make_env(ours, 1).observation_space.shape == (2, 3)


@pytest.mark.parametrize("label", ["ppo", "ano", "trpo"])
def test_the_measure_of_an_update_is_the_closed_form_of_two_gaussians(label, monkeypatch):
    two_numbers = gym.envs.registration.EnvSpec("Two-v0", lambda: TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS))
    monkeypatch.setitem(gym.registry, "Two-v0", two_numbers)
    model = trained_alone(small_run(label, "Two-v0", steps=128, hyperparameters={"learning_rate": 1e-9}))
    shift, scale = 0.3, 1.25
    actions, old_log_prob = (getattr(model.rollout_buffer, name).reshape(128, -1) for name in ("actions", "log_probs"))
    observations = torch.as_tensor(model.rollout_buffer.observations.reshape(128, -1))
    with torch.no_grad():
        std = model.policy.log_std.exp().numpy().copy()
        mean = model.policy.get_distribution(observations).distribution.mean.numpy()
        model.policy.action_net.bias += shift
        model.policy.log_std += np.log(scale)
    after = -0.5 * ((actions - mean - shift) / (std * scale)) ** 2 - np.log(std * scale) - 0.5 * np.log(2 * np.pi)
    log_ratio = after.sum(axis=1) - old_log_prob[:, 0]
    ratio = np.exp(log_ratio)
    found = recording.measure_update(model, model.rollout_buffer)
    expected = {"kl_after": (ratio - 1 - log_ratio).mean(), "ratio_mean_after": ratio.mean(), "ratio_max_after": ratio.max()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    outside = float((np.abs(ratio - 1) > 0.2).mean())
    assert 0.1 < outside < 0.9
    assert np.isnan(found["outside_after"]) if label == "trpo" else found["outside_after"] == outside


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="device='cuda' is not allowed; PyTorch finds no CUDA device here"):
        train(small_run("ano"), tmp_path, device="cuda")
