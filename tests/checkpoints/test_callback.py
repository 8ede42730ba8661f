"""A run that was interrupted and resumed equals the uninterrupted run bit for bit."""

import gc
import io
import itertools
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import A2C, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback, ProgressBarCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize

from sb3_ano import ANO, PAPO, SPO, RecurrentMaskableANO, accelerate, explain
from sb3_ano._io import DirectoryLock
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import make_vec_env
from sb3_ano.fast.rules import needs_no_locals
from tests.checkpoints.programs import (
    ANO_SHORT,
    PPO_SHORT,
    TOTAL,
    Interrupted,
    Program,
    assert_same,
    cart_pole,
    interrupt,
    make_ano,
    resume,
)
from tests.common import needs_compiler, parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, masked_vec_env, tiny_vec_env


class Anneal(BaseCallback):
    """Draw random numbers and change the algorithm, as a user's callback with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def _on_rollout_start(self) -> None:
        self.model.ent_coef += 0.01 * self.generator.random() * torch.rand(1).item() * random.random()

    def _on_step(self) -> bool:
        return True


def cheetah(n_envs: int = 1, normalize: bool = False, seed: int = 3) -> VecEnv:
    env = make_vec_env("HalfCheetah-v5", n_envs, backend="gymnasium", seed=seed, env_kwargs={"max_episode_steps": 50})
    return VecNormalize(env) if normalize else env


def linear(progress: float) -> float:
    return 3e-4 * progress


def evaluated_and_annealed(make_env, directory: Path) -> list[BaseCallback]:
    env = make_env(seed=11)
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    options = {"n_eval_episodes": 1, "eval_freq": 50, "log_path": str(directory), "deterministic": False, "verbose": 0}
    return [EvalCallback(env, **options), Anneal()]


def tiny(make, *spaces):
    return lambda seed=3: make(*spaces)


LSTM = {"policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]}}
SB3 = {"n_steps": 32, "seed": 3, "device": "cpu"}
MASKED = partial(RecurrentMaskableANO, "MlpLstmPolicy", **LSTM, **ANO_SHORT)
CASES = {
    "ano, 4 cheetahs": (partial(make_ano, learning_rate=linear, clip_range_high="lin_0.3"), partial(cheetah, 4, True)),
    "spo": (partial(SPO, "MlpPolicy", target_kl=0.01, **ANO_SHORT), partial(cart_pole, 4)),
    "papo": (partial(PAPO, "MlpPolicy", **ANO_SHORT), cheetah),
    "gsde": (partial(make_ano, use_sde=True), cheetah),
    "sb3's a2c": (partial(A2C, "MlpPolicy", use_sde=True, **SB3), partial(cheetah, normalize=True)),
    "sb3-contrib's trpo": (partial(TRPO, "MlpPolicy", batch_size=32, **SB3), cheetah),
    "sb3-contrib's recurrent ppo": (partial(RecurrentPPO, "MlpLstmPolicy", **LSTM, **PPO_SHORT), cart_pole),
    "masks and lstm": (MASKED, tiny(masked_vec_env, BOX_OBSERVATIONS, spaces.Discrete(3))),
    "dictionaries": (partial(ANO, "MultiInputPolicy", **ANO_SHORT), tiny(tiny_vec_env, DICT_OBSERVATIONS, BOX_ACTIONS)),
    "compiled": (partial(make_ano, torch_compile=True), cheetah),
    "compiled, bfloat16": (partial(make_ano, torch_compile=True, precision="bfloat16"), cheetah),
}
SLOW = [pytest.mark.slow, needs_compiler]


@pytest.mark.parametrize("case", [pytest.param(name, marks=SLOW if "compiled" in name else []) for name in CASES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::UserWarning:torch.*", "ignore:precision='bfloat16'")
def test_a_resumed_run_equals_the_uninterrupted_one(case, tmp_path):
    make_model, make_env = CASES[case]
    program = partial(Program, partial(evaluated_and_annealed, make_env, tmp_path), make_env, make_model)
    whole, again = program().learn(), program()
    interrupt(tmp_path / "checkpoints", program())
    assert_same(resume(tmp_path / "checkpoints", again), whole)
    assert "compiled" not in case or explain(again.model).compilation.path == "compiled"


def test_a_run_resumes_again_and_again_and_skips_a_damaged_checkpoint(tmp_path, capsys):
    pytest.importorskip("rich")
    program, directory = partial(Program, partial(evaluated_and_annealed, cart_pole, tmp_path)), tmp_path / "checkpoints"
    whole = program().learn()
    for at in (5, 100, 65, 200, 195, 319):  # in one process: the locks of those before are released
        interrupt(directory, program(), at, every=32)
    newest = newest_checkpoint(directory)
    newest.path.write_bytes(newest.path.read_bytes()[:5000])
    again, bar = program(), ProgressBarCallback()
    again.callbacks.append(bar)  # can be added, and shows the whole run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's, about its bars
        assert_same(resume(directory, again, every=32, verbose=2), whole)
    assert bar.pbar.n == again.model.num_timesteps
    output = capsys.readouterr().out
    assert f"TrainingCheckpoints: skipped: {newest.path} is not a checkpoint" in output
    assert "TrainingCheckpoints: resumes from" in output
    assert f"TrainingCheckpoints: wrote {directory}" in output


def test_a_checkpoint_outlives_damaged_ones_that_are_further(tmp_path):
    make_ano(cart_pole()).learn(320, callback=TrainingCheckpoints(tmp_path, every=64, verbose=0))
    for path in tmp_path.glob("*.zip"):
        path.write_bytes(path.read_bytes()[:1000])
    interrupt(tmp_path, Program(), at=100, every=32)
    assert sorted(path.name for path in tmp_path.glob("*.zip")) == [f"checkpoint_{n}_steps.zip" for n in (32, 64, 96)]
    assert newest_checkpoint(tmp_path).num_timesteps == 96


@pytest.mark.parametrize("resume", [True, False])
def test_a_callback_that_is_used_again_is_as_a_new_one(resume, tmp_path):
    callback, whole = TrainingCheckpoints(tmp_path, 32, resume=resume, verbose=0), Program().learn()
    model = make_ano(cart_pole())
    with pytest.raises(Interrupted):
        model.learn(TOTAL, callback=[callback, ConvertCallback(stop_at(200))])
    if not resume:
        with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
            model.learn(TOTAL, callback=callback)
        return
    assert torch.equal(parameters(model.learn(TOTAL, callback=callback)), parameters(whole.model))
    assert newest_checkpoint(tmp_path).num_timesteps == TOTAL - 32
    model.learn(64, callback=callback, reset_num_timesteps=False)  # which continues
    assert newest_checkpoint(tmp_path).num_timesteps == TOTAL + 32


def stop_at(steps: int) -> Callable:
    def stop(variables: dict, _: dict) -> bool:
        if variables["self"].num_timesteps >= steps:
            raise Interrupted
        return True

    return stop


def square(x: torch.Tensor) -> torch.Tensor:
    return x - 0.5 * x.square()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("shape", "shaping_fingerprint is "),
        ("normalize", "VecNormalize is .*'norm_reward': False.*, but .*'norm_reward': True"),
    ],
)
def test_changed_shapes_and_normalization_are_noticed(changed, message, tmp_path, monkeypatch):
    def learn(**options: bool) -> None:
        make_ano(VecNormalize(cart_pole(), **options), shaping=square).learn(
            96, callback=TrainingCheckpoints(tmp_path, 32, resume=True, verbose=0)
        )

    learn()
    options = {"norm_reward": False} if changed == "normalize" else {}
    if changed == "shape":
        monkeypatch.setattr(f"{__name__}.square", lambda x: x.clamp(max=1.0))
        square.__qualname__, square.__name__ = "square", "square"
    with pytest.raises(ValueError, match=message):
        learn(**options)


def test_checkpoints_follow_steps_or_time(tmp_path):
    def steps(**settings) -> list[int]:
        directory = tmp_path / str(settings)
        make_ano(cart_pole()).learn(160, callback=TrainingCheckpoints(directory, keep=9, **settings))
        return sorted(int(path.name.split("_")[1]) for path in directory.glob("*.zip"))

    assert steps(every=1) == steps(seconds=0.0) == [0, 32, 64, 96, 128]
    assert steps(every=64) == steps(every=50) == [0, 64, 128]
    assert steps(seconds=3600.0) == [0]
    default = TrainingCheckpoints(tmp_path)
    assert (default.every, default.seconds, default.keep) == (None, 60.0, 3)
    # The collection of rollouts prepares nothing for it.
    assert needs_no_locals(CallbackList([default]))


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("every", 1.5), ("keep", 0), ("seconds", -1.0), ("seconds", float("nan"))]
)
def test_numbers_out_of_range_are_rejected(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name}={value} is not allowed"):
        TrainingCheckpoints(tmp_path, **{name: value})


class Renamed(ANO):
    """Pass most arguments on, as SB3's users do in their own classes."""

    def __init__(self, more: int, **arguments: object) -> None:
        super().__init__("MlpPolicy", cart_pole(), **ANO_SHORT, **arguments)
        self.more = more


