"""A run that was interrupted and resumed is the run that was not, bit for bit."""

import fcntl
import gc
import operator
import os
import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial, reduce

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.algorithms.rollout import _sees_nothing
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import make_vec_env
from tests.common import needs_compiler, parameters
from tests.tiny_envs import BOX_ACTIONS, DICT_OBSERVATIONS, tiny_vec_env

TOTAL = 640
SHORT = {"n_steps": 64, "seed": 3, "device": "cpu"}
ANO_SHORT = {**SHORT, "batch_size": 32, "n_epochs": 2, "torch_compile": False}


class Interrupted(BaseException):
    """Not caught by anybody, like a signal."""


class Interrupt(BaseCallback):
    """Ends the process, as far as the training is concerned, in the middle of a rollout."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.at:
            raise Interrupted
        return True


class Anneal(BaseCallback):
    """A user's callback with a state, which draws numbers and changes the algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def _on_rollout_start(self) -> None:
        self.model.ent_coef += 0.01 * self.generator.random() * torch.rand(1).item()

    def _on_step(self) -> bool:
        return True


class Rows(KVWriter):
    """Keeps the rows of the log, without what is about time."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def write(self, key_values, key_excluded, step=0) -> None:
        self.rows.append({"step": step} | {key: value for key, value in key_values.items() if not key.startswith("time/")})


def cheetah(n_envs: int = 1, normalize: bool = False, seed: int = 3) -> VecEnv:
    env = make_vec_env("HalfCheetah-v5", n_envs, backend="gymnasium", seed=seed, env_kwargs={"max_episode_steps": 50})
    return VecNormalize(env) if normalize else env


def cart_pole(n_envs: int = 1, seed: int = 3) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, backend="gymnasium", seed=seed)


def linear(progress: float) -> float:
    return 3e-4 * progress


class Training:
    """Model, environments and callbacks as a program would build them when it is started."""

    def __init__(self, make_model: Callable, make_env: Callable[..., VecEnv], folder) -> None:
        torch.manual_seed(np.random.default_rng().integers(2**31))  # another process
        np.random.seed()
        self.model = make_model(make_env())
        eval_env = make_env(seed=11)
        if isinstance(eval_env, VecNormalize):
            eval_env.training = eval_env.norm_reward = False
        self.evaluation = EvalCallback(
            eval_env, n_eval_episodes=1, eval_freq=50, log_path=str(folder), deterministic=False, verbose=0
        )
        self.anneal = Anneal()
        self.log = Rows()
        self.model.set_logger(Logger(None, [self.log]))

    def learn(self, *more: BaseCallback) -> "Training":
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


def interrupted_and_resumed(make_training: Callable[[], Training], folder, at: int, every: int = 128) -> Training:
    with pytest.raises(Interrupted):
        make_training().learn(Interrupt(at), TrainingCheckpoints(folder, every=every, verbose=0))
    checkpoint = newest_checkpoint(folder)
    resumed = make_training()
    resumed.learn(TrainingCheckpoints(folder, every=every, resume=True, verbose=0))
    assert at - checkpoint.num_timesteps <= every + 64 * resumed.model.n_envs  # what was lost
    return resumed


CASES = {
    "ano": (partial(ANO, "MlpPolicy", **ANO_SHORT), cart_pole),
    "ano, cheetah": (partial(ANO, "MlpPolicy", learning_rate=linear, **ANO_SHORT), partial(cheetah, normalize=True)),
    "ano, 4 cheetahs": (partial(ANO, "MlpPolicy", clip_range_high="lin_0.3", **ANO_SHORT), partial(cheetah, 4, True)),
    "spo": (partial(SPO, "MlpPolicy", target_kl=0.01, **ANO_SHORT), partial(cart_pole, 4)),
    "papo": (partial(PAPO, "MlpPolicy", **ANO_SHORT), cheetah),
    "gsde": (partial(ANO, "MlpPolicy", use_sde=True, **ANO_SHORT), cheetah),
    "sb3's ppo": (partial(PPO, "MlpPolicy", batch_size=32, n_epochs=2, **SHORT), partial(cheetah, normalize=True)),
    "sb3's a2c": (partial(A2C, "MlpPolicy", use_sde=True, **SHORT), cheetah),
    "dictionaries": (
        partial(ANO, "MultiInputPolicy", **ANO_SHORT),
        lambda seed=3: tiny_vec_env(DICT_OBSERVATIONS, BOX_ACTIONS),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(case, tmp_path):
    make_training = partial(Training, *CASES[case], tmp_path)
    whole = make_training().learn()
    resumed = interrupted_and_resumed(make_training, tmp_path / "checkpoints", at=450)
    np.testing.assert_equal(resumed.result(), whole.result())
    assert resumed.log.rows == whole.log.rows[-len(resumed.log.rows) :]
    assert len(resumed.log.rows) > 1


def test_a_resumed_recurrent_run_is_the_uninterrupted_one(tmp_path):
    recurrent = pytest.importorskip("sb3_contrib").RecurrentPPO
    policy = {"lstm_hidden_size": 8, "net_arch": [8]}
    make_model = partial(recurrent, "MlpLstmPolicy", batch_size=32, n_epochs=2, policy_kwargs=policy, **SHORT)
    make_training = partial(Training, make_model, cart_pole, tmp_path)
    whole = make_training().learn()
    resumed = interrupted_and_resumed(make_training, tmp_path / "checkpoints", at=450)
    np.testing.assert_equal(resumed.result(), whole.result())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*", "ignore:precision='bfloat16'")
def test_a_resumed_run_is_the_uninterrupted_one_compiled(precision, tmp_path):
    settings = {**ANO_SHORT, "torch_compile": True, "precision": precision}
    make_training = partial(Training, partial(ANO, "MlpPolicy", **settings), cheetah, tmp_path)
    whole = make_training().learn()
    resumed = interrupted_and_resumed(make_training, tmp_path / "checkpoints", at=450)
    assert resumed.model._step.compiled
    np.testing.assert_equal(resumed.result(), whole.result())


def test_auto_decides_about_compilation_by_the_whole_run(tmp_path, monkeypatch):
    seen = []
    compiles = ANO._compiles
    monkeypatch.setattr(ANO, "_compiles", lambda model: seen.append(compiles(model)) or False)
    monkeypatch.setattr("sb3_ano.algorithms.training.COMPILE_SECONDS", 0.01)  # worth it for all of the run, not for the rest of it
    settings = {**ANO_SHORT, "torch_compile": "auto"}
    make_training = partial(Training, partial(ANO, "MlpPolicy", **settings), cart_pole, tmp_path)
    interrupted_and_resumed(make_training, tmp_path / "checkpoints", at=600)
    assert set(seen) == {True}
    make_training().model.learn(128)
    assert seen[-1] is False


def test_runs_interrupted_again_and_again_go_on(tmp_path):
    make_training = partial(Training, *CASES["ano"], tmp_path)
    whole = make_training().learn()
    folder = tmp_path / "checkpoints"
    for at in (10, 200, 130, 400, 390, 639):
        with pytest.raises(Interrupted):
            make_training().learn(Interrupt(at), TrainingCheckpoints(folder, every=64, resume=True, keep=1, verbose=0))
    resumed = make_training().learn(TrainingCheckpoints(folder, every=64, resume=True, verbose=0))
    np.testing.assert_equal(resumed.result(), whole.result())


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    make_training = partial(Training, *CASES["ano"], tmp_path)
    whole = make_training().learn()
    folder = tmp_path / "checkpoints"
    with pytest.raises(Interrupted):
        make_training().learn(Interrupt(500), TrainingCheckpoints(folder, every=64, verbose=0))
    newest = newest_checkpoint(folder)
    newest.path.write_bytes(newest.path.read_bytes()[:5000])
    resumed = make_training().learn(TrainingCheckpoints(folder, every=64, resume=True))
    assert f"skipped: {newest.path} is no checkpoint" in capsys.readouterr().out
    np.testing.assert_equal(resumed.result(), whole.result())


def test_checkpoints_change_nothing_in_a_run(tmp_path):
    make_training = partial(Training, *CASES["gsde"], tmp_path)
    whole = make_training().learn()
    checked = make_training().learn(TrainingCheckpoints(tmp_path / "checkpoints", every=64, verbose=0))
    np.testing.assert_equal(checked.result(), whole.result())


def test_a_checkpoint_is_a_model(tmp_path):
    env = cart_pole()
    model = ANO("MlpPolicy", env, **ANO_SHORT)
    model.learn(128, callback=TrainingCheckpoints(tmp_path, every=64))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint.num_timesteps == 64
    loaded = ANO.load(checkpoint.path, env=env)
    assert loaded.num_timesteps == 64
    assert loaded.predict(env.reset())[0].shape == (1,)


def test_checkpoints_go_by_steps_or_by_time(tmp_path):
    def steps(**settings) -> list[int]:
        folder = tmp_path / str(settings)
        ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(320, callback=TrainingCheckpoints(folder, keep=9, **settings))
        return sorted(int(path.name.split("_")[1]) for path in folder.iterdir())

    assert steps(every=1) == [0, 64, 128, 192, 256]
    assert steps(every=100) == [0, 128, 256]
    assert steps(seconds=0.0) == [0, 64, 128, 192, 256]
    assert steps(seconds=3600.0) == [0]


def test_the_collection_prepares_nothing_for_it(tmp_path):
    checkpoints = TrainingCheckpoints(tmp_path)
    assert _sees_nothing(CallbackList([checkpoints]))
    assert not _sees_nothing(CallbackList([checkpoints, Anneal()]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0 is not allowed"),
        ({"every": 1.5}, "every=1.5 is not allowed"),
        ({"keep": 0}, "keep=0 is not allowed"),
        ({"seconds": -1.0}, "seconds=-1.0 is not allowed"),
        ({"seconds": float("nan")}, "seconds=nan is not allowed"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TrainingCheckpoints(tmp_path, **settings)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A folder with the checkpoints of a run."""
    folder = tmp_path_factory.mktemp("earlier")
    ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(192, callback=TrainingCheckpoints(folder, every=64, verbose=0))
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_epochs": 3}, "n_epochs is 3, and 2 in .*checkpoint_128_steps.zip"),
        ({"clip_range": lambda progress: 0.3 * progress}, r"clip_range is \[0.3, 0.15, 0.0\], and \[0.2, 0.2, 0.2\] in"),
        ({"policy_kwargs": {"activation_fn": torch.nn.ReLU}}, "policy_kwargs is {'activation_fn': 'ReLU'}"),
        ({"shaping": "spo"}, "shaping"),
        ({"seed": 4}, "seed is 4, and 3 in"),
    ],
)
def test_other_settings_are_refused(changed, message, earlier):
    model = ANO("MlpPolicy", cart_pole(), **{**ANO_SHORT, **changed})
    with pytest.raises(ValueError, match=message):
        model.learn(192, callback=TrainingCheckpoints(earlier, resume=True))


