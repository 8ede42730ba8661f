"""Rollouts and updates on the device against those in NumPy, on the CPU and, where there is one, on a GPU."""

import dataclasses
import functools

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
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.vec_env import VecMonitor

from sb3_ano import ANO, PAPO, MaskableANO, RecurrentANO, explain
from sb3_ano.envs import VecNormalize, from_tensor_env
from sb3_ano.fast import device, engine, explanation
from sb3_ano.fast.rules import decide
from tests.algorithms.comparison import accelerated, relative_difference
from tests.common import needs_compiler, parameters
from tests.envs.tensor_envs import EXAMPLES, DictEnv, MaskedEnv, Simulator
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, tiny_vec_env

SETTINGS = {"n_steps": 32, "batch_size": 64, "n_epochs": 4, "learning_rate": 1e-3, "seed": 3, "device": "cpu"}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are trying to run .* on the GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*"),  # of the compiler
]


def pendulum(device="cpu"):
    return EXAMPLES.TensorPendulum(8, device, max_steps=20)


CASES = {
    "pendulum": (ANO, "MlpPolicy", pendulum, {}),
    "cartpole": (ANO, "MlpPolicy", lambda device="cpu": EXAMPLES.TensorCartPole(8, device, max_steps=15), {}),
    "Dict": (ANO, "MultiInputPolicy", lambda device="cpu": DictEnv(8, device), {"clip_range_vf": 0.2}),
    "masks": (MaskableANO, "MultiInputPolicy", lambda device="cpu": MaskedEnv(8, device), {}),
    "normalized": (ANO, "MlpPolicy", lambda device="cpu": VecNormalize(pendulum(device), gamma=0.9), {"gamma": 0.9}),
    "batches that do not divide": (ANO, "MlpPolicy", pendulum, {"batch_size": 96, "target_kl": 0.01}),
    "accelerated PPO": (functools.partial(accelerated, PPO), "MlpPolicy", pendulum, {}),
    "PAPO": (PAPO, "MlpPolicy", pendulum, {}),
    "desired_kl": (ANO, "MlpPolicy", pendulum, {"desired_kl": 0.005}),
}


class Blind(BaseCallback):
    """A callback that does not read local variables, and calls a function at each step and at the end of each rollout."""

    reads_locals = False

    def __init__(self, at_step=lambda model: True, at_end=lambda model: None):
        super().__init__()
        self.at_step, self.at_end = at_step, at_end

    def _on_step(self):
        return self.at_step(self.model)

    def _on_rollout_end(self):
        self.at_end(self.model)


def trained(case, rollouts=3, callback=None, **options):
    kind, policy, env, settings = CASES[case]
    options = {**SETTINGS, **settings, "torch_compile": False, **options}
    model = kind(policy, env(options["device"]), **options)
    return model.learn(rollouts * model.n_steps * model.n_envs, callback=callback)


def held(model):
    """The tensors of the last rollout, if it was collected on the device."""
    return getattr(model.rollout_buffer, "held", None)


@pytest.fixture
def in_numpy(monkeypatch):
    """A context in which rollouts are collected in NumPy."""

    def train(*arguments, **options):
        with monkeypatch.context() as patched:
            patched.setattr(engine, "decide", lambda *given: dataclasses.replace(decide(*given), device="not in this test"))
            return trained(*arguments, **options)

    return train


