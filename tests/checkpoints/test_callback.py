"""A run that was interrupted and resumed equals the uninterrupted run bit for bit."""

import gc
import shutil
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import A2C, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano._io import DirectoryLock
from sb3_ano.algorithms.rollout import _needs_no_locals
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import make_vec_env
from tests.checkpoints.programs import ANO_SHORT, EVERY, PPO_SHORT, SHORT, TOTAL, Interrupted, cart_pole, interrupt
from tests.common import needs_compiler, parameters
from tests.tiny_envs import BOX_ACTIONS, DICT_OBSERVATIONS, tiny_vec_env


class Anneal(BaseCallback):
    """Draw random numbers and change the algorithm, as a user's callback with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def _on_rollout_start(self) -> None:
        self.model.ent_coef += 0.01 * self.generator.random() * torch.rand(1).item()

    def _on_step(self) -> bool:
        return True


class Rows(KVWriter):
    """Keep the rows of the log, without times."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def write(self, key_values, key_excluded, step=0) -> None:
        self.rows.append({"step": step} | {key: value for key, value in key_values.items() if not key.startswith("time/")})


def cheetah(n_envs: int = 1, normalize: bool = False, seed: int = 3) -> VecEnv:
    env = make_vec_env("HalfCheetah-v5", n_envs, backend="gymnasium", seed=seed, env_kwargs={"max_episode_steps": 50})
    return VecNormalize(env) if normalize else env


def linear(progress: float) -> float:
    return 3e-4 * progress


