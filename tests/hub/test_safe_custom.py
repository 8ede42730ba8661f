"""What is not built in is supplied by whoever loads the agent; what cannot be stored leaves the directory as it was."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import SafeFormatError, load_safe, save_safe
from sb3_ano.hub.evaluation import custom_objects
from tests.common import parameters, pseudo_huber
from tests.hub.agents import CustomPolicy, acts_like, rewrite, trained

EXTRACTOR = "policy_kwargs.features_extractor_class"


def saved(model, path, custom):
    """Save an agent, and check which of its parts only the caller can supply."""
    warning = f"stored by name only, because not built in: {custom}; .* passes them to load_safe, a shape as shaping="
    with pytest.warns(UserWarning, match=warning):
        return save_safe(model, path)


def test_a_custom_shape_is_stored_by_name_and_supplied_by_the_caller(tmp_path):
    agent = saved(trained(shaping=pseudo_huber), tmp_path / "agent", "shaping")
    with pytest.raises(SafeFormatError, match="trained with shaping='tests.common:pseudo_huber', which is not built in"):
        load_safe(agent)
    for given in (pseudo_huber, "tests.common:pseudo_huber"):
        loaded = load_safe(agent, "CartPole-v1", shaping=given)
        assert loaded._shape.f is pseudo_huber
        loaded.learn(32)
    with pytest.warns(UserWarning, match="the given shaping= is another function"):
        assert load_safe(agent, shaping="spo").shaping == "spo"


def square_root(progress_remaining):
    return 1e-3 * progress_remaining**0.5


class Squared(LinearSchedule):
    """A subclass of a schedule that the format knows."""

    def __call__(self, progress_remaining):
        return super().__call__(progress_remaining) ** 2


class Halved(BaseFeaturesExtractor):
    def __init__(self, observation_space, width=6):
        super().__init__(observation_space, width)
        self.layer = torch.nn.Linear(observation_space.shape[0], width)

    def forward(self, observations):
        return self.layer(observations) / 2


class LooksAtNumbers(Halved):
    """Cannot be built without memory, because it asks for the value of a parameter."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.sign = float(self.layer.weight.detach().sum().sign())


@pytest.mark.parametrize(
    ("options", "policy_kwargs"),
    [
        ({"learning_rate": square_root}, {}),
        ({"clip_range": Squared(0.5, 0.1, 1.0)}, {}),
        ({"desired_kl": square_root}, {}),
        ({}, {"features_extractor_class": LooksAtNumbers}),
        ({"policy": CustomPolicy}, {"features_extractor_class": Halved, "features_extractor_kwargs": {"width": 5}}),
        *[
            ({"policy": CustomPolicy}, {"anything": {"part": [value]}})
            for value in (object(), torch.zeros(2), {1: 2}, {"$class": "x"}, len, np.zeros(2))
        ],
    ],
)
def test_what_is_not_built_in_is_named_and_supplied_by_the_caller(options, policy_kwargs, tmp_path):
    model = trained(policy_kwargs={"optimizer_class": torch.optim.SGD, **policy_kwargs}, **options)
    objects = custom_objects(model)
    agent = saved(model, tmp_path / "agent", ", ".join(sorted(objects)))
    for name in objects:
        others = {other: value for other, value in objects.items() if other != name}
        with pytest.raises(
            SafeFormatError, match=rf"{name} was '[\w.]+:\w+', which is not built in.*custom_objects=\{{'{name}': ...\}}"
        ):
            load_safe(agent, custom_objects=others)
    loaded = load_safe(agent, custom_objects=objects)
    assert acts_like(loaded, model)
    assert all(value is objects[name] for name, value in custom_objects(loaded).items())
    model.save(tmp_path / "model.zip")
    resumed = []
    for load in (
        lambda: load_safe(agent, "CartPole-v1", custom_objects=objects),
        lambda: ANO.load(tmp_path / "model.zip", env="CartPole-v1"),
    ):
        resumed.append(parameters(load().learn(64, reset_num_timesteps=False)))
    assert torch.equal(*resumed)


