"""A saved model comes back as what it was trained as, or not at all."""

import copy
import io
import json
import types
import zipfile
from dataclasses import dataclass

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO
from sb3_ano.shaping import from_ratio, spo
from tests.algorithms.comparison import relative_difference, traced_only
from tests.common import ALGORITHMS, SMALL, parameters, pseudo_huber
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env


def trained(cls=ANO, **options):
    return cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """The file of a trained model."""
    path = tmp_path_factory.mktemp("whole") / "model.zip"
    trained().save(path)
    return path.read_bytes()


@pytest.fixture
def saved(whole, tmp_path):
    path = tmp_path / "model.zip"
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize(
    ("policy", "observations", "actions"),
    [
        ("MlpPolicy", BOX_OBSERVATIONS, spaces.MultiBinary(2)),
        ("CnnPolicy", IMAGE_OBSERVATIONS, BOX_ACTIONS),
        ("MultiInputPolicy", DICT_OBSERVATIONS, spaces.MultiDiscrete([2, 3])),
        ("MlpPolicy", spaces.Discrete(5), spaces.Discrete(3)),
    ],
    ids=["MultiBinary", "image", "Dict", "Discrete"],
)
def test_every_policy_learns_and_its_copies_act_and_go_on_like_it(cls, policy, observations, actions, tmp_path):
    env = tiny_vec_env(observations, actions)
    radii = {"clip_range": LinearSchedule(0.2, 0.1, 1.0), "clip_range_high": "lin_0.3", "clip_range_vf": 0.5}
    model = cls(policy, env, **SMALL, **radii)
    before = parameters(model)
    model.learn(64)
    assert parameters(model).isfinite().all()
    assert not torch.equal(parameters(model), before)
    model.save(tmp_path / "model")
    observation = model.observation_space.sample()
    action = model.predict(observation, deterministic=True)[0]
    assert actions.contains(action.squeeze()[()])
    copies = [cls.load(tmp_path / "model", env=env)]
    if policy != "CnnPolicy":  # whose environment SB3 cannot pickle
        copies.append(cloudpickle.loads(cloudpickle.dumps(model)))
    for copied in copies:
        assert torch.equal(parameters(copied), parameters(model))
        assert np.array_equal(copied.predict(observation, deterministic=True)[0], action)
        assert [copied.clip_range(0.5), copied.clip_range_high(0.5)] == pytest.approx([0.15, 0.15])
        copied.learn(64)


