"""A run that was interrupted and resumed equals the uninterrupted run bit for bit."""

import gc
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import A2C, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ano import ANO, PAPO, SPO, RecurrentANO, RecurrentMaskableANO
from sb3_ano._io import DirectoryLock
from sb3_ano.algorithms.rollout import _needs_no_locals
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import make_vec_env
from tests.checkpoints.programs import ANO_SHORT, EVERY, PPO_SHORT, SHORT, TOTAL, cart_pole, interrupt, learn, make_ano
from tests.common import needs_compiler, parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, masked_vec_env, tiny_vec_env


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


def cheetah(n_envs: int = 1, normalize: bool = False, *, seed: int) -> VecEnv:
    env = make_vec_env("HalfCheetah-v5", n_envs, backend="gymnasium", seed=seed, env_kwargs={"max_episode_steps": 50})
    return VecNormalize(env) if normalize else env


def linear(progress: float) -> float:
    return 3e-4 * progress


class Program:
    """Model, environments and callbacks as a program builds them when it starts."""

    def __init__(self, make_model: Callable, make_env: Callable[..., VecEnv], directory: Path) -> None:
        torch.manual_seed(np.random.default_rng().integers(2**31))  # another process
        np.random.seed()
        self.model = make_model(make_env(seed=3))
        eval_env = make_env(seed=11)
        if isinstance(eval_env, VecNormalize):
            eval_env.training = eval_env.norm_reward = False
        self.evaluation = EvalCallback(
            eval_env, n_eval_episodes=1, eval_freq=50, log_path=str(directory), deterministic=False, verbose=0
        )
        self.anneal, self.log = Anneal(), Rows()
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
    interrupt(directory, program().learn, at)
    again = program()
    assert at - newest_checkpoint(directory).num_timesteps <= EVERY + SHORT["n_steps"] * again.model.n_envs  # lost steps
    return again.learn(TrainingCheckpoints(directory, EVERY, resume=True, verbose=0))


def compiled(precision: str) -> tuple[Callable, Callable]:
    return partial(ANO, "MlpPolicy", **{**ANO_SHORT, "torch_compile": True, "precision": precision}), cheetah


