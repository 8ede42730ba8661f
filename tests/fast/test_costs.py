"""A guard for speed that does not depend on the machine's mood: calls, compilations, and memory.

The limits are what was counted when the engine was written, with a margin of 3 %. Fewer are welcome: lower the limit.
"""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from stable_baselines3 import PPO

from sb3_ano import ANO
from tests.algorithms.comparison import accelerated, traced_only


def calls(function: Callable[[], Any]) -> int:
    """Count calls of functions, those of C included."""
    counter: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        counter[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counter["call"] + counter["c_call"]


def costs(make: Callable[..., Any], n_steps: int, n_epochs: int, **options: Any) -> dict[str, int]:
    """Count the calls of one rollout and of one update of a model that has trained before."""
    model = make("MlpPolicy", "Pendulum-v1", n_steps=n_steps, batch_size=32, n_epochs=n_epochs, device="cpu", **options)
    model.learn(2 * n_steps)
    found = {}
    collect, train = model.collect_rollouts, model.train

    def count_collection(*arguments: Any, **keywords: Any) -> bool:
        found["rollout"] = calls(lambda: collect(*arguments, **keywords))
        return True

    model.collect_rollouts = count_collection
    model.train = lambda: found.update(update=calls(train))
    model.learn(n_steps, reset_num_timesteps=False)
    return found


def itemized(make: Callable[..., Any], **options: Any) -> dict[str, float]:
    """Return the calls per step and minibatch, and those of a rollout and an update besides."""
    once = costs(make, n_steps=64, n_epochs=1, **options)
    more_epochs = costs(make, n_steps=64, n_epochs=3, **options)
    more_steps = costs(make, n_steps=128, n_epochs=1, **options)
    minibatch = (more_epochs["update"] - once["update"]) / 4
    step = (more_steps["rollout"] - once["rollout"]) / 64
    return {
        "step": step,
        "minibatch": minibatch,
        "rollout": once["rollout"] - 64 * step,
        "update": once["update"] - 2 * minibatch,
    }


def accelerated_ppo(*arguments: Any, **options: Any) -> Any:
    return accelerated(PPO, *arguments, **options)


# SB3's PPO: 345 per step and 1,135 per minibatch.
LIMITS = {"step": 95, "minibatch": 490, "rollout": 3_750, "update": 870}


@pytest.mark.parametrize("make", [ANO, accelerated_ppo], ids=["ANO", "accelerated PPO"])
def test_calls_do_not_grow(make):
    found = itemized(make, torch_compile=False)
    assert {name: count for name, count in found.items() if count > LIMITS[name]} == {}


def test_calls_are_a_fraction_of_sb3s():
    expected = itemized(PPO)
    found = itemized(accelerated_ppo, torch_compile=False)
    assert found["step"] <= 0.3 * expected["step"]
    assert found["minibatch"] <= 0.45 * expected["minibatch"]


@pytest.mark.parametrize("make", [ANO, accelerated_ppo], ids=["ANO", "accelerated PPO"])
def test_a_training_is_compiled_once(make):
    with traced_only() as graphs:
        model = make("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, torch_compile=True, device="cpu")
        model.learn(256)
        model.learn(256, reset_num_timesteps=False)
    assert len(graphs) == 1


def allocated(make: Callable[..., Any], **options: Any) -> int:
    """Return the peak of Python's and NumPy's memory in a rollout and its update, in bytes."""
    settings = {"n_steps": 512, "batch_size": 64, "n_epochs": 1, "device": "cpu"}
    model = make("MlpPolicy", "Pendulum-v1", **settings, **options).learn(512)
    tracemalloc.start()
    model.learn(512, reset_num_timesteps=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("make", [ANO, accelerated_ppo], ids=["ANO", "accelerated PPO"])
def test_memory_is_that_of_sb3(make):
    assert allocated(make, torch_compile=False) <= 1.1 * allocated(PPO) + 100_000


def test_an_update_of_one_minibatch_runs_few_functions_in_few_modules():
    model = ANO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, n_epochs=1, torch_compile=False, device="cpu")
    functions = set()
    train = model.train

    def remember(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and "/sb3_ano/" in code.co_filename:
            functions.add((code.co_filename, code.co_qualname))

    def watched() -> None:
        sys.setprofile(remember)
        try:
            train()
        finally:
            sys.setprofile(None)

    model.train = watched
    model.learn(64)
    assert 20 < len(functions) <= 45
    assert len({path for path, _ in functions}) <= 5