def test_files_are_those_of_torchs_adam_in_both_directions(tmp_path):
    model, ppo = trained(shaping="ppo"), trained(PPO)
    states = [each.get_parameters()["policy.optimizer"] for each in (model, ppo)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert [state.keys() for state in states[0]["state"].values()] == [state.keys() for state in states[1]["state"].values()]
    model.save(tmp_path / "model")
    # SB3's own loaders read the file: that of PPO, and set_parameters of another algorithm.
    as_ppo = PPO.load(tmp_path / "model", env=gym.make("CartPole-v1"), n_epochs=3)
    assert type(as_ppo.policy.optimizer) is torch.optim.Adam
    loaded = ANO.load(tmp_path / "model", env=gym.make("CartPole-v1"), n_epochs=3)
    for each in (as_ppo, loaded):
        each.set_random_seed(1)
        each.learn(64, reset_num_timesteps=False)
        assert (each.num_timesteps, each._n_updates) == (128, 4 + 6)
    assert relative_difference(as_ppo, loaded) <= 1e-5
    ppo.save(tmp_path / "ppo")
    model.set_parameters(tmp_path / "ppo")
    assert torch.equal(parameters(model), parameters(ppo))
    model.learn(64)


@pytest.mark.parametrize(
    ("shaping", "stored"),
    [
        (spo, "spo"),
        ("tests.common:pseudo_huber", "tests.common:pseudo_huber"),
        (("ano", pseudo_huber), ["ano", "tests.common:pseudo_huber"]),
    ],
    ids=["built-in", "path", "pair"],
)
def test_the_shape_comes_back_by_its_name(shaping, stored, tmp_path):
    model = trained(shaping=shaping)
    assert model.shaping == shaping
    model.save(tmp_path / "model.zip")
    data = json.loads(zipfile.ZipFile(tmp_path / "model.zip").read("data"))
    assert (data["algorithm"], data["shaping_name"]) == ("ANO", stored)
    ANO.load(tmp_path / "model.zip").save(tmp_path / "again")
    loaded = ANO.load(tmp_path / "again", env=model.get_env())
    assert (loaded.shaping_name, loaded.shaping_fingerprint) == (stored, model.shaping_fingerprint)
    for each in (model, loaded):
        each.set_random_seed(1)
        each.learn(64)
    assert torch.equal(parameters(loaded), parameters(model))


def of_the_main_script():
    function = types.FunctionType(pseudo_huber.__code__, pseudo_huber.__globals__, "pseudo_huber")
    function.__module__ = "__main__"
    return function


@pytest.mark.parametrize(
    "shaping",
    [
        ("ano", lambda x: x - x.square()),
        from_ratio(lambda r, eps: r - (r - 1) ** 2 / eps),
        of_the_main_script(),
        torch.nn.PReLU(init=1.5),
    ],
    ids=["pair with lambda", "closure", "main script", "module"],
)
def test_a_shape_without_a_name_is_warned_about_saved_and_asked_for_when_loading(shaping, tmp_path):
    with pytest.warns(UserWarning, match="cannot be imported by its name.*loads only with shaping="):
        model = trained(shaping=shaping)
    assert getattr(shaping, "weight", 1.5) == 1.5  # the parameter of a module is not trained
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="was trained with shaping=.*pass the function itself as shaping="):
        ANO.load(tmp_path / "model")
    with pytest.warns(UserWarning, match="cannot be imported by its name"):
        loaded = ANO.load(tmp_path / "model", shaping=shaping)
    assert loaded.shaping is shaping
    assert torch.equal(parameters(loaded), parameters(model))


def test_a_shape_that_was_edited_renamed_or_exchanged_is_noticed(tmp_path, monkeypatch):
    trained(shaping=pseudo_huber).save(tmp_path / "model")
    with pytest.warns(UserWarning, match="trained with shaping='tests.common:pseudo_huber'; the given shaping= is another"):
        assert ANO.load(tmp_path / "model", shaping="spo").shaping == "spo"
    monkeypatch.setattr("tests.common.pseudo_huber", lambda x: x - 0.3 * x * x)
    with pytest.raises(ValueError, match="the function of that name is another one now"):
        ANO.load(tmp_path / "model")
    monkeypatch.delattr("tests.common.pseudo_huber")
    with pytest.raises(ValueError, match="tests.common:pseudo_huber"):
        ANO.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["shaping_name", "shaping_fingerprint"])
def test_a_file_without_the_shape_is_refused(name, tmp_path):
    trained().save(tmp_path / "model", exclude=[name])
    with pytest.raises(ValueError, match=f"lacks {name}; save the model again without exclude="):
        ANO.load(tmp_path / "model", shaping="ano")


@pytest.mark.parametrize(
    ("shaping", "error", "message"),
    [
        (("ano", torch.log1p), ValueError, "shaping='torch:log1p, A < 0' is not finite at x = -1"),
        (3, TypeError, "shaping=3 is not a shape; allowed are"),
    ],
)
def test_bad_shapes_are_named_with_what_is_allowed(shaping, error, message):
    with pytest.raises(error, match=message):
        ANO("MlpPolicy", "CartPole-v1", shaping=shaping)
    with pytest.warns(UserWarning, match="shaping='torch:sin' violates enclosure: h\\(-64\\) = -0.92"):
        model = ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping="torch:sin")
    with pytest.raises(error, match=message):
        model.shaping = shaping
    assert model.shaping == model.shaping_name == "torch:sin"


@pytest.mark.parametrize("shape", ["ano", ("ppo", pseudo_huber)], ids=["the same", "pair"])
def test_a_shape_that_is_assigned_takes_effect_at_the_next_update(shape):
    model, expected = trained(shaping="ano"), trained(shaping=shape)
    expected.set_parameters(copy.deepcopy(model.get_parameters()))  # as in SB3, moments would be shared
    model.shaping = shape
    for each in (model, expected):
        each.set_random_seed(1)
        each.learn(64)
    assert torch.equal(parameters(model), parameters(expected))
    names = [(each.shaping, each.shaping_name, each.shaping_fingerprint) for each in (model, expected)]
    assert names[0] == names[1]