Renamed.__name__ = "ANO"  # the algorithm of the checkpoint


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A directory with the checkpoints of a run of 96 steps."""
    directory = tmp_path_factory.mktemp("earlier")
    make_ano(cart_pole()).learn(96, callback=TrainingCheckpoints(directory, every=32, verbose=0))
    return directory


@pytest.mark.parametrize(
    ("changed", "total", "message"),
    [
        ({"n_epochs": 3}, 96, "n_epochs is 3, but 2 in .*checkpoint_64_steps.zip; resume with the same settings"),
        ({"clip_range": lambda left: 0.3 * left}, 96, r"clip_range is \[0.3, 0.15, 0.0\], but \[0.2, 0.2, 0.2\] in"),
        ({"policy_kwargs": {"activation_fn": torch.nn.ReLU}}, 96, "policy_kwargs is {'activation_fn': 'ReLU'}"),
        ({"shaping": "spo"}, 96, "shaping is spo, but ano in"),
        ({}, 64, "total_timesteps=64 is not allowed: .* is already at 64"),
        ({}, 40, "total_timesteps=40 is not allowed: .* is already at 64 of 96; to continue a later call of learn, load that"),
        (lambda: Renamed(3, gamma=0.9), 96, "gamma is 0.9, but 0.99 in"),
        (lambda: SPO("MlpPolicy", cart_pole(), **ANO_SHORT), 96, "algorithm is SPO, but ANO in"),
        (lambda: SAC("MlpPolicy", "Pendulum-v1"), 96, "cannot store SAC; allowed are on-policy algorithms"),
    ],
)
def test_another_training_is_rejected(changed, total, message, earlier):
    model = changed() if callable(changed) else make_ano(cart_pole(), **changed)
    with pytest.raises(ValueError, match=message):
        model.learn(total, callback=TrainingCheckpoints(earlier, resume=True))


def test_a_used_directory_is_rejected_and_resumes_with_a_larger_total(earlier, capsys, monkeypatch):
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run; resume from them with resume=True"):
        make_ano(cart_pole()).learn(96, callback=TrainingCheckpoints(earlier))
    loaded = ANO.load(newest_checkpoint(earlier).path)  # a checkpoint is a model, too
    assert (loaded.num_timesteps, loaded.predict(cart_pole().reset())[0].shape) == (64, (1,))
    monkeypatch.setattr("platform.python_version", lambda: "3.99")
    with pytest.warns(UserWarning, match=r"python was 3.* and is 3\.99: results may differ"):
        model = make_ano(cart_pole()).learn(128, callback=TrainingCheckpoints(earlier, 10**6, resume=True))
    assert model.num_timesteps == 128
    output = capsys.readouterr().out
    assert "the run was started for 96 steps; schedules now use 128" in output
    assert "checkpoint_64_steps.zip after 64 steps" in output


def test_two_trainings_never_share_a_directory(tmp_path):
    program, callback = Program(), TrainingCheckpoints(tmp_path, verbose=0)
    with DirectoryLock(tmp_path), pytest.raises(BlockingIOError, match="is in use"):
        program.learn(callback)
    callback.on_training_end()  # RL Zoo calls it whatever happened
    assert not list(tmp_path.glob("*.zip"))
    # A training that ended with an exception releases its directory.
    interrupt(tmp_path, program, at=100)
    gc.collect()  # the model, which the user can keep, does not keep the callback
    DirectoryLock(tmp_path, patience=0.0).release()  # conflicts as that of another process does


def test_two_threads_never_share_a_directory(tmp_path):
    is_started, may_end = threading.Event(), threading.Event()

    class Waiting(BaseCallback):
        def _on_step(self) -> bool:
            is_started.set()
            return may_end.wait(60)

    def learn() -> None:
        make_ano(cart_pole()).learn(64, callback=[TrainingCheckpoints(tmp_path, 32, keep=1, verbose=0), Waiting()])

    thread = threading.Thread(target=learn, name="first")
    thread.start()
    assert is_started.wait(60)
    with pytest.raises(BlockingIOError, match="the thread first of this process writes to it now"):
        make_ano(cart_pole()).learn(64, callback=TrainingCheckpoints(tmp_path, 32, resume=True, verbose=0))
    may_end.set()
    thread.join()
    assert newest_checkpoint(tmp_path).num_timesteps == 32


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_process(tmp_path):
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        _held = DirectoryLock(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(child).encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(reading, 20))
    try:
        with pytest.raises(BlockingIOError):
            DirectoryLock(tmp_path, patience=0.0)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        DirectoryLock(tmp_path, patience=0.0).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_training_continues_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("sb3_ano.checkpoints.callback.write_checkpoint", full)
    with pytest.warns(UserWarning, match="no checkpoint at (0|32) steps, training continues: No space left") as caught:
        model = make_ano(cart_pole()).learn(64, callback=TrainingCheckpoints(tmp_path, every=32))
    assert len(caught) == 2
    assert model.num_timesteps == 64


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
def test_envpool_resumes_with_new_episodes_and_a_warning(tmp_path):
    pytest.importorskip("envpool")

    def training() -> Program:
        return Program(make_env=lambda: VecNormalize(make_vec_env("CartPole-v1", 4, backend="envpool", seed=0)))

    interrupt(tmp_path, training(), at=300, every=128)
    again = training()
    model, pool, other = again.model, again.model.env.unwrapped, training().model.env.unwrapped
    reset, starts, earlier = pool.reset, [], [other.reset(), other.reset()]
    pool.reset = lambda: starts.append(reset()) or starts[-1]
    with pytest.warns(UserWarning, match="the state of EnvPoolVecEnv cannot be stored: new episodes start"):
        resume(tmp_path, again, every=128)
    assert model.num_timesteps == 384
    assert model.get_vec_normalize_env().obs_rms.count > 384  # of all steps, not only of those since
    np.testing.assert_array_equal(starts[0], earlier[0])
    assert not any(np.array_equal(starts[-1], start) for start in earlier)  # those are of the seed of the program


class Connection:
    """Is closed by its finalizer, as PyBullet's ``BulletClient``; another object with its number would use its simulator."""

    opened = itertools.count()
    simulators: ClassVar[dict[int, list]] = {}

    def __init__(self) -> None:
        self.number = next(self.opened)
        self.simulators[self.number] = []

    def step(self) -> int:
        self.simulators[self.number].append("step")  # a KeyError if it is closed
        return len(self.simulators[self.number])

    def __del__(self) -> None:
        self.simulators.pop(self.number, None)


