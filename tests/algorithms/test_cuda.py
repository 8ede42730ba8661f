"""The update, the files and a run of the benchmark on a GPU, compared with SB3 there; skipped without one."""

import functools
import json

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from sb3_ano import ANO, MaskableANO, RecurrentANO, explain
from sb3_ano.checkpoints import TrainingCheckpoints
from tests.algorithms import test_equals_sb3_contrib as contrib
from tests.algorithms import test_equals_sb3_ppo as stock
from tests.algorithms.comparison import ACCELERATED_PPO, relative_difference
from tests.common import parameters

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:You are trying to run .* on the GPU", "ignore:precision='bfloat16'"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*"),  # of the compiler
]
GPU = {"device": "cuda"}


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    """cuDNN rounds to ten bits by default, and adds in an order that changes from call to call."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@functools.cache
def ppo(case: str) -> PPO:
    return stock.after_three_rollouts(PPO, case, **GPU)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", stock.CASES)
def test_parameters_are_those_of_ppo(case, compiled):
    found = stock.after_three_rollouts(ANO, case, shaping="ppo", torch_compile=compiled, **GPU)
    assert found.policy.device.type == "cuda"
    assert (explain(found).compilation.path == "compiled") == compiled
    assert relative_difference(ppo(case), found) <= 10 * stock.tolerance(case)
    different = stock.after_three_rollouts(ANO, case, shaping="spo", torch_compile=compiled, **GPU)
    assert relative_difference(ppo(case), different) > 20 * stock.tolerance(case)


@pytest.mark.parametrize("compiled", [False, True])
def test_accelerated_ppo_is_ppo(compiled):
    found = stock.after_three_rollouts(ACCELERATED_PPO, "CartPole", torch_compile=compiled, **GPU)
    assert (explain(found).compilation.path == "compiled") == compiled
    assert relative_difference(ppo("CartPole"), found) <= 10 * stock.tolerance("CartPole")


@pytest.mark.parametrize(("ours", "compiled"), [(MaskableANO, False), (MaskableANO, True), (RecurrentANO, False)])
@pytest.mark.parametrize("case", ["Discrete", "Dict"])
def test_parameters_are_those_of_sb3_contrib(case, ours, compiled):
    expected = contrib.after_three_rollouts(contrib.THEIRS[ours], case, **GPU)
    found = contrib.after_three_rollouts(ours, case, shaping="ppo", torch_compile=compiled, **GPU)
    assert relative_difference(expected, found) <= 10 * stock.tolerance(case)


@pytest.mark.parametrize("case", ["Pendulum", "image"])
def test_bfloat16_and_a_target_of_the_kl_train(case):
    model = stock.after_three_rollouts(ANO, case, precision="bfloat16", desired_kl=0.01, **GPU)
    assert torch.isfinite(parameters(model)).all()
    assert model.logger.name_to_value["train/clip_range"] != 0.2


def test_agents_move_between_gpu_and_cpu(tmp_path):
    trained = stock.after_three_rollouts(ANO, "Pendulum", **GPU)
    trained.save(tmp_path / "gpu")
    on_cpu = ANO.load(tmp_path / "gpu", env=trained.get_env(), device="cpu")
    observations = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    np.testing.assert_allclose(
        on_cpu.predict(observations, deterministic=True)[0], trained.predict(observations, deterministic=True)[0], atol=1e-5
    )
    on_cpu.learn(256).save(tmp_path / "cpu")
    back = ANO.load(tmp_path / "cpu", env=on_cpu.get_env(), **GPU)
    assert torch.equal(parameters(back).cpu(), parameters(on_cpu))
    assert parameters(back.learn(256)).isfinite().all()


def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path):
    def trained(steps: int, directory: str) -> ANO:
        model = stock.make(ANO, "Pendulum", torch_compile=False, **GPU)
        return model.learn(steps, callback=TrainingCheckpoints(tmp_path / directory, every=256, resume=True))

    uninterrupted = trained(1024, "whole")
    trained(512, "parts")
    assert torch.equal(parameters(trained(1024, "parts")), parameters(uninterrupted))


@pytest.mark.parametrize("label", ["ppo", "ano:desired_kl=0.01"])
def test_a_run_of_the_benchmark(label, tmp_path):
    pytest.importorskip("rl_zoo3")
    from sb3_ano.bench.training import RUN, train
    from tests.bench.common import small_run

    train(small_run(label), tmp_path, **GPU)
    assert json.loads((tmp_path / RUN).read_text())["device"] == "cuda"