class Derived(ANO):
    pass


@pytest.mark.parametrize("saved_by", [*ALGORITHMS, Derived, PPO])
def test_only_the_class_that_saved_a_file_loads_it(saved_by, tmp_path):
    trained(saved_by).save(tmp_path / "model")
    name = saved_by.__name__
    message = "was not saved by sb3_ano" if saved_by is PPO else rf"was saved by {name}; load it with {name}\.load"
    for loaded_by in {*ALGORITHMS, Derived} - {saved_by}:
        with pytest.raises(ValueError, match=message):
            loaded_by.load(tmp_path / "model")
    assert type(saved_by.load(tmp_path / "model")) is saved_by


def test_cuts_and_flipped_bytes_are_noticed(whole, saved):
    generator = np.random.default_rng(0)
    for size in [0, 1, 100, *generator.integers(0, len(whole) - 1, 10)]:
        saved.write_bytes(whole[:size])  # what is left may end with a whole zip archive, that of the optimizer's state
        with pytest.raises(ValueError, match="model.zip is not a saved model, or is damaged or cut off"):
            ANO.load(saved)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = archive.infolist()
    # Contents, headers and directory: flags, versions, compression methods, names, sizes.
    positions = [*generator.integers(0, len(whole) - 22, 20), *generator.integers(len(whole) - 300, len(whole) - 22, 40)]
    positions += [entry.header_offset + offset for entry in entries for offset in (0, 6, 8)]
    expected = parameters(ANO.load(io.BytesIO(whole)))
    for position in positions:
        saved.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            loaded = ANO.load(saved)
        except ValueError:
            continue
        # A byte that says nothing, such as a time of day.
        assert torch.equal(parameters(loaded), expected)


def rewritten(source, target, without="", **contents):
    """Write a saved model again, compressed, with other contents of some entries."""
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy:
        for name, content in ({name: whole.read(name) for name in whole.namelist()} | contents).items():
            if name != without:
                copy.writestr(name, content)
    return target


def test_a_missing_part_is_noticed(saved, tmp_path):
    for entry in ("data", "policy.pth", "policy.optimizer.pth"):
        with pytest.raises(ValueError, match=f"less.zip is not a saved model.*'{entry}'"):
            ANO.load(rewritten(saved, tmp_path / "less.zip", without=entry))
    with pytest.raises(FileNotFoundError):
        ANO.load(tmp_path / "missing")


@pytest.mark.parametrize("entry", ["policy.pth", "notes.txt"])
def test_a_file_that_unpacks_to_far_more_is_not_unpacked(entry, saved, tmp_path, monkeypatch):
    """2.6 MB stood for 2.5 GB."""
    ANO.load(rewritten(saved, tmp_path / "compressed.zip"))
    bomb = rewritten(saved, tmp_path / "bomb.zip", **{entry: b" " * 2**25})
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(ValueError, match=r"bomb.zip is not a saved model.* bytes would unpack to 33,"):
        ANO.load(bomb)


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize("radius", [0.0, lambda _: 0.0], ids=["number", "schedule"])
def test_loading_with_a_radius_of_zero_as_the_zoos_enjoy_does_never_raises(cls, radius, tmp_path):
    trained(cls).save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=gym.make("CartPole-v1"), custom_objects={"clip_range": radius})
    loaded.learn(32)
    assert parameters(loaded).isfinite().all()


def test_streams_are_read_from_where_they_stand(whole, saved):
    for stream in (io.BytesIO(), open(saved, "w+b")):  # noqa: SIM115
        stream.write(b"something else before it" + whole)
        stream.seek(24)
        assert torch.equal(parameters(ANO.load(stream)), parameters(ANO.load(io.BytesIO(whole))))
        stream.close()


@dataclass
class Scaled:
    """A shape with a parameter, which cannot be hashed."""

    scale: float = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.5 * self.scale * x.square()


