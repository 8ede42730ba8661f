"""A saved model comes back as what it was trained as, or not at all."""

import io
import json
import sys
import types
import warnings
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO
from sb3_ano.shaping import from_ratio, spo
from tests.common import ALGORITHMS, SMALL, parameters, pseudo_huber
from tests.tiny_envs import BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env


def trained(cls=ANO, **options):
    return cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(64)


@pytest.fixture
def module_with_shape(monkeypatch):
    """A module called ``my_shapes`` with a shape ``mine``, as a user's project would have."""
    module = types.ModuleType("my_shapes")
    exec("def mine(x):\n    return x - 0.25 * x * x", module.__dict__)
    monkeypatch.setitem(sys.modules, "my_shapes", module)
    return module


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_a_loaded_model_acts_and_goes_on_like_the_saved_one(cls, tmp_path):
    model = trained(cls, clip_range=LinearSchedule(0.2, 0.1, 1.0), clip_range_high="lin_0.3", clip_range_vf=0.5)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=gym.make("CartPole-v1"))
    assert torch.equal(parameters(loaded), parameters(model))
    observations = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    assert np.array_equal(
        loaded.predict(observations, deterministic=True)[0], model.predict(observations, deterministic=True)[0]
    )
    assert loaded.clip_range(0.5) == pytest.approx(0.15)
    assert loaded.clip_range_high(0.5) == pytest.approx(0.15)
    loaded.learn(32)


@pytest.mark.parametrize(
    ("shaping", "stored"),
    [
        ("ppo", "ppo"),
        (spo, "spo"),
        (pseudo_huber, "tests.common:pseudo_huber"),
        ("my_shapes:mine", "my_shapes:mine"),
        (("ano", pseudo_huber), ["ano", "tests.common:pseudo_huber"]),
    ],
)
def test_the_shape_comes_back_by_its_name(shaping, stored, tmp_path, module_with_shape):
    model = trained(shaping=shaping)
    model.save(tmp_path / "model.zip")
    data = json.loads(zipfile.ZipFile(tmp_path / "model.zip").read("data"))
    assert (data["algorithm"], data["shaping_name"]) == ("ANO", stored)
    loaded = ANO.load(tmp_path / "model.zip")
    assert loaded.shaping_name == stored
    assert loaded._shape == model._shape
    again = io.BytesIO()
    loaded.save(again)
    again.seek(0)
    assert ANO.load(again)._shape == model._shape


def closure(weight):
    return lambda x: x - weight * x.square()


@pytest.mark.parametrize(
    "shaping",
    [
        lambda x: x - x.square(),
        closure(0.1),
        from_ratio(lambda r, eps: r - (r - 1) ** 2 / eps),
        ("ano", lambda x: x - x.square()),
    ],
    ids=["lambda", "closure", "from_ratio", "pair"],
)
def test_a_shape_without_a_name_is_warned_about_saved_and_asked_for_when_loading(shaping, tmp_path):
    with pytest.warns(UserWarning, match="cannot be imported by its name.*loads only with shaping="):
        model = trained(shaping=shaping)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="was trained with shaping=.*pass the function itself as shaping="):
        ANO.load(tmp_path / "model")
    with pytest.warns(UserWarning, match="cannot be imported by its name"):
        loaded = ANO.load(tmp_path / "model", shaping=shaping)
    assert torch.equal(parameters(loaded), parameters(model))


def test_a_function_of_the_main_script_is_never_looked_up_by_name(tmp_path):
    main = types.FunctionType(pseudo_huber.__code__, pseudo_huber.__globals__, "pseudo_huber")
    main.__module__ = "__main__"
    with pytest.warns(UserWarning, match="__main__:pseudo_huber"):
        trained(shaping=main).save(tmp_path / "model")
    with pytest.raises(ValueError, match="main script"):
        ANO.load(tmp_path / "model")


def test_a_shape_that_was_edited_or_renamed_is_noticed(tmp_path, module_with_shape):
    trained(shaping="my_shapes:mine").save(tmp_path / "model")
    module_with_shape.mine = lambda x: x - 0.3 * x * x
    with pytest.raises(ValueError, match="the function of that name is another one now"):
        ANO.load(tmp_path / "model")
    del module_with_shape.mine
    with pytest.raises(ValueError, match="my_shapes:mine"):
        ANO.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["shaping_name", "shaping_fingerprint"])
def test_a_file_without_the_shape_is_refused(name, tmp_path):  # review core 12
    trained().save(tmp_path / "model", exclude=[name])
    with pytest.raises(ValueError, match=f"lacks {name}; save the model again without exclude="):
        ANO.load(tmp_path / "model", shaping="ano")


def test_going_on_with_another_shape_is_possible_and_warned_about(tmp_path):
    trained().save(tmp_path / "model")
    with pytest.warns(UserWarning, match="was trained with shaping='ano'; the given shaping= is another function"):
        assert ANO.load(tmp_path / "model", shaping="spo").shaping == "spo"


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