def test_other_algorithms_are_refused(earlier):
    with pytest.raises(ValueError, match="was written by ANO, and not by SPO"):
        SPO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(192, callback=TrainingCheckpoints(earlier, resume=True))
    with pytest.raises(ValueError, match="cannot store SAC; allowed are on-policy algorithms"):
        SAC("MlpPolicy", "Pendulum-v1").learn(1, callback=TrainingCheckpoints(earlier, resume=True))


def test_a_finished_or_a_foreign_folder_is_refused(earlier):
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT)
    with pytest.raises(ValueError, match=r"total_timesteps=128 is not allowed: .* is at 128 already"):
        model.learn(128, callback=TrainingCheckpoints(earlier, resume=True))
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run; resume=True goes on with it"):
        model.learn(192, callback=TrainingCheckpoints(earlier))


def test_a_longer_total_is_told_of(earlier, capsys):
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(256, callback=TrainingCheckpoints(earlier, 10**6, resume=True))
    assert model.num_timesteps == 256
    output = capsys.readouterr().out
    assert "the run was started for 192 steps; schedules now go by 256" in output
    assert "checkpoint_128_steps.zip after 128 steps" in output


def test_two_trainings_never_share_a_folder(tmp_path):
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT)
    try:
        with pytest.raises(BlockingIOError, match="is in use: a training writes its checkpoints there now"):
            model.learn(64, callback=TrainingCheckpoints(tmp_path, resume=True))
        assert list(tmp_path.iterdir()) == []
    finally:
        os.close(other)
    model.learn(64, callback=TrainingCheckpoints(tmp_path))


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("sb3_ano.checkpoints.callback.write_checkpoint", full)
    with pytest.warns(UserWarning, match="no checkpoint at (0|64) steps, the training goes on: No space left") as caught:
        model = ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(128, callback=TrainingCheckpoints(tmp_path, every=64))
    assert len(caught) == 2
    assert model.num_timesteps == 128


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
def test_envpool_goes_on_with_new_episodes_and_says_so(tmp_path):
    pytest.importorskip("envpool")

    def training() -> ANO:
        return ANO("MlpPolicy", VecNormalize(make_vec_env("CartPole-v1", 4, backend="envpool", seed=0)), **ANO_SHORT)

    whole = training()
    with pytest.raises(Interrupted):
        whole.learn(1024, callback=[TrainingCheckpoints(tmp_path, every=256), Interrupt(600)])
    resumed = training()
    first = resumed.env.reset()
    with pytest.warns(UserWarning, match="the state of EnvPoolVecEnv cannot be stored: new episodes begin"):
        resumed.learn(1024, callback=TrainingCheckpoints(tmp_path, every=256, resume=True, verbose=0))
    assert resumed.num_timesteps == 1024
    assert resumed.get_vec_normalize_env().obs_rms.count > 1024  # of all steps, not only of those since
    assert not np.array_equal(first, resumed._last_obs)


