"""``accelerate``: the same object, class, files and callbacks as without it."""

import copy
import json
import pickle
import zipfile
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ano import ANO, PAPO, accelerate, explain, fast
from tests.algorithms.comparison import traced_only
from tests.common import SMALL, parameters, python
from tests.tiny_envs import BOX_OBSERVATIONS, masked_vec_env


def made(kind: type, **options: Any) -> Any:
    settings = {**SMALL, "device": "cpu", **options}
    if kind.__name__ == "MaskablePPO":
        return kind("MlpPolicy", masked_vec_env(BOX_OBSERVATIONS, spaces.Discrete(4)), **settings)
    if kind.__name__ == "RecurrentPPO":
        return kind("MlpLstmPolicy", gym.make("CartPole-v1"), policy_kwargs={"lstm_hidden_size": 8}, **settings)
    return kind("MlpPolicy", "CartPole-v1", **settings)


KINDS = [(PPO, fast.PPO), (MaskablePPO, fast.MaskablePPO), (RecurrentPPO, fast.RecurrentPPO)]


@pytest.mark.parametrize(("original", "fast_class"), KINDS)
def test_the_model_stays_the_same_object_of_its_class(original, fast_class):
    model = made(original)
    env = model.env
    assert accelerate(model) is model
    assert isinstance(model, original)
    assert isinstance(model, fast_class)
    assert model.env is env
    assert accelerate(model, torch_compile=False) is model
    assert explain(model).compilation.reason in ("torch_compile=False", "LSTM policies are not compiled")


@pytest.mark.parametrize(("original", "fast_class"), KINDS)
def test_the_classes_train_like_accelerated_models(original, fast_class):
    from_class = made(fast_class).learn(128)
    assert torch.equal(parameters(from_class), parameters(accelerate(made(original)).learn(128)))


def data(path: Any) -> dict[str, Any]:
    return json.loads(zipfile.ZipFile(path).read("data"))


@pytest.mark.parametrize(("original", "fast_class"), KINDS)
def test_files_are_those_of_the_original(original, fast_class, tmp_path):
    model = accelerate(made(original)).learn(64)
    model.save(tmp_path / "fast")
    made(original).learn(64).save(tmp_path / "plain")
    assert data(tmp_path / "fast.zip").keys() == data(tmp_path / "plain.zip").keys()
    assert "sb3_ano" not in (tmp_path / "fast.zip").read_bytes().decode("latin-1")

    loaded = accelerate(original.load(tmp_path / "fast", env=made(original).env)).learn(64, reset_num_timesteps=False)
    again = fast_class.load(tmp_path / "fast", env=made(original).env).learn(64, reset_num_timesteps=False)
    assert torch.equal(parameters(loaded), parameters(again))
    assert loaded.num_timesteps == 128


PROGRAM = """
import sys
sys.modules["sb3_ano"] = None  # cannot be imported
import gymnasium as gym
from stable_baselines3 import PPO
model = PPO.load("fast", env=gym.make("CartPole-v1"))
model.learn(64, reset_num_timesteps=False)
print(model.num_timesteps, type(model).__module__)
"""


def test_a_file_loads_and_trains_where_this_package_cannot_be_imported(tmp_path):
    accelerate(made(PPO)).learn(64).save(tmp_path / "fast")
    found = python("-c", PROGRAM, cwd=tmp_path, check=True)
    assert found.stdout.split() == ["128", "stable_baselines3.ppo.ppo"]


def test_policies_can_be_pickled_and_a_copy_of_the_engine_is_a_new_one():
    model = accelerate(made(PPO)).learn(64)
    policy = pickle.loads(pickle.dumps(model.policy.state_dict()))
    for name, value in model.policy.state_dict().items():
        assert torch.equal(policy[name], value)
    assert copy.deepcopy(model.engine).decisions is None


class Overriding(PPO):
    def train(self) -> None:
        super().train()


class Logging(PPO):
    """Overrides what the engine does not stand in for."""

    def dump_logs(self, iteration: int = 0) -> None:
        self.n_dumps = getattr(self, "n_dumps", 0) + 1
        super().dump_logs(iteration)


def test_subclasses_are_accelerated_unless_they_override_what_the_engine_does():
    with pytest.raises(TypeError, match="Overriding overrides train, which the engine stands in for"):
        accelerate(made(Overriding))
    model = accelerate(made(Logging)).learn(64)
    assert isinstance(model, Logging)
    assert model.n_dumps == 2
    assert torch.equal(parameters(model), parameters(accelerate(made(PPO)).learn(64)))


@pytest.mark.parametrize("kind", [A2C, TRPO])
def test_other_algorithms_are_rejected_in_one_line(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} cannot be accelerated; allowed are PPO, MaskablePPO"):
        accelerate(kind("MlpPolicy", "CartPole-v1", device="cpu"))


@pytest.mark.parametrize("options", [{"torch_compile": "yes"}, {"precision": "float16"}])
def test_unknown_settings_are_rejected(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' is not allowed; allowed are"):
        accelerate(made(PPO), **options)


def test_algorithms_of_this_package_get_the_settings():
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    assert accelerate(model, torch_compile=False, precision="bfloat16") is model
    assert (model.torch_compile, model.precision) == (False, "bfloat16")


class Recording(BaseCallback):
    """Keeps the names of local variables, and the values of some."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[set[str]] = []
        self.values: list[Any] = []

    def _on_step(self) -> bool:
        self.names.append({*self.locals})
        self.values.append((self.locals["self"] is self.model, self.locals["n_steps"], self.locals["dones"].tolist()))
        return True


@pytest.mark.parametrize(("original", "fast_class"), KINDS)
def test_callbacks_find_the_local_variables_of_the_original(original, fast_class):
    expected, found = Recording(), Recording()
    made(original).learn(64, callback=expected)
    accelerate(made(original)).learn(64, callback=found)
    assert found.values == expected.values
    for ours, theirs in zip(found.names, expected.names, strict=True):
        assert theirs - {"idx", "done", "done_", "terminal_obs", "terminal_value", "terminal_lstm_state"} <= ours


def test_the_environment_stays_the_users_object():
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    model = accelerate(PPO("MlpPolicy", env, **SMALL, device="cpu"))
    assert model.get_env() is env
    assert isinstance(env, DummyVecEnv)


def test_masks_can_be_switched_off():
    model = accelerate(made(MaskablePPO))
    model.learn(64, use_masking=False)
    assert (model.rollout_buffer.action_masks == 1.0).all()


def test_only_a_known_loss_is_recorded_as_a_graph():
    """A graph would not notice that a custom loss reads an attribute that has changed."""

    class Custom(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            return super().policy_loss(log_ratio, advantages, clip_range, samples) * (1.0 + self._n_updates)

    known = {}
    for kind in (ANO, PAPO, Custom):
        with traced_only():
            model = kind("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True, device="cpu").learn(32)
        known[kind] = model.engine._compiled._known_code
    assert known == {ANO: True, PAPO: True, Custom: False}


def test_another_constant_of_a_loss_needs_other_code():
    with traced_only() as graphs:
        model = PAPO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True, device="cpu").learn(32)
        first = model.engine._compiled
        model.learn(32)
        assert model.engine._compiled is first
        model.omega1 = 0.01
        model.learn(32)
    assert model.engine._compiled is not first
    assert len(graphs) == 2