def test_cuts_and_flipped_bytes_are_noticed(tmp_path):
    path = tmp_path / "model.zip"
    trained().save(path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for size in [0, 1, 100, *generator.integers(0, len(whole) - 1, 10)]:
        path.write_bytes(whole[:size])  # what is left may end with a whole zip archive, that of the optimizer's state
        with pytest.raises(
            ValueError,
            match="model.zip is (not a saved model, or is damaged or cut off|a zip archive, but not of a saved model)",
        ):
            ANO.load(path)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = archive.infolist()
    weights = next(entry for entry in entries if entry.filename == "policy.pth")
    positions = [*generator.integers(weights.header_offset + 100, weights.header_offset + weights.compress_size, 10)]
    # Headers and directory: flags, versions, compression methods, names, sizes.
    positions += [entry.header_offset + offset for entry in entries for offset in (0, 6, 8)]
    positions += [*generator.integers(len(whole) - 300, len(whole) - 22, 40)]
    expected = parameters(ANO.load(io.BytesIO(whole)))
    for position in positions:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            loaded = ANO.load(path)
        except ValueError:
            continue
        # A byte that says nothing, such as a time of day.
        assert torch.equal(parameters(loaded), expected)


@pytest.mark.parametrize("entry", ["data", "policy.pth", "policy.optimizer.pth"])
def test_a_missing_part_is_noticed(entry, tmp_path):
    trained().save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as whole, zipfile.ZipFile(tmp_path / "less.zip", "w") as less:
        for each in whole.infolist():
            if each.filename != entry:
                less.writestr(each, whole.read(each))
    with pytest.raises(ValueError, match=f"less.zip is a zip archive, but not of a saved model.*{entry}"):
        ANO.load(tmp_path / "less.zip")
    with pytest.raises(FileNotFoundError):
        ANO.load(tmp_path / "missing")


def compressed(source, target, **contents):
    """Write a saved model again, compressed, with other contents of some entries."""
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy:
        for each in whole.infolist():
            copy.writestr(each.filename, contents.get(each.filename, whole.read(each)))
    return target


@pytest.mark.parametrize("entry", ["data", "policy.pth", "notes.txt"])
def test_a_file_that_unpacks_to_far_more_is_not_unpacked(entry, tmp_path, monkeypatch):
    """Review safety H8: 2.6 MB stood for 2.5 GB."""
    trained().save(tmp_path / "model.zip")
    ANO.load(compressed(tmp_path / "model.zip", tmp_path / "compressed.zip"))
    bomb = compressed(tmp_path / "model.zip", tmp_path / "bomb.zip", **{entry: b" " * 2**25})
    if entry == "notes.txt":
        with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(entry, b" " * 2**25)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(ValueError, match=r"bomb.zip is not a saved model.* bytes would unpack to 33,"):
        ANO.load(bomb)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ({"clip_range": -0.1}, "clip_range=-0.1"),
        ({"clip_range": float("nan")}, "clip_range=nan"),
        ({"batch_size": 1}, "batch_size=1"),
        ({"shaping": "anno"}, "shaping='anno'"),
        ({"shaping": lambda x: x + 1}, "violates anchoring"),
        ({"n_epochs": 0}, "n_epochs=0"),
        ({"clip_range": None}, "clip_range=None"),
        ({"learning_rate": "fast"}, "learning_rate='fast'"),
        ({"clip_rang_high": 0.5}, r"unknown arguments \['clip_rang_high'\]"),
        ({"power": 0.5}, r"unknown arguments \['power'\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_arguments_of_load_are_validated(replacement, message, tmp_path):
    trained().save(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of going on with another shape
        with pytest.raises((ValueError, TypeError), match=message):
            ANO.load(tmp_path / "model", **replacement)


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize("radius", [0.0, lambda _: 0.0], ids=["number", "schedule"])
def test_loading_with_a_radius_of_zero_as_the_zoos_enjoy_does_never_raises(cls, radius, tmp_path):
    trained(cls).save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=gym.make("CartPole-v1"), custom_objects={"clip_range": radius})
    loaded.learn(32)
    assert parameters(loaded).isfinite().all()


def test_a_stream_is_read_from_where_it_stands():
    stream = io.BytesIO()
    model = trained()
    stream.write(b"something else before it")
    model.save(stream)
    stream.seek(24)
    assert torch.equal(parameters(ANO.load(stream)), parameters(model))


def test_a_layer_that_the_policy_names_twice_is_stored_once(tmp_path):
    sizes = []
    for cls in (ANO, PPO):
        env = tiny_vec_env(IMAGE_OBSERVATIONS, spaces.Discrete(3))
        cls("CnnPolicy", env, n_steps=16, batch_size=16, n_epochs=1).learn(32).save(tmp_path / cls.__name__)
        with zipfile.ZipFile(tmp_path / f"{cls.__name__}.zip") as archive:
            sizes.append(archive.getinfo("policy.pth").file_size)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_an_environment_with_other_spaces_is_refused(tmp_path):
    trained().save(tmp_path / "model")
    with pytest.raises(ValueError, match="do not match"):
        ANO.load(tmp_path / "model", env=tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(5)))