@pytest.mark.filterwarnings("ignore:batch_size=96 does not divide", "ignore:You have specified a mini-batch size")
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_numpy_path(case, in_numpy):
    found, expected = trained(case), in_numpy(case)
    assert held(found)
    assert not held(expected)
    assert relative_difference(expected, found) <= 1e-6
    assert len(found.ep_info_buffer) == len(expected.ep_info_buffer) > 0
    for ours, theirs in zip(found.ep_info_buffer, expected.ep_info_buffer, strict=True):
        assert (ours["r"], ours["l"]) == pytest.approx((theirs["r"], theirs["l"]), abs=1e-4)
    for name, value in expected.logger.name_to_value.items():
        if name.startswith("train/"):
            assert found.logger.name_to_value[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name in ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns", "episode_starts"):
        ours, theirs = getattr(found.rollout_buffer, name), getattr(expected.rollout_buffer, name)
        for key in ours if isinstance(ours, dict) else [None]:
            mine, flat = (ours, theirs) if key is None else (ours[key], theirs[key])
            # SB3's update leaves most arrays flattened, environment by environment.
            swapped = mine if mine.shape == flat.shape else mine.swapaxes(0, 1).reshape(flat.shape)
            np.testing.assert_allclose(swapped, flat, rtol=1e-4, atol=1e-4, err_msg=name)
            assert swapped.dtype == flat.dtype
    different = trained(case, gae_lambda=0.9)
    assert relative_difference(expected, different) > 1e-5


@needs_compiler
@pytest.mark.parametrize("case", ["pendulum", "masks"])
def test_compiled_code_computes_the_same(case):
    assert relative_difference(trained(case), trained(case, torch_compile=True)) <= 1e-5


def test_bfloat16_trains():
    assert torch.isfinite(parameters(trained("pendulum", precision="bfloat16"))).all()


WAITING = ("cpu", "item", "numpy", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "to")


@pytest.mark.parametrize("case", ["pendulum", "cartpole", "Dict", "masks", "normalized"])
def test_nothing_waits_for_the_device_in_a_step(case, monkeypatch):
    counts = {"waits": 0, "counting": False}
    original = {name: getattr(torch.Tensor, name) for name in WAITING}

    def counted(name):
        def call(self, *arguments, **options):
            # ``to`` waits if it changes the device.
            waits = name != "to" or any(isinstance(part, str | torch.device) for part in [*arguments, *options.values()])
            counts["waits"] += counts["counting"] and waits
            return original[name](self, *arguments, **options)

        return call

    for name in WAITING:
        monkeypatch.setattr(torch.Tensor, name, counted(name))

    def at_step(model):
        # From the first step of a rollout to the last one.
        position = (model.num_timesteps // model.n_envs - 1) % model.n_steps
        counts["counting"] = position < model.n_steps - 1
        return True

    trained(case, callback=Blind(at_step))
    assert counts["waits"] == 0


def test_the_count_of_waits_sees_one(monkeypatch):
    advance = EXAMPLES.TensorPendulum.advance

    def waits(self, actions):
        step = advance(self, actions)
        bool(step.truncated.any())
        return step

    monkeypatch.setattr(EXAMPLES.TensorPendulum, "advance", waits)
    with pytest.raises(AssertionError):
        test_nothing_waits_for_the_device_in_a_step("pendulum", monkeypatch)


def test_truncations_are_bootstrapped_with_the_final_observation():
    model = trained("Dict", rollouts=1, learning_rate=1e-12)
    buffer, rollout = model.rollout_buffer, model.engine._device_rollout
    truncated = (rollout._truncated & ~rollout._terminated).numpy()
    assert truncated.any()
    assert rollout._terminated.any()
    age = np.round(buffer.observations["place"][..., 0] * 20.0) + 1
    plain = buffer.actions[..., 0] / 5.0 + 0.1 * age
    with torch.no_grad():
        final = {key: rows.flatten(0, 1) for key, rows in rollout._final.items()}
        values = model.policy.predict_values(final).reshape(truncated.shape).numpy()
    np.testing.assert_allclose(buffer.rewards, plain + model.gamma * values * truncated, rtol=1e-4, atol=1e-4)


def test_without_final_observations_the_value_before_the_step_is_taken():
    env = from_tensor_env(Simulator(""), group="place")
    model = ANO("MlpPolicy", env, **{**SETTINGS, "learning_rate": 1e-12}, torch_compile=False).learn(32 * 4)
    assert held(model)
    buffer, rollout = model.rollout_buffer, model.engine._device_rollout
    truncated = rollout._truncated.numpy()
    assert truncated.any()
    age = np.round(buffer.observations[..., 0] * 20.0) + 1
    plain = np.round(np.clip(buffer.actions[..., 0], -100, 100)) / 5.0 + 0.1 * age
    np.testing.assert_allclose(buffer.rewards, plain + model.gamma * buffer.values * truncated, rtol=1e-4, atol=1e-4)


def test_final_observations_may_be_told_only_at_ends():
    """As by ManiSkill."""

    class OnlyAtEnds(Simulator):
        def step(self, actions):
            *step, extras = super().step(actions)
            return *step, extras if bool((step[2] | step[3]).any()) else {}

    always, at_ends = (
        ANO("MlpPolicy", from_tensor_env(kind(), group="place"), **SETTINGS, torch_compile=False).learn(32 * 4)
        for kind in (Simulator, OnlyAtEnds)
    )
    assert always.engine._device_rollout._is_told.all()
    assert 0 < at_ends.engine._device_rollout._is_told.sum() < 32
    assert relative_difference(always, at_ends) == 0.0


def test_callbacks_read_and_change_the_rollout(in_numpy):
    def halve(model):
        buffer = model.rollout_buffer
        assert buffer.advantages.shape == (32, 8)
        buffer.advantages *= 0.5
        buffer.returns = buffer.advantages + buffer.values

    options = {"callback": Blind(at_end=halve), "normalize_advantage": False}
    found, expected = trained("pendulum", **options), in_numpy("pendulum", **options)
    assert relative_difference(expected, found) <= 1e-6
    assert relative_difference(trained("pendulum", normalize_advantage=False), found) > 1e-5


def test_a_callback_ends_the_training_and_the_next_one_continues():
    model = trained("normalized", callback=Blind(lambda model: model.num_timesteps < 100))
    assert model.num_timesteps == 104
    model.learn(32 * 8, reset_num_timesteps=False)
    assert held(model)


@pytest.mark.parametrize("check_finite", [True, False])
def test_nan_of_an_environment_is_named(check_finite, monkeypatch):
    advance = EXAMPLES.TensorPendulum.advance

    def spoiled(self, actions):
        step = advance(self, actions)
        if self.age[0] == 7:
            step.observations[5, 1] = float("nan")
        return step

    monkeypatch.setattr(EXAMPLES.TensorPendulum, "advance", spoiled)
    if check_finite:
        with pytest.raises(ValueError, match=r"NaN or Inf in the observation of environment 5 at step 7 of the training"):
            trained("pendulum", rollouts=2)
    else:
        with pytest.raises(FloatingPointError, match="all .* minibatches of the update after 256 steps were skipped"):
            trained("pendulum", check_finite=False)


def test_explained_obstacles(tmp_path):
    def reason(kind=ANO, policy="MlpPolicy", env=None, callback=None, **options):
        model = kind(policy, env or pendulum(), **{**SETTINGS, **options})
        if callback is None:
            return decide(model, model.engine_options()).device
        model.learn(1, callback=callback)
        return None if held(model) else "in NumPy"

    assert reason() is None
    assert reason(env=VecNormalize(pendulum())) is None
    assert reason(callback=CheckpointCallback(1000, tmp_path)) is None
    assert reason(callback=CallbackList([EvalCallback(pendulum(), n_eval_episodes=1), Blind()])) is None
    assert "are not a TensorVecEnv" in reason(env=tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    with pytest.warns(UserWarning, match="already wrapped"):
        assert "are not a TensorVecEnv" in reason(env=VecMonitor(pendulum()))
    assert "gSDE" in reason(use_sde=True)
    assert "LSTM" in reason(RecurrentANO, "MlpLstmPolicy")

    class Reader(BaseCallback):
        def _on_step(self):
            return self.locals["rewards"].shape == (8,)

    assert reason(callback=Reader()) == "in NumPy"
    assert reason(callback=StopTrainingOnMaxEpisodes(5)) == "in NumPy"


def test_what_is_not_collected_on_the_device_trains_in_numpy():
    class Reader(BaseCallback):
        count = 0

        def _on_step(self):
            assert isinstance(self.locals["rewards"], np.ndarray)
            assert len(self.locals["infos"]) == 8
            self.count += 1
            return True

    reader = Reader()
    model = trained("pendulum", callback=reader)
    assert reader.count == 96
    assert not held(model)
    model.learn(256)
    assert held(model)
    PPO("MlpPolicy", pendulum(), **SETTINGS).learn(256)
    RecurrentANO("MlpLstmPolicy", pendulum(), **SETTINGS).learn(256)


@pytest.mark.parametrize(
    ("policy", "observations"),
    [
        ("MlpPolicy", BOX_OBSERVATIONS),
        ("MultiInputPolicy", spaces.Dict({"place": BOX_OBSERVATIONS, "kind": spaces.Discrete(3)})),
    ],
)
def test_ordinary_environments_are_hosted(policy, observations, monkeypatch):
    """As on a GPU, with the CPU as the device."""
    settings = {**SETTINGS, "torch_compile": False}

    def make():
        return ANO(policy, tiny_vec_env(observations, BOX_ACTIONS, 4), **settings)

    expected = make().learn(3 * 128)
    monkeypatch.setattr(engine, "decide", lambda *given: dataclasses.replace(decide(*given), device=None))
    found = make()
    truncations = []
    bootstrap = device.HostedRollout._bootstrap

    def spied(self, final, indices):
        truncations.append(len(indices[0]))
        return bootstrap(self, final, indices)

    monkeypatch.setattr(device.HostedRollout, "_bootstrap", spied)
    monkeypatch.setattr(explanation, "decide", engine.decide)
    assert ("a CPU is usually faster" in str(explain(found))) == (policy == "MlpPolicy")
    found.learn(3 * 128)
    assert sum(truncations) > 0
    assert relative_difference(expected, found) <= 1e-6
    assert [episode["r"] for episode in found.ep_info_buffer] == [episode["r"] for episode in expected.ep_info_buffer]


def test_masks_are_not_asked_for_without_masking():
    def train(env):
        model = MaskableANO("MultiInputPolicy", env, **SETTINGS, torch_compile=False)
        return model.learn(32 * 8, use_masking=False)

    found = train(MaskedEnv(8))
    assert held(found)
    assert found.rollout_buffer.action_masks.all()
    assert relative_difference(train(DictEnv(8)), found) == 0.0


@GPU
@pytest.mark.parametrize("case", ["pendulum", "cartpole", "Dict", "masks", "normalized"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_graphs_compute_the_same(case, compiled, monkeypatch):
    options = {"device": "cuda", "torch_compile": compiled, "rollouts": 4}
    found = trained(case, **options)
    assert found.engine._device_rollout._act._graph is not None
    assert found.engine._device_rollout._compute_advantages._graph is not None
    if compiled:
        assert all(step._graph is not None for *_, step in found.engine._compiled._replayed.values())
    monkeypatch.setattr(device.Replayed, "_record", lambda self: False)
    expected = trained(case, **options)
    assert relative_difference(expected, found) <= 1e-4


@GPU
@pytest.mark.parametrize("case", ["pendulum", "cartpole", "Dict", "masks", "normalized"])
def test_nothing_waits_for_the_gpu_in_a_step(case):
    def at_step(model):
        position = (model.num_timesteps // model.n_envs - 1) % model.n_steps
        is_inside = model.num_timesteps > 2 * model.n_steps * model.n_envs and position < model.n_steps - 1
        torch.cuda.set_sync_debug_mode("error" if is_inside else "default")
        return True

    try:
        trained(case, callback=Blind(at_step), device="cuda", torch_compile=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_an_agent_of_the_gpu_acts_on_the_cpu(tmp_path):
    model = trained("pendulum", device="cuda")
    model.save(tmp_path / "agent")
    loaded = ANO.load(tmp_path / "agent", env=pendulum(), device="cpu")
    observations = pendulum().reset()
    np.testing.assert_allclose(
        loaded.predict(observations, deterministic=True)[0], model.predict(observations, deterministic=True)[0], atol=1e-5
    )
    loaded.learn(256)
    assert spaces.Box(-2.0, 2.0, (1,), np.float32) == loaded.action_space