class Connected(gym.Wrapper):
    """Connect at the first reset, as PyBullet's environments do, and count the steps of an episode in the simulator."""

    number = -1

    def reset(self, **kwargs) -> tuple:
        if self.number < 0:
            self.connection = Connection()
            self.number = self.connection.number
        self.steps = 0
        self.connection.simulators[self.number].clear()
        return super().reset(**kwargs)

    def step(self, action) -> tuple:
        self.steps += 1
        assert self.connection.step() == self.steps
        return super().step(action)


def pybullet_cheetah() -> gym.Env:
    pytest.importorskip("pybullet_envs_gymnasium")
    return gym.make("HalfCheetahBulletEnv-v0", max_episode_steps=50)


@pytest.mark.parametrize(
    ("make_one", "kind"),
    [(lambda: Connected(gym.make("CartPole-v1")), "Connected"), (pybullet_cheetah, "HalfCheetahBulletEnv")],
    ids=["connection", "pybullet"],
)
def test_simulators_behind_a_connection_resume_with_new_episodes_and_a_warning(make_one, kind, tmp_path):
    def training() -> Program:
        evaluation = EvalCallback(VecMonitor(DummyVecEnv([make_one])), eval_freq=50, n_eval_episodes=1, verbose=0)
        return Program(lambda: [evaluation], lambda: VecMonitor(DummyVecEnv([make_one, make_one])))

    interrupt(tmp_path, training())
    again = training()
    with (
        pytest.warns(UserWarning, match=f"the state of {kind} cannot be stored: new episodes start"),
        pytest.warns(UserWarning, match=r"EvalCallback 0\.eval_env\.\S+ cannot be restored and stay as"),
    ):
        resume(tmp_path, again)
    assert again.model.num_timesteps == TOTAL
    assert again.callbacks[0].n_calls == TOTAL // 2  # some of them before the interruption
    again.model.env.close()