LSTM = {"policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]}}
CASES = {
    "ano, 4 cheetahs": (partial(make_ano, learning_rate=linear, clip_range_high="lin_0.3"), partial(cheetah, 4, True)),
    "spo": (partial(SPO, "MlpPolicy", target_kl=0.01, **ANO_SHORT), partial(cart_pole, 4)),
    "papo": (partial(PAPO, "MlpPolicy", **ANO_SHORT), cheetah),
    "gsde": (partial(make_ano, use_sde=True), cheetah),
    "sb3's ppo": (partial(PPO, "MlpPolicy", **PPO_SHORT), partial(cheetah, normalize=True)),
    "sb3's a2c": (partial(A2C, "MlpPolicy", use_sde=True, **SHORT), cheetah),
    "sb3-contrib's trpo": (partial(TRPO, "MlpPolicy", batch_size=32, **SHORT), cheetah),
    "sb3-contrib's recurrent ppo": (partial(RecurrentPPO, "MlpLstmPolicy", **LSTM, **PPO_SHORT), cart_pole),
    "recurrent ano": (partial(RecurrentANO, "MlpLstmPolicy", **LSTM, **ANO_SHORT), partial(cart_pole, 2)),
    "masks and lstm": (
        partial(RecurrentMaskableANO, "MlpLstmPolicy", **LSTM, **ANO_SHORT),
        lambda seed: masked_vec_env(BOX_OBSERVATIONS, spaces.Discrete(3)),
    ),
    "dictionaries": (partial(ANO, "MultiInputPolicy", **ANO_SHORT), lambda seed: tiny_vec_env(DICT_OBSERVATIONS, BOX_ACTIONS)),
    "compiled": compiled("float32"),
    "compiled, bfloat16": compiled("bfloat16"),
}
SLOW = [pytest.mark.slow, needs_compiler]


@pytest.mark.parametrize("case", [pytest.param(name, marks=SLOW if "compiled" in name else []) for name in CASES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::UserWarning:torch.*", "ignore:precision='bfloat16'")
def test_a_resumed_run_equals_the_uninterrupted_one(case, tmp_path):
    program = partial(Program, *CASES[case], tmp_path)
    whole, again = program().learn(), resumed(program, tmp_path / "checkpoints")
    np.testing.assert_equal(again.result(), whole.result())
    assert again.log.rows == whole.log.rows[-len(again.log.rows) :]
    assert again.log.rows
    assert "compiled" not in case or again.model._updater.compiled


def test_auto_decides_about_compilation_by_the_whole_run(tmp_path, monkeypatch):
    seen = []
    compiles = ANO._compiles
    monkeypatch.setattr(ANO, "_compiles", lambda model: seen.append(compiles(model)) or False)
    monkeypatch.setattr("sb3_ano.algorithms.compiled.COMPILE_SECONDS", 0.005)  # pays for the whole run, not for the rest of it
    program = partial(Program, partial(make_ano, torch_compile="auto"), cart_pole, tmp_path)
    resumed(program, tmp_path / "checkpoints", at=300)
    assert set(seen) == {True}
    program().model.learn(64)
    assert seen[-1] is False


def test_a_run_resumes_again_and_again_and_skips_a_damaged_checkpoint(tmp_path, capsys):
    program, directory = partial(Program, make_ano, cart_pole, tmp_path), tmp_path / "checkpoints"
    whole = program().learn()
    for at in (5, 100, 65, 200, 195, 319):  # in one process: the locks of those before are released
        interrupt(directory, program().learn, at, every=32)
    newest = newest_checkpoint(directory)
    newest.path.write_bytes(newest.path.read_bytes()[:5000])
    again = program().learn(TrainingCheckpoints(directory, 32, resume=True, verbose=2))
    output = capsys.readouterr().out
    assert f"TrainingCheckpoints: skipped: {newest.path} is not a checkpoint" in output
    assert "TrainingCheckpoints: resumes from" in output
    assert f"TrainingCheckpoints: wrote {directory}" in output
    np.testing.assert_equal(again.result(), whole.result())


def test_checkpoints_of_the_first_version_resume(tmp_path, monkeypatch):
    """format_1.zip was written by version 0.1.0 after 128 of 160 steps."""
    limit = gym.wrappers.TimeLimit
    if limit.__name__ == "PatchedTimeLimit":  # a test in this process has imported rl_zoo3
        monkeypatch.setattr(gym.wrappers, "TimeLimit", limit.__mro__[1])

    class Resumed(TrainingCheckpoints):
        def _restore(self, checkpoint) -> None:
            super()._restore(checkpoint)
            self.state = env.obs_rms.count, evaluation.n_calls, evaluation.last_mean_reward, len(self.model.ep_info_buffer)
            self.parameters = parameters(self.model)

    shutil.copy(Path(__file__).parent / "format_1.zip", tmp_path / "checkpoint_128_steps.zip")
    env = VecNormalize(cart_pole(2))
    evaluation = EvalCallback(VecNormalize(cart_pole(1), training=False), n_eval_episodes=1, eval_freq=20, verbose=0)
    settings = {**ANO_SHORT, "n_steps": 16, "batch_size": 16, "learning_rate": 1e-3, "policy_kwargs": {"net_arch": [4]}}
    model = ANO("MlpPolicy", env, clip_range="lin_0.3", clip_range_high=0.4, **settings)
    resumed = Resumed(tmp_path, every=32, resume=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TrainingCheckpoints: .* was .* and is .*: results may differ")  # other packages
        model.learn(160, callback=[evaluation, resumed])
    assert torch.equal(resumed.parameters, parameters(ANO.load(tmp_path / "checkpoint_128_steps.zip")))
    assert resumed.state == (pytest.approx(130, abs=1e-3), 64, 10.0, 6)
    assert model.num_timesteps == 160
    assert newest_checkpoint(tmp_path).num_timesteps == 128  # no rollout starts after 160


def test_checkpoints_follow_steps_or_time(tmp_path):
    def steps(**settings) -> list[int]:
        directory = tmp_path / str(settings)
        make_ano(cart_pole()).learn(160, callback=TrainingCheckpoints(directory, keep=9, **settings))
        return sorted(int(path.name.split("_")[1]) for path in directory.glob("*.zip"))

    assert steps(every=1) == steps(seconds=0.0) == [0, 32, 64, 96, 128]
    assert steps(every=64) == steps(every=50) == [0, 64, 128]
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
    make_ano(cart_pole()).learn(96, callback=TrainingCheckpoints(directory, every=32, verbose=0))
    return directory


@pytest.mark.parametrize(
    ("changed", "total", "message"),
    [
        ({"n_epochs": 3}, 96, "n_epochs is 3, but 2 in .*checkpoint_64_steps.zip"),
        ({"clip_range": lambda left: 0.3 * left}, 96, r"clip_range is \[0.3, 0.15, 0.0\], but \[0.2, 0.2, 0.2\] in"),
        ({"policy_kwargs": {"activation_fn": torch.nn.ReLU}}, 96, "policy_kwargs is {'activation_fn': 'ReLU'}"),
        ({"shaping": "spo"}, 96, "shaping"),
        ({"seed": 4}, 96, "seed is 4, but 3 in"),
        ({}, 64, "total_timesteps=64 is not allowed: .* is already at 64"),
        (lambda: SPO("MlpPolicy", cart_pole(), **ANO_SHORT), 96, "was written by ANO, not by SPO"),
        (lambda: SAC("MlpPolicy", "Pendulum-v1"), 96, "cannot store SAC; allowed are on-policy algorithms"),
    ],
)
def test_another_training_is_rejected(changed, total, message, earlier):
    model = changed() if callable(changed) else make_ano(cart_pole(), **changed)
    with pytest.raises(ValueError, match=message):
        model.learn(total, callback=TrainingCheckpoints(earlier, resume=True))


def test_a_used_directory_is_rejected_and_resumes_with_a_larger_total(earlier, capsys):
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run; resume from them with resume=True"):
        make_ano(cart_pole()).learn(96, callback=TrainingCheckpoints(earlier))
    loaded = ANO.load(newest_checkpoint(earlier).path)  # a checkpoint is a model, too
    assert (loaded.num_timesteps, loaded.predict(cart_pole().reset())[0].shape) == (64, (1,))
    model = make_ano(cart_pole()).learn(128, callback=TrainingCheckpoints(earlier, 10**6, resume=True))
    assert model.num_timesteps == 128
    output = capsys.readouterr().out
    assert "the run was started for 96 steps; schedules now use 128" in output
    assert "checkpoint_64_steps.zip after 64 steps" in output


def test_two_trainings_never_share_a_directory(tmp_path):
    callback = TrainingCheckpoints(tmp_path, verbose=0)
    with DirectoryLock(tmp_path), pytest.raises(BlockingIOError, match="is in use"):
        make_ano(cart_pole()).learn(64, callback=callback)
    callback.on_training_end()  # RL Zoo calls it whatever happened
    assert not list(tmp_path.glob("*.zip"))
    make_ano(cart_pole()).learn(64, callback=TrainingCheckpoints(tmp_path))


def test_a_training_that_ended_with_an_exception_releases_its_directory(tmp_path):  # review core 11
    model = make_ano(cart_pole())
    interrupt(tmp_path, partial(learn, model), at=100)
    gc.collect()  # the model, which the user can keep, does not keep the callback
    DirectoryLock(tmp_path, patience=0.0).release()  # conflicts as that of another process does


def test_training_continues_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("sb3_ano.checkpoints.callback.write_checkpoint", full)
    with pytest.warns(UserWarning, match="no checkpoint at (0|32) steps, training continues: No space left") as caught:
        model = make_ano(cart_pole()).learn(64, callback=TrainingCheckpoints(tmp_path, every=32))
    assert len(caught) == 2
    assert model.num_timesteps == 64


def test_a_progress_bar_can_be_added(tmp_path):
    pytest.importorskip("rich")
    interrupt(tmp_path, partial(learn, make_ano(cart_pole())), at=200, every=32)
    seen = []

    class Look(TrainingCheckpoints):
        def _restore(self, checkpoint) -> None:
            super()._restore(checkpoint)
            seen.append([bar.pbar.n for bar in self.locals["callback"].callbacks if hasattr(bar, "pbar")])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's, about its bars
        model = make_ano(cart_pole()).learn(TOTAL, Look(tmp_path, every=32, resume=True), progress_bar=True)
    assert seen == [[192]]
    assert model.num_timesteps == TOTAL


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
def test_envpool_resumes_with_new_episodes_and_a_warning(tmp_path):
    pytest.importorskip("envpool")

    def training() -> ANO:
        return make_ano(VecNormalize(make_vec_env("CartPole-v1", 4, backend="envpool", seed=0)))

    interrupt(tmp_path, partial(learn, training()), at=300, every=128)
    model = training()
    first = model.env.reset()
    with pytest.warns(UserWarning, match="the state of EnvPoolVecEnv cannot be stored: new episodes start"):
        model.learn(TOTAL, callback=TrainingCheckpoints(tmp_path, every=128, resume=True, verbose=0))
    assert model.num_timesteps == 384
    assert model.get_vec_normalize_env().obs_rms.count > 384  # of all steps, not only of those since
    assert not np.array_equal(first, model._last_obs)