class Program:
    """Model, environments and callbacks as a program builds them when it starts."""

    def __init__(self, make_model: Callable, make_env: Callable[..., VecEnv], directory: Path) -> None:
        torch.manual_seed(np.random.default_rng().integers(2**31))  # another process
        np.random.seed()
        self.model = make_model(make_env())
        eval_env = make_env(seed=11)
        if isinstance(eval_env, VecNormalize):
            eval_env.training = eval_env.norm_reward = False
        self.evaluation = EvalCallback(
            eval_env, n_eval_episodes=1, eval_freq=50, log_path=str(directory), deterministic=False, verbose=0
        )
        self.anneal = Anneal()
        self.log = Rows()
        self.model.set_logger(Logger(None, [self.log]))

    def learn(self, *more: BaseCallback) -> "Program":
        self.model.learn(TOTAL, callback=[self.evaluation, *more, self.anneal])
        return self

    def result(self) -> dict:
        model = self.model
        return {
            "parameters": parameters(model).numpy(),
            "optimizer": [
                {name: tensor.numpy() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
                for state in model.policy.optimizer.state_dict()["state"].values()
            ],
            "steps": (model.num_timesteps, model._n_updates, model._current_progress_remaining),
            "ent_coef": model.ent_coef,
            "episodes": [(episode["r"], episode["l"]) for episode in model.ep_info_buffer],
            "observations": model._last_obs,
            "evaluations": (self.evaluation.evaluations_results, self.evaluation.best_mean_reward),
        }


def resumed(program: Callable[[], Program], directory: Path, at: int = 225) -> Program:
    """Interrupt a run, and run the program again."""
    with pytest.raises(Interrupted):
        program().learn(interrupt(at), TrainingCheckpoints(directory, EVERY, verbose=0))
    again = program()
    assert at - newest_checkpoint(directory).num_timesteps <= EVERY + SHORT["n_steps"] * again.model.n_envs  # lost steps
    return again.learn(TrainingCheckpoints(directory, EVERY, resume=True, verbose=0))


class Reshape(BaseCallback):
    """Change the shape in the middle of a training."""

    def _on_step(self) -> bool:
        if self.num_timesteps == 100:
            self.model.shaping = "spo"
        return True


def test_a_shape_that_a_callback_has_set_is_resumed(tmp_path):
    program = partial(Program, partial(ANO, "MlpPolicy", **ANO_SHORT), cart_pole, tmp_path)
    whole = program().learn(Reshape())
    with pytest.raises(Interrupted):
        program().learn(Reshape(), interrupt(225), TrainingCheckpoints(tmp_path / "checkpoints", EVERY, verbose=0))
    again = program().learn(Reshape(), TrainingCheckpoints(tmp_path / "checkpoints", EVERY, resume=True, verbose=0))
    assert again.model.shaping_name == "spo"
    np.testing.assert_array_equal(parameters(again.model), parameters(whole.model))


LSTM = {"policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]}}
CASES = {
    "ano": (partial(ANO, "MlpPolicy", **ANO_SHORT), cart_pole),
    "ano, cheetah": (partial(ANO, "MlpPolicy", learning_rate=linear, **ANO_SHORT), partial(cheetah, normalize=True)),
    "ano, 4 cheetahs": (partial(ANO, "MlpPolicy", clip_range_high="lin_0.3", **ANO_SHORT), partial(cheetah, 4, True)),
    "spo": (partial(SPO, "MlpPolicy", target_kl=0.01, **ANO_SHORT), partial(cart_pole, 4)),
    "papo": (partial(PAPO, "MlpPolicy", **ANO_SHORT), cheetah),
    "gsde": (partial(ANO, "MlpPolicy", use_sde=True, **ANO_SHORT), cheetah),
    "sb3's ppo": (partial(PPO, "MlpPolicy", **PPO_SHORT), partial(cheetah, normalize=True)),
    "sb3's a2c": (partial(A2C, "MlpPolicy", use_sde=True, **SHORT), cheetah),
    "sb3-contrib's trpo": (partial(TRPO, "MlpPolicy", batch_size=32, **SHORT), cheetah),
    "sb3-contrib's recurrent ppo": (partial(RecurrentPPO, "MlpLstmPolicy", **LSTM, **PPO_SHORT), cart_pole),
    "dictionaries": (
        partial(ANO, "MultiInputPolicy", **ANO_SHORT),
        lambda seed=3: tiny_vec_env(DICT_OBSERVATIONS, BOX_ACTIONS),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(case, tmp_path):
    program = partial(Program, *CASES[case], tmp_path)
    whole, again = program().learn(), resumed(program, tmp_path / "checkpoints")
    np.testing.assert_equal(again.result(), whole.result())
    assert again.log.rows == whole.log.rows[-len(again.log.rows) :]
    assert again.log.rows


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*", "ignore:precision='bfloat16'")
def test_a_resumed_run_equals_the_uninterrupted_one_compiled(precision, tmp_path):
    settings = {**ANO_SHORT, "torch_compile": True, "precision": precision}
    program = partial(Program, partial(ANO, "MlpPolicy", **settings), cheetah, tmp_path)
    whole, again = program().learn(), resumed(program, tmp_path / "checkpoints")
    assert again.model._updater.compiled
    np.testing.assert_equal(again.result(), whole.result())


def test_auto_decides_about_compilation_by_the_whole_run(tmp_path, monkeypatch):
    seen = []
    compiles = ANO._compiles
    monkeypatch.setattr(ANO, "_compiles", lambda model: seen.append(compiles(model)) or False)
    monkeypatch.setattr("sb3_ano.algorithms.compiled.COMPILE_SECONDS", 0.005)  # pays for the whole run, not for the rest of it
    settings = {**ANO_SHORT, "torch_compile": "auto"}
    program = partial(Program, partial(ANO, "MlpPolicy", **settings), cart_pole, tmp_path)
    resumed(program, tmp_path / "checkpoints", at=300)
    assert set(seen) == {True}
    program().model.learn(64)
    assert seen[-1] is False


def test_a_run_resumes_again_and_again_and_skips_a_damaged_checkpoint(tmp_path, capsys):
    program = partial(Program, *CASES["ano"], tmp_path)
    whole = program().learn()
    directory = tmp_path / "checkpoints"
    for at in (5, 100, 65, 200, 195, 319):  # in one process: the locks of those before are released
        with pytest.raises(Interrupted):
            program().learn(interrupt(at), TrainingCheckpoints(directory, 32, resume=True, keep=2, verbose=0))
    newest = newest_checkpoint(directory)
    newest.path.write_bytes(newest.path.read_bytes()[:5000])
    again = program().learn(TrainingCheckpoints(directory, 32, resume=True))
    output = capsys.readouterr().out
    assert f"TrainingCheckpoints: skipped: {newest.path} is not a checkpoint" in output
    assert "TrainingCheckpoints: resumes from" in output
    np.testing.assert_equal(again.result(), whole.result())


def test_checkpoints_change_nothing_in_a_run(tmp_path):
    program = partial(Program, *CASES["gsde"], tmp_path)
    whole = program().learn()
    checked = program().learn(TrainingCheckpoints(tmp_path / "checkpoints", every=32, verbose=0))
    np.testing.assert_equal(checked.result(), whole.result())


def test_checkpoints_of_the_first_version_resume(tmp_path, monkeypatch):
    """format_1.zip was written by version 0.1.0 after 128 of 160 steps."""
    limit = gym.wrappers.TimeLimit
    if limit.__name__ == "PatchedTimeLimit":  # a test in this process has imported rl_zoo3
        monkeypatch.setattr(gym.wrappers, "TimeLimit", limit.__mro__[1])

    class Start(BaseCallback):
        def _on_rollout_start(self) -> None:
            if not hasattr(self, "steps"):
                self.steps, self.parameters = self.num_timesteps, parameters(self.model)
                self.state = env.obs_rms.count, evaluation.n_calls, evaluation.last_mean_reward, len(self.model.ep_info_buffer)

        def _on_step(self) -> bool:
            return True

    shutil.copy(Path(__file__).parent / "format_1.zip", tmp_path / "checkpoint_128_steps.zip")
    env = VecNormalize(cart_pole(2))
    evaluation = EvalCallback(VecNormalize(cart_pole(1), training=False), n_eval_episodes=1, eval_freq=20, verbose=0)
    settings = {**ANO_SHORT, "n_steps": 16, "batch_size": 16, "learning_rate": 1e-3, "policy_kwargs": {"net_arch": [4]}}
    model = ANO("MlpPolicy", env, clip_range="lin_0.3", clip_range_high=0.4, **settings)
    start = Start()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TrainingCheckpoints: .* was .* and is .*: results may differ")  # other packages
        model.learn(160, callback=[evaluation, TrainingCheckpoints(tmp_path, every=32, resume=True), start])
    stored = ANO.load(tmp_path / "checkpoint_128_steps.zip")
    assert torch.equal(start.parameters, parameters(stored))
    assert start.state == (pytest.approx(130, abs=1e-3), 64, 10.0, 6)
    assert model.num_timesteps == 160
    assert newest_checkpoint(tmp_path).num_timesteps == 128  # no rollout starts after 160


def test_a_checkpoint_is_a_model(tmp_path):
    env = cart_pole()
    ANO("MlpPolicy", env, **ANO_SHORT).learn(64, callback=TrainingCheckpoints(tmp_path, every=32))
    loaded = ANO.load(newest_checkpoint(tmp_path).path, env=env)
    assert loaded.num_timesteps == 32
    assert loaded.predict(env.reset())[0].shape == (1,)


def test_checkpoints_follow_steps_or_time(tmp_path):
    def steps(**settings) -> list[int]:
        directory = tmp_path / str(settings)
        ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(160, callback=TrainingCheckpoints(directory, keep=9, **settings))
        return sorted(int(path.name.split("_")[1]) for path in directory.glob("*.zip"))

    assert steps(every=1) == [0, 32, 64, 96, 128]
    assert steps(every=50) == [0, 64, 128]
    assert steps(seconds=0.0) == [0, 32, 64, 96, 128]
    assert steps(seconds=3600.0) == [0]


def test_the_collection_prepares_nothing_for_it(tmp_path):
    checkpoints = TrainingCheckpoints(tmp_path)
    assert _needs_no_locals(CallbackList([checkpoints]))
    assert not _needs_no_locals(CallbackList([checkpoints, Anneal()]))


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("every", 1.5), ("keep", 0), ("seconds", -1.0), ("seconds", float("nan"))]
)
def test_numbers_out_of_range_are_rejected(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name}={value} is not allowed"):
        TrainingCheckpoints(tmp_path, **{name: value})


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A directory with the checkpoints of a run of 96 steps."""
    directory = tmp_path_factory.mktemp("earlier")
    ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(96, callback=TrainingCheckpoints(directory, every=32, verbose=0))
    return directory


@pytest.mark.parametrize(
    ("algorithm", "changed", "total", "message"),
    [
        (ANO, {"n_epochs": 3}, 96, "n_epochs is 3, but 2 in .*checkpoint_64_steps.zip"),
        (
            ANO,
            {"clip_range": lambda progress: 0.3 * progress},
            96,
            r"clip_range is \[0.3, 0.15, 0.0\], but \[0.2, 0.2, 0.2\] in",
        ),
        (ANO, {"policy_kwargs": {"activation_fn": torch.nn.ReLU}}, 96, "policy_kwargs is {'activation_fn': 'ReLU'}"),
        (ANO, {"shaping": "spo"}, 96, "shaping"),
        (ANO, {"seed": 4}, 96, "seed is 4, but 3 in"),
        (SPO, {}, 96, "was written by ANO, not by SPO"),
        (ANO, {}, 64, "total_timesteps=64 is not allowed: .* is already at 64"),
    ],
)
def test_another_training_is_rejected(algorithm, changed, total, message, earlier):
    model = algorithm("MlpPolicy", cart_pole(), **{**ANO_SHORT, **changed})
    with pytest.raises(ValueError, match=message):
        model.learn(total, callback=TrainingCheckpoints(earlier, resume=True))


def test_off_policy_algorithms_and_a_used_directory_are_rejected(earlier):
    with pytest.raises(ValueError, match="cannot store SAC; allowed are on-policy algorithms"):
        SAC("MlpPolicy", "Pendulum-v1").learn(1, callback=TrainingCheckpoints(earlier, resume=True))
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run; resume from them with resume=True"):
        ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(96, callback=TrainingCheckpoints(earlier))


def test_a_run_can_resume_with_a_larger_total(earlier, capsys):
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(128, callback=TrainingCheckpoints(earlier, 10**6, resume=True))
    assert model.num_timesteps == 128
    output = capsys.readouterr().out
    assert "the run was started for 96 steps; schedules now use 128" in output
    assert "checkpoint_64_steps.zip after 64 steps" in output


def test_two_trainings_never_share_a_directory(tmp_path):
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT)
    with DirectoryLock(tmp_path), pytest.raises(BlockingIOError, match="is in use"):
        model.learn(64, callback=TrainingCheckpoints(tmp_path, resume=True))
    assert not list(tmp_path.glob("*.zip"))
    model.learn(64, callback=TrainingCheckpoints(tmp_path))


def test_a_training_that_ended_with_an_exception_releases_its_directory(tmp_path):  # review core 11
    callback = TrainingCheckpoints(tmp_path, EVERY, verbose=0)
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT)
    with pytest.raises(Interrupted):
        model.learn(TOTAL, callback=[callback, interrupt(100)])
    gone = weakref.ref(callback)
    del callback
    gc.collect()
    assert gone() is None, "the model, which the user can keep, does not keep the callback"
    DirectoryLock(tmp_path, patience=0.0).release()  # conflicts as that of another process does


def test_training_continues_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("sb3_ano.checkpoints.callback.write_checkpoint", full)
    with pytest.warns(UserWarning, match="no checkpoint at (0|32) steps, training continues: No space left") as caught:
        model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(64, callback=TrainingCheckpoints(tmp_path, every=32))
    assert len(caught) == 2
    assert model.num_timesteps == 64


def test_a_progress_bar_can_be_added(tmp_path):
    pytest.importorskip("rich")
    with pytest.raises(Interrupted):
        ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(TOTAL, [TrainingCheckpoints(tmp_path, every=32), interrupt(200)])
    model, seen = ANO("MlpPolicy", cart_pole(), **ANO_SHORT), []

    class Look(Anneal):
        def _on_rollout_start(self) -> None:
            seen.append([bar.pbar.n for bar in self.locals["callback"].callbacks if hasattr(bar, "pbar")])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's, about its bars
        model.learn(TOTAL, [TrainingCheckpoints(tmp_path, every=32, resume=True), Look()], progress_bar=True)
    assert seen[0] == [192]
    assert model.num_timesteps == TOTAL


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
def test_envpool_resumes_with_new_episodes_and_a_warning(tmp_path):
    pytest.importorskip("envpool")

    def training() -> ANO:
        return ANO("MlpPolicy", VecNormalize(make_vec_env("CartPole-v1", 4, backend="envpool", seed=0)), **ANO_SHORT)

    with pytest.raises(Interrupted):
        training().learn(512, callback=[TrainingCheckpoints(tmp_path, every=128), interrupt(300)])
    model = training()
    first = model.env.reset()
    with pytest.warns(UserWarning, match="the state of EnvPoolVecEnv cannot be stored: new episodes start"):
        model.learn(512, callback=TrainingCheckpoints(tmp_path, every=128, resume=True, verbose=0))
    assert model.num_timesteps == 512
    assert model.get_vec_normalize_env().obs_rms.count > 512  # of all steps, not only of those since
    assert not np.array_equal(first, model._last_obs)


def test_the_end_of_a_training_that_did_not_start_is_no_error(tmp_path):
    TrainingCheckpoints(tmp_path).on_training_end()  # RL Zoo calls it whatever happened
