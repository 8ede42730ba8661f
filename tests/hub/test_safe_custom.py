"""Require custom parts from whoever loads the agent, and an unchanged directory if a part cannot be stored."""

import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import SafeFormatError, download_run, load_safe, save_safe
from sb3_ano.hub.safe_format import describe
from tests.common import parameters, pseudo_huber
from tests.hub.agents import CustomPolicy, acts_like, rewrite, trained

EXTRACTOR = "policy_kwargs.features_extractor_class"


def saved(model, path):
    """Save an agent, and check which of its parts only the caller can supply."""
    objects: dict = {}
    describe(model, objects)
    custom = ", ".join(sorted(objects)) or "shaping"
    warning = f"stored by name only, because not built in: {custom}; .* passes them to load_safe, a shape as shaping="
    with pytest.warns(UserWarning, match=warning):
        return save_safe(model, path), objects


def test_a_custom_shape_is_stored_by_name_and_supplied_by_the_caller(hub, packed, tmp_path):
    agent, _ = saved(trained(shaping=pseudo_huber), tmp_path / "agent")
    with pytest.raises(SafeFormatError, match="trained with shaping='tests.common:pseudo_huber', which is not built in"):
        load_safe(agent)
    hub.add("somebody/agent", packed | {path.name: path.read_bytes() for path in agent.iterdir()})
    with pytest.raises(SafeFormatError, match="which is not built in"):
        download_run("somebody/agent", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for given in (pseudo_huber, "tests.common:pseudo_huber"):
        loaded = load_safe(agent, "CartPole-v1", shaping=given)
        assert loaded._shape.f is pseudo_huber
        loaded.learn(32)
    with pytest.warns(UserWarning, match="the given shaping= is another function"):
        assert load_safe(agent, shaping="spo").shaping == "spo"
    with pytest.raises(TypeError, match="shaping='ano' is given, but .* holds an agent of SPO"):
        load_safe(save_safe(trained(SPO), tmp_path / "spo"), shaping="ano")


def square_root(progress_remaining):
    return 1e-3 * progress_remaining**0.5


class Squared(LinearSchedule):
    """A subclass of a schedule that the format knows."""

    def __call__(self, progress_remaining):
        return super().__call__(progress_remaining) ** 2


class LooksAtNumbers(BaseFeaturesExtractor):
    """Cannot be built without memory, because it asks for the value of a parameter."""

    def __init__(self, observation_space, width=6):
        super().__init__(observation_space, width)
        self.layer = torch.nn.Linear(observation_space.shape[0], width)
        self.sign = float(self.layer.weight.detach().sum().sign())

    def forward(self, observations):
        return self.layer(observations)


@pytest.mark.parametrize(
    ("options", "policy_kwargs"),
    [
        ({"learning_rate": square_root, "clip_range_high": Squared(0.5, 0.1, 1.0), "desired_kl": square_root}, {}),
        ({"policy": CustomPolicy}, {"features_extractor_class": LooksAtNumbers, "features_extractor_kwargs": {"width": 5}}),
        *[({"policy": CustomPolicy}, {"anything": {"part": [value]}}) for value in (object(), {1: 2}, {"$class": "x"}, len)],
    ],
)
def test_what_is_not_built_in_is_named_and_supplied_by_the_caller(options, policy_kwargs, tmp_path):
    model = trained(policy_kwargs={"optimizer_class": torch.optim.SGD, **policy_kwargs}, **options)
    agent, objects = saved(model, tmp_path / "agent")
    for name in objects:
        others = {other: value for other, value in objects.items() if other != name}
        message = rf"{name} was '[\w.]+:\w+', which is not built in.*custom_objects=\{{'{name}': ...\}}"
        with pytest.raises(SafeFormatError, match=message):
            load_safe(agent, custom_objects=others)
    assert acts_like(load_safe(agent, custom_objects=objects), model)
    model.save(tmp_path / "model.zip")
    loads = (lambda env: load_safe(agent, env, custom_objects=objects), lambda env: ANO.load(tmp_path / "model.zip", env))
    resumed = [load(make_vec_env("CartPole-v1")).learn(64, reset_num_timesteps=False) for load in loads]
    assert torch.equal(*map(parameters, resumed))


def test_a_class_that_cannot_be_built_without_memory_is_compared_afterwards(tmp_path):
    agent, objects = saved(trained(policy_kwargs={"features_extractor_class": LooksAtNumbers}), tmp_path / "agent")
    assert list(objects) == [EXTRACTOR]
    rewrite(agent, {"arguments/policy_kwargs/net_arch": [65]})
    with pytest.raises(SafeFormatError, match="but that of the built policy"):
        load_safe(agent, custom_objects=objects)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        ({"clip_rang": 0.1}, TypeError, "has 'clip_rang', which the agent does not have; allowed are .*'clip_range'"),
        ({"n_steps": 0}, SafeFormatError, "n_steps=0 is not allowed"),
        ({"policy": "CustomPolicy"}, SafeFormatError, "policy='CustomPolicy' is not allowed; allowed are MlpPolicy"),
        ({"policy_kwargs": {"net_arch": [64, 32]}}, SafeFormatError, "but that of the policy that the JSON describes is"),
    ],
)
def test_arguments_can_be_replaced_if_this_makes_sense(objects, error, message, sound):
    loaded = load_safe(sound, "CartPole-v1", custom_objects={"n_steps": 64, "clip_range": 0.1})
    assert (loaded.n_steps, loaded.clip_range(1.0)) == (64, 0.1)
    with pytest.raises(error, match=message):
        load_safe(sound, custom_objects=objects)


class Derived(ANO):
    """A subclass, which the format does not know."""


def test_what_cannot_be_stored_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(TypeError, match="model is of class Derived; allowed are SPO, PAPO, ANO"):
        save_safe(trained(Derived, steps=0), tmp_path / "agent")
    model = trained(steps=0)
    model.observation_space = spaces.Tuple([spaces.Discrete(2)])
    with pytest.raises(TypeError, match="cannot be stored; allowed are Box, Discrete"):
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