def test_a_class_that_cannot_be_built_without_memory_is_compared_afterwards(tmp_path):
    agent = saved(trained(policy_kwargs={"features_extractor_class": LooksAtNumbers}), tmp_path / "agent", EXTRACTOR)
    rewrite(agent, {"arguments/policy_kwargs/net_arch": [65]})
    with pytest.raises(SafeFormatError, match="but that of the built policy"):
        load_safe(agent, custom_objects={EXTRACTOR: LooksAtNumbers})


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    return save_safe(trained(SPO), tmp_path_factory.mktemp("replaced") / "agent")


def test_arguments_can_be_replaced(agent, tmp_path):
    replaced = {"n_steps": 64, "clip_range": 0.1, "tensorboard_log": str(tmp_path / "log")}
    loaded = load_safe(agent, "CartPole-v1", custom_objects=replaced)
    assert (loaded.n_steps, loaded.clip_range(1.0), loaded.tensorboard_log) == (64, 0.1, str(tmp_path / "log"))
    loaded.learn(64)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        ({"clip_rang": 0.1}, TypeError, "has 'clip_rang', which the agent does not have; allowed are .*'clip_range'"),
        ({"policy_kwargs.net_arc": [1]}, TypeError, r"custom_objects has 'policy_kwargs.net_arc'"),
        ({"clip_range": -0.1}, SafeFormatError, "clip_range=-0.1 is not allowed"),
        ({"n_steps": 0}, SafeFormatError, "n_steps=0 is not allowed"),
        ({"policy": "CustomPolicy"}, SafeFormatError, "policy='CustomPolicy' is not allowed; allowed are MlpPolicy"),
        ({"policy_kwargs": {"net_arch": [64, 32]}}, SafeFormatError, "but that of the policy that the JSON describes is"),
    ],
)
def test_replacements_that_make_no_sense_are_rejected(objects, error, message, agent):
    with pytest.raises(error, match=message):
        load_safe(agent, custom_objects=objects)


def test_spo_takes_no_shape_here_either(agent):
    with pytest.raises(TypeError, match="shaping='ano' is given, but .* holds an agent of SPO"):
        load_safe(agent, shaping="ano")


class Derived(ANO):
    """A subclass, which the format does not know."""


@pytest.mark.parametrize(
    ("cls", "space"),
    [
        (PPO, None),
        (Derived, None),
        (ANO, spaces.Text(3)),
        (ANO, spaces.Tuple([spaces.Discrete(2)])),
        (ANO, spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})),
    ],
)
def test_what_cannot_be_stored_is_named_and_nothing_is_written(cls, space, tmp_path):
    model = trained(cls, steps=0)
    message = f"model is of class {cls.__name__}; allowed are SPO, PAPO, ANO"
    if space is not None:
        model.observation_space, message = space, "cannot be stored; allowed are Box, Discrete"
    with pytest.raises(TypeError, match=message):
        save_safe(model, tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []


def test_only_agents_are_replaced_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "agent").symlink_to(tmp_path / "disk")
    save_safe(trained(SPO, VecNormalize(make_vec_env("CartPole-v1"))), tmp_path / "agent")
    model = trained(ANO)
    save_safe(model, str(tmp_path / "agent"))
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["policy.safetensors", "sb3_ano.json"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))
    assert (tmp_path / "agent").is_symlink()
    (tmp_path / "disk" / "thesis.tex").write_text("years of work")
    for path, error in ((tmp_path / "agent", FileExistsError), (tmp_path / "disk" / "thesis.tex", NotADirectoryError)):
        with pytest.raises(error, match="thesis.tex"):
            save_safe(model, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "disk"]
    assert (tmp_path / "disk" / "thesis.tex").read_text() == "years of work"