def test_a_callback_that_cannot_be_pickled_is_told_of_once(tmp_path, capsys):
    anneal = Anneal()
    anneal.stream = (number for number in range(3))
    ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(192, callback=[TrainingCheckpoints(tmp_path, every=64), anneal])
    assert capsys.readouterr().out.count("checkpoints are without callback Anneal 0.stream, which cannot be pickled") == 1


def test_a_progress_bar_may_come_and_go(tmp_path):
    pytest.importorskip("rich")
    folder = tmp_path / "checkpoints"
    env = cart_pole()
    with pytest.raises(Interrupted):
        ANO("MlpPolicy", env, **ANO_SHORT).learn(TOTAL, callback=[TrainingCheckpoints(folder, every=64), Interrupt(300)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tqdm, about its bars
        resumed = ANO("MlpPolicy", env, **ANO_SHORT)
        resumed.learn(TOTAL, callback=TrainingCheckpoints(folder, every=64, resume=True), progress_bar=True)
    assert resumed.num_timesteps == TOTAL


BRIEF = 320
ANO_BRIEF = {**ANO_SHORT, "n_steps": 32}


class Event(BaseCallback):
    """A callback that changes something once, at the end of the rollout of step 128: its state cannot be found anew."""

    def __init__(self, change: Callable[["Event"], None]) -> None:
        super().__init__()
        self.change = change
        self.phase = "explore"

    def _on_rollout_end(self) -> None:
        if self.num_timesteps == 128:
            self.change(self)
        self.model.ent_coef = 0.1 if "exploit" in self.phase else 0.0

    def _on_step(self) -> bool:
        return True


class LowerRate(Event):
    """Keeps the optimizer, and changes it at an event after the resumption."""

    def _on_training_start(self) -> None:
        self.optimizer, self.log_std = self.model.policy.optimizer, self.model.policy.action_net.bias

    def _on_rollout_end(self) -> None:
        if self.num_timesteps == 256:
            with torch.no_grad():
                self.log_std.fill_(0.5)


class Switching(gym.Wrapper):
    """Switches its reward after some steps, by the function that it calls."""

    def __init__(self, env: gym.Env, other: Callable[["Switching"], Callable]) -> None:
        super().__init__(env)
        self.steps, self.other, self.reward = 0, other, self.same

    def same(self, reward: float) -> float:
        return reward

    def negative(self, reward: float) -> float:
        return -reward

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.steps += 1
        if self.steps == 100:
            self.reward = self.other(self)
        return observation, self.reward(reward), *rest


def switching(other: Callable[[Switching], Callable]) -> Callable[[], VecEnv]:
    def make() -> VecEnv:
        env = DummyVecEnv([lambda: Switching(gym.make("CartPole-v1"), other)])
        env.seed(3)
        return env

    return make


def halved(progress: float) -> float:
    return 5e-4 * progress


def assign(name: str, value: object) -> Callable[[Event], None]:
    """Set an attribute of the callback, such as ``model.clip_range``."""

    def change(callback: Event) -> None:
        *owners, attribute = name.split(".")
        setattr(reduce(getattr, owners, callback), attribute, value)

    return change


def freeze(callback: Event) -> None:
    callback.model.policy.action_net.requires_grad_(False)


def interrupted_model(tmp_path, make_model: Callable, make_env: Callable, make_callback: Callable) -> tuple:
    """Models of an uninterrupted run and of one that is to be resumed from its checkpoint at 192 steps."""
    whole = make_model(make_env())
    whole.learn(BRIEF, callback=make_callback())
    checkpoints = TrainingCheckpoints(tmp_path, every=64, verbose=0)
    with pytest.raises(Interrupted):
        make_model(make_env()).learn(BRIEF, callback=[make_callback(), checkpoints, Interrupt(220)])
    return whole, make_model(make_env())


# What review core 9 found to be lost without a word.
EXACT = {
    "a callback's text": (assign("phase", "exploit"), cart_pole),
    "a new learning rate": (assign("model.lr_schedule", FloatSchedule(3e-3)), cart_pole),
    "a learning rate that is a function": (assign("model.lr_schedule", FloatSchedule(halved)), cart_pole),
    "a new clip_range": (assign("model.clip_range", FloatSchedule(0.5)), cart_pole),
    "frozen parameters": (freeze, cart_pole),
    "the buffer's gamma": (assign("model.rollout_buffer.gamma", 0.5), cart_pole),
    "a method of an environment": (assign("phase", "explore"), switching(lambda env: env.negative)),
    "a function of an environment": (assign("phase", "explore"), switching(lambda env: operator.neg)),
}


@pytest.mark.parametrize(("case", "algorithm"), [("a callback's text", PPO), *((case, ANO) for case in EXACT)])
def test_what_a_callback_or_an_environment_has_changed_is_restored(case, algorithm, tmp_path):
    change, make_env = EXACT[case]
    settings = ANO_BRIEF if algorithm is ANO else {**SHORT, "n_steps": 32, "batch_size": 32, "n_epochs": 2}
    make_model = partial(algorithm, "MlpPolicy", **settings)
    whole, resumed = interrupted_model(tmp_path, make_model, make_env, lambda: Event(change))
    resumed.learn(BRIEF, callback=[Event(change), TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0)])
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_callback_that_refers_to_the_policy_refers_to_it_again(tmp_path):
    make_model = partial(ANO, "MlpPolicy", **ANO_BRIEF)
    whole, resumed = interrupted_model(tmp_path, make_model, cart_pole, lambda: LowerRate(freeze))
    callback = LowerRate(freeze)
    resumed.learn(BRIEF, callback=[callback, TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0)])
    assert callback.optimizer is resumed.policy.optimizer
    assert torch.equal(parameters(resumed), parameters(whole))


