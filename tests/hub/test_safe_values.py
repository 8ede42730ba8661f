"""Spaces, schedules and arguments come back from JSON as they were, to the last digit."""

import importlib
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_ano.hub.codec import CLASSES, decode, encode, plain
from sb3_ano.hub.documents import SafeFormatError
from sb3_ano.hub.spaces import decode_space, encode_space

INFINITE = np.array([np.inf, 4.8, np.inf, 0.42], np.float32)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (3,), np.float32),
        spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        spaces.Box(-INFINITE, INFINITE, dtype=np.float32),
        spaces.Box(np.float32([0.1, -0.3]), np.float32([0.7, 1e30]), dtype=np.float32),
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
        spaces.Box(np.int16([1, 2]), np.int16([3, 4]), dtype=np.int16),
        spaces.Box(-2.0, 2.0, (), np.float16),
        spaces.Discrete(1),
        spaces.Discrete(7, start=-3),
        spaces.MultiDiscrete([2, 5, 3]),
        spaces.MultiDiscrete([[2, 5], [3, 4]], start=[[1, 0], [0, -9]]),
        spaces.MultiDiscrete([2, 5], dtype=np.int32),
        spaces.MultiBinary(4),
        spaces.MultiBinary([2, 3]),
        spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-1.0, 1.0, (2,), np.float32)}),
        spaces.Dict([("z", spaces.Discrete(2)), ("a b/c.d", spaces.MultiBinary(2))]),
    ],
    ids=str,
)
def test_spaces_come_back(space):
    found = decode_space(through_json(encode_space(space)), "space")
    assert found == space
    assert type(found) is type(space)
    assert found.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(found.spaces) == list(space.spaces)  # the order of a network's inputs
    if isinstance(space, spaces.Box):
        assert np.array_equal(found.bounded_below, space.bounded_below)
    found.seed(0)
    space.seed(0)
    for _ in range(3):
        assert str(found.sample()) == str(space.sample())


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Tuple([spaces.Discrete(2)]), spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})]
)
def test_spaces_that_sb3_does_not_support_are_refused(space):
    with pytest.raises(TypeError, match="cannot be stored; allowed are Box"):
        encode_space(space)


@pytest.mark.parametrize(
    "schedule",
    [
        LinearSchedule(0.1 + 0.2, 1.0 / 3.0, 0.7),
        ConstantSchedule(1.0 / 3.0),
        FloatSchedule(LinearSchedule(1e-3, 0.0, 1.0)),
        FloatSchedule(FloatSchedule(0.2)),
    ],
    ids=str,
)
def test_sb3s_schedules_come_back(schedule):
    found = FloatSchedule(decode(through_json(encode(schedule, "clip_range", {})), "clip_range", {}))
    progress = np.linspace(1.0, 0.0, 101)
    assert [found(each) for each in progress] == [float(schedule(each)) for each in progress]


def test_the_zoos_schedule_is_a_linear_one():
    utils = pytest.importorskip("rl_zoo3.utils")
    schedule = FloatSchedule(utils.linear_schedule("2.5e-4"))
    found = decode(through_json(encode(schedule, "learning_rate", {})), "learning_rate", {})
    for progress in np.linspace(1.0, 0.0, 101):
        assert found(progress) == pytest.approx(2.5e-4 * progress, rel=1e-12, abs=1e-18)


def test_a_subclass_of_a_schedule_is_not_taken_for_it():
    class Other(LinearSchedule):
        def __call__(self, progress_remaining):
            return 2.0 * super().__call__(progress_remaining)

    custom = {}
    assert encode(Other(1.0, 0.0, 1.0), "clip_range", custom).keys() == {"$custom", "initial"}
    assert list(custom) == ["clip_range"]


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.tuples(parts, parts)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), parts, max_size=4)
    ),
    max_leaves=12,
)


@given(plain_values)
def test_plain_values_come_back_with_their_types(value):
    custom = {}
    found = decode(through_json(encode(value, "policy_kwargs", custom)), "policy_kwargs", {})
    assert custom == {}
    assert repr(found) == repr(value)  # tells 0.0 from -0.0, 1 from True, tuples from lists


def test_numbers_of_numpy_become_pythons():
    assert repr(encode([np.float32(0.1), np.int64(3), np.bool_(True)], "x", {})) == "[0.10000000149011612, 3, True]"


@pytest.mark.parametrize("argument", CLASSES)
def test_classes_come_back_by_name_and_are_where_it_says(argument):
    for name, cls in CLASSES[argument].items():
        stored = through_json(encode(cls, f"policy_kwargs.{argument}", {}))
        assert stored == {"$class": name}
        assert decode(stored, f"policy_kwargs.{argument}", {}) is cls
        with pytest.raises(SafeFormatError, match="allowed are values that are not classes"):
            decode(stored, "policy_kwargs.elsewhere", {})
        if argument != "policy":
            module, _, attribute = name.rpartition(".")
            assert getattr(importlib.import_module(module), attribute) is cls


@pytest.mark.parametrize(
    "value",
    [object(), torch.zeros(2), {1: 2}, {"$class": "x"}, len, lambda: 0, np.zeros(2)],
    ids=lambda value: type(value).__name__,
)
def test_what_json_has_no_word_for_is_left_to_the_caller(value):
    custom = {}
    stored = through_json(encode({"part": [value]}, "policy_kwargs", custom))
    assert list(custom) == ["policy_kwargs.part.0"]
    with pytest.raises(SafeFormatError, match=r"policy_kwargs.part.0 was .*pass it as custom_objects="):
        decode(stored, "policy_kwargs", {})
    found = decode(stored, "policy_kwargs", custom)
    assert found["part"][0] is value


def test_errors_are_one_short_line_that_no_terminal_obeys():
    """Review safety H8."""
    message = str(SafeFormatError("\x1b]0;title\x07" + "two\nlines " * 1000))
    assert message.isprintable()
    assert len(message) < 1000
    assert message.startswith("?]0;title?two lines")


def test_plain_values_tell_arrays_and_functions_apart():
    """By them, settings of an environment's wrappers are compared (review users U1)."""
    assert plain({"low": np.zeros(2), 3: [len, np.float32(0.5)]}) == {"low": [0.0, 0.0], "3": ["builtins:len", 0.5]}
    assert plain(LinearSchedule(0.2, 0.1, 1.0)) == "stable_baselines3.common.utils:LinearSchedule"
    assert plain(float("inf")) == float("inf")