@pytest.mark.parametrize("shape", [Scaled(), (Scaled(), Scaled(2.0)), torch.Tensor.arctan])
@pytest.mark.filterwarnings("ignore:shaping=")  # of a name that cannot be imported, and of the enclosure
def test_every_callable_is_a_shape(shape):
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping=shape)
    before = parameters(model).clone()
    assert not torch.equal(parameters(model.learn(64)), before)
    assert model.shaping_fingerprint != ANO("MlpPolicy", "CartPole-v1", **SMALL).shaping_fingerprint


def test_an_argument_that_the_class_does_not_take_is_not_loaded(tmp_path):
    PAPO("MlpPolicy", "CartPole-v1", n_steps=64).save(tmp_path / "papo")
    with pytest.raises(TypeError, match="PAPO.load got an unexpected keyword argument 'desired_kl'"):
        PAPO.load(tmp_path / "papo", desired_kl=0.01)


def test_arguments_that_a_subclass_passes_on_are_loaded(tmp_path):
    class Own(ANO):
        def __init__(self, policy: str, env: str, more: int = 1, **arguments: object) -> None:
            super().__init__(policy, env, **arguments)
            self.more = more

    Own("MlpPolicy", "CartPole-v1", more=3, n_steps=64, batch_size=64).save(tmp_path / "own")
    loaded = Own.load(tmp_path / "own", seed=5, learning_rate=1e-4)
    assert (loaded.more, loaded.seed, loaded.learning_rate, loaded.n_steps) == (3, 5, 1e-4, 64)
    with pytest.raises(TypeError, match="Own.load got .*'learning_rat', did you mean 'learning_rate'"):
        Own.load(tmp_path / "own", learning_rat=1e-4)


def test_attributes_are_excluded_included_and_replaced(tmp_path):
    model = trained(gamma=0.9, learning_rate=1e-3)
    model.save(tmp_path / "model", exclude=["gamma"], include=["rollout_buffer"])
    loaded = ANO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 3), n_steps=64, batch_size=64).learn(192)
    assert loaded.gamma == 0.99  # the constructor's
    assert loaded.rollout_buffer.rewards.shape == (64, 3)
    replaced = ANO.load(
        tmp_path / "model", custom_objects={"learning_rate": 5e-4, "clip_range": LinearSchedule(0.3, 0.1, 1.0)}
    )
    assert (replaced.lr_schedule(1.0), replaced.clip_range(0.0)) == (5e-4, pytest.approx(0.1))


@pytest.mark.parametrize("torch_compile", [False, True])
def test_saved_tensors_are_those_of_sb3_each_with_memory_of_its_own(torch_compile, tmp_path):
    def save(cls: type, **options) -> int:
        env = tiny_vec_env(IMAGE_OBSERVATIONS, spaces.Discrete(3))  # the policy names its features extractor three times
        with traced_only():
            model = cls("CnnPolicy", env, n_steps=16, batch_size=16, n_epochs=1, **options).learn(32)
        model.save(tmp_path / "model.zip")
        with zipfile.ZipFile(tmp_path / "model.zip") as archive:
            tensors = torch.load(archive.open("policy.pth"), weights_only=True).values()
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
            return archive.getinfo("policy.pth").file_size

    assert save(ANO, torch_compile=torch_compile) == pytest.approx(save(PPO), rel=0.01)


class Counting:
    """A custom shape that counts its evaluations."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return pseudo_huber(x)


@pytest.mark.filterwarnings("ignore:shaping=.* cannot be imported")
def test_a_custom_shape_is_evaluated_a_few_times_and_a_built_in_one_is_not_differentiated(tmp_path, monkeypatch):
    shape = Counting()
    ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping=shape).save(tmp_path / "custom")
    assert shape.calls <= 3
    shape.calls = 0
    ANO.load(tmp_path / "custom", shaping=shape)
    assert shape.calls <= 3

    def forbidden(*arguments, **options):
        raise AssertionError("a built-in shape was differentiated")

    monkeypatch.setattr(torch.autograd, "grad", forbidden)
    for built_in in ("ano", "spo", ("ppo", "identity")):
        ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping=built_in).save(tmp_path / "built in")
        ANO.load(tmp_path / "built in")