NAMED = {
    "callback Event 0.phase": (assign("phase", "phases/exploit"), cart_pole),
    "callback Event 0.stream": (assign("stream", iter(number for number in range(3))), cart_pole),
    "model.lr_schedule": (assign("model.lr_schedule", FloatSchedule(lambda progress: 1e-3 * progress)), cart_pole),
    "model.clip_range": (assign("model.clip_range", lambda progress: 0.5), cart_pole),
    "model.env.envs[0].reward": (assign("phase", "explore"), switching(lambda env: lambda reward: -reward)),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_restored_is_named(name, tmp_path):
    change, make_env = NAMED[name]
    make_model = partial(ANO, "MlpPolicy", **ANO_BRIEF)
    _, resumed = interrupted_model(tmp_path, make_model, make_env, lambda: Event(change))
    with pytest.warns(UserWarning, match=re.escape(f"TrainingCheckpoints: {name} cannot be restored and stay")) as caught:
        resumed.learn(BRIEF, callback=[Event(change), TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0)])
    assert len(caught) == 1


def test_code_that_the_program_builds_again_is_not_named(tmp_path):
    def build(factor: float) -> ANO:
        env = DummyVecEnv([lambda: gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: factor * reward)])
        return ANO("MlpPolicy", env, learning_rate=lambda progress: factor * progress, **ANO_BRIEF)

    def run(model: ANO, *more: BaseCallback) -> ANO:
        return model.learn(BRIEF, callback=[Event(lambda event: None), *more])

    with pytest.raises(Interrupted):
        run(build(1e-3), TrainingCheckpoints(tmp_path, every=64, verbose=0), Interrupt(220))
    resumed = run(build(1e-3), TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0))
    assert torch.equal(parameters(resumed), parameters(run(build(1e-3))))


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
@pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type:UserWarning")
def test_an_evaluation_whose_environment_has_no_state_is_named(tmp_path):
    pytest.importorskip("envpool")

    def evaluation() -> EvalCallback:
        return EvalCallback(
            make_vec_env("CartPole-v1", 2, backend="envpool", seed=0), n_eval_episodes=1, eval_freq=10**6, verbose=0
        )

    make_model = partial(ANO, "MlpPolicy", **ANO_BRIEF)
    whole, resumed = interrupted_model(tmp_path, make_model, cart_pole, evaluation)
    with pytest.warns(UserWarning, match="callback EvalCallback 0.eval_env cannot be restored"):
        resumed.learn(BRIEF, callback=[evaluation(), TrainingCheckpoints(tmp_path, every=64, resume=True, verbose=0)])
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_program_without_a_class_of_the_checkpoint_is_refused(tmp_path, monkeypatch):
    make_model = partial(ANO, "MlpPolicy", **ANO_BRIEF)
    make_event = partial(Event, assign("model.lr_schedule", FloatSchedule(halved)))
    _, resumed = interrupted_model(tmp_path, make_model, cart_pole, make_event)
    monkeypatch.delitem(globals(), "halved")
    with pytest.raises(ValueError, match="the checkpoint holds an object that this program does not define: .*halved"):
        resumed.learn(BRIEF, callback=[make_event(), TrainingCheckpoints(tmp_path, resume=True, verbose=0)])


def test_a_training_that_ended_with_an_exception_leaves_its_folder_to_others(tmp_path):  # review core 11
    callback = TrainingCheckpoints(tmp_path, every=64, verbose=0)
    model = ANO("MlpPolicy", cart_pole(), **ANO_BRIEF)
    with pytest.raises(Interrupted):
        model.learn(BRIEF, callback=[callback, Interrupt(100)])
    gone = weakref.ref(callback)
    del callback
    gc.collect()
    assert gone() is None, "the model, which the user may keep, does not keep it"
    other = os.open(tmp_path, os.O_RDONLY)  # a lock conflicts as that of another process does
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
