"""What is not built in is stored by name, and supplied by whoever loads the agent."""

import gymnasium as gym
import pytest
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_ano import ANO, SPO
from sb3_ano.hub import SafeFormatError, load_safe, save_safe
from tests.common import parameters, pseudo_huber
from tests.hub.agents import acts_like, document, rewrite, trained


def test_a_shape_of_ones_own_is_stored_by_name_and_supplied_by_the_caller(tmp_path):
    model = trained(shaping=pseudo_huber)
    with pytest.warns(
        UserWarning,
        match="stored by name only, because not built in: shaping; .* passes them to load_safe, a shape as shaping=",
    ):
        save_safe(model, tmp_path / "agent")
    with pytest.raises(SafeFormatError, match="trained with shaping='tests.common:pseudo_huber', which is not built in"):
        load_safe(tmp_path / "agent")
    for given in (pseudo_huber, "tests.common:pseudo_huber"):
        loaded = load_safe(tmp_path / "agent", "CartPole-v1", shaping=given)
        assert loaded._shape.f is pseudo_huber
        loaded.learn(32)
    with pytest.warns(UserWarning, match="the given shaping= is another function"):
        assert load_safe(tmp_path / "agent", shaping="spo").shaping == "spo"


@pytest.mark.parametrize("shaping", ["spo", ("ano", "ppo"), ["ppo", "identity"]], ids=str)
def test_built_in_shapes_come_back_by_name(shaping, tmp_path):
    model = trained(shaping=shaping)
    loaded = load_safe(save_safe(model, tmp_path / "agent"))
    assert loaded._shape == model._shape


def test_spo_takes_no_shape_here_either(tmp_path):
    save_safe(trained(SPO), tmp_path / "agent")
    with pytest.raises(TypeError, match="shaping='ano' is given, but .* holds an agent of SPO"):
        load_safe(tmp_path / "agent", shaping="ano")


def square_root(progress_remaining):
    return 1e-3 * progress_remaining**0.5


@pytest.mark.parametrize("argument", ["learning_rate", "clip_range", "clip_range_high"])
def test_with_a_schedule_of_ones_own_the_agent_acts_but_is_not_trained_without_it(argument, tmp_path):
    model = trained(**{argument: square_root})
    with pytest.warns(UserWarning, match=f"stored by name only, because not built in: {argument}; "):
        save_safe(model, tmp_path / "agent", include_optimizer=True)
    loaded = load_safe(tmp_path / "agent", "CartPole-v1")
    assert acts_like(loaded, model)
    with pytest.raises(SafeFormatError, match=f"{argument} was the schedule .*:square_root.*{argument}': ..."):
        loaded.learn(64, reset_num_timesteps=False)
    with pytest.warns(UserWarning, match="stored by name only"):
        save_safe(loaded, tmp_path / "again")  # nothing more is lost
    assert document(tmp_path / "again")["arguments"][argument] == document(tmp_path / "agent")["arguments"][argument]
    model.save(tmp_path / "model.zip")
    zipped = ANO.load(tmp_path / "model.zip", env=gym.make("CartPole-v1")).learn(64, reset_num_timesteps=False)
    again = load_safe(tmp_path / "agent", "CartPole-v1", custom_objects={argument: square_root})
    again.learn(64, reset_num_timesteps=False)
    assert torch.equal(parameters(again), parameters(zipped))


class Halved(BaseFeaturesExtractor):
    def __init__(self, observation_space, width=6):
        super().__init__(observation_space, width)
        self.layer = torch.nn.Linear(observation_space.shape[0], width)

    def forward(self, observations):
        return self.layer(observations) / 2


class OwnPolicy(ActorCriticPolicy):
    def __init__(self, *args, offset=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.offset = offset


def test_classes_of_ones_own_are_supplied_by_the_caller(tmp_path):
    options = {"features_extractor_class": Halved, "features_extractor_kwargs": {"width": 5}, "offset": 0.25}
    model = trained(policy=OwnPolicy, policy_kwargs=options)
    name = "policy_kwargs.features_extractor_class"
    with pytest.warns(UserWarning, match=f"not built in: policy, {name}; "):
        save_safe(model, tmp_path / "agent")
    with pytest.raises(
        SafeFormatError, match=r"policy was '.*:OwnPolicy', which is not built in.*custom_objects=\{'policy': ...\}"
    ):
        load_safe(tmp_path / "agent")
    with pytest.raises(SafeFormatError, match=rf"{name} was '.*:Halved'.*custom_objects=\{{'{name}': ...\}}"):
        load_safe(tmp_path / "agent", custom_objects={"policy": OwnPolicy})
    loaded = load_safe(tmp_path / "agent", custom_objects={"policy": OwnPolicy, name: Halved})
    assert (type(loaded.policy), loaded.policy.offset) == (OwnPolicy, 0.25)
    assert acts_like(loaded, model)
    whole = load_safe(tmp_path / "agent", custom_objects={"policy": OwnPolicy, "policy_kwargs": options})
    assert acts_like(whole, model)


class LooksAtNumbers(Halved):
    """Cannot be built without memory, because it asks for the value of a parameter."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.sign = float(self.layer.weight.detach().sum().sign())


def test_a_class_that_cannot_be_built_without_memory_is_compared_afterwards(tmp_path):
    name = "policy_kwargs.features_extractor_class"
    model = trained(policy_kwargs={"features_extractor_class": LooksAtNumbers})
    with pytest.warns(UserWarning, match="stored by name only"):
        save_safe(model, tmp_path / "agent")
    assert acts_like(load_safe(tmp_path / "agent", custom_objects={name: LooksAtNumbers}), model)
    rewrite(tmp_path / "agent", lambda content: content["arguments"]["policy_kwargs"].update(net_arch=[65]))
    with pytest.raises(SafeFormatError, match="unlike the policy|but that of the policy"):
        load_safe(tmp_path / "agent", custom_objects={name: LooksAtNumbers})


def test_arguments_can_be_replaced(tmp_path):
    save_safe(trained(), tmp_path / "agent")
    replaced = {"n_steps": 64, "clip_range": 0.1, "tensorboard_log": str(tmp_path / "log")}
    loaded = load_safe(tmp_path / "agent", "CartPole-v1", custom_objects=replaced)
    assert (loaded.n_steps, loaded.clip_range(1.0), loaded.tensorboard_log) == (64, 0.1, str(tmp_path / "log"))
    loaded.learn(64)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        (
            {"clip_rang": 0.1},
            TypeError,
            "custom_objects has 'clip_rang', which the agent does not have; allowed are .*'clip_range'",
        ),
        ({"policy_kwargs.net_arc": [1]}, TypeError, r"custom_objects has 'policy_kwargs.net_arc'"),
        ([1], TypeError, r"custom_objects=\[1\] is not allowed"),
        ({"clip_range": -0.1}, SafeFormatError, "clip_range=-0.1 is not allowed"),
        ({"n_steps": 0}, SafeFormatError, "n_steps=0 is not allowed"),
        ({"policy": "OwnPolicy"}, SafeFormatError, "policy='OwnPolicy' is not allowed; allowed are MlpPolicy"),
        ({"policy_kwargs": {"net_arch": [64, 32]}}, SafeFormatError, "but that of the policy that the JSON describes is"),
    ],
)
def test_replacements_that_make_no_sense_are_refused(objects, error, message, tmp_path):
    save_safe(trained(), tmp_path / "agent")
    with pytest.raises(error, match=message):
        load_safe(tmp_path / "agent", custom_objects=objects)