@pytest.mark.parametrize(
    "make_model",
    [partial(make_ano, use_sde=True), partial(RecurrentPPO, "MlpLstmPolicy", **LSTM, **PPO_SHORT)],
    ids=["gsde", "lstm"],
)
def test_a_checkpoint_of_a_gpu_resumes_without_one(make_model, tmp_path, monkeypatch):
    """Tensors are stored with the name of their device, which is that of a GPU here."""
    program = partial(Program, list, cheetah, make_model)
    whole, save = program().learn(), TrainingCheckpoints._save

    def save_as_on_a_gpu(self: TrainingCheckpoints) -> None:
        content = io.BytesIO()
        self.model.save(content)
        with monkeypatch.context() as patch:
            patch.setattr(self.model, "save", lambda file: file.write(content.getvalue()))
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
            save(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingCheckpoints, "_save", save_as_on_a_gpu)
        interrupt(tmp_path, program())
    with pytest.raises(RuntimeError, match="CUDA"):
        pickle.loads(newest_checkpoint(tmp_path).state)
    assert_same(resume(tmp_path, program()), whole)


@pytest.mark.parametrize("resumed_as", ["accelerated", "plain"])
def test_an_accelerated_training_resumes_exactly_accelerated_or_not(resumed_as, tmp_path):
    def make(accelerates: bool) -> PPO:
        model = PPO("MlpPolicy", cart_pole(), n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu")
        return accelerate(model, torch_compile=False) if accelerates else model

    expected = make(accelerates=True).learn(192)
    make(accelerates=True).learn(192, callback=[TrainingCheckpoints(tmp_path, every=64, verbose=0), StopAfter(128)])
    model = make(accelerates=resumed_as == "accelerated")
    model.learn(192, callback=TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0))
    assert model.num_timesteps == 192
    torch.testing.assert_close(parameters(model), parameters(expected), rtol=1e-5, atol=1e-6)


class StopAfter(BaseCallback):
    """Ends a training, as a kill would, after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def _on_step(self) -> bool:
        return self.num_timesteps <= self.steps
