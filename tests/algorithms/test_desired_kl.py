"""The adaptive radius: ``desired_kl``."""

import itertools

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback, EveryNTimesteps
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, SPO
from sb3_ano.checkpoints import TrainingCheckpoints
from tests.common import parameters

SHORT = {"n_steps": 256, "batch_size": 64, "n_epochs": 4, "seed": 0, "device": "cpu", "torch_compile": False}


def model(cls=ANO, **options):
    return cls("MlpPolicy", "Pendulum-v1", **{**SHORT, "learning_rate": 1e-3, **options})


def logged_updates(trained, updates: int) -> list[dict[str, float]]:
    """Train, and return what each update logged."""
    rows = []
    trained.set_logger(Logger(None, []))
    train = trained.train

    def train_and_keep() -> None:
        train()
        rows.append({name.removeprefix("train/"): value for name, value in trained.logger.name_to_value.items()})

    trained.train = train_and_keep
    trained.learn(updates * trained.n_steps)
    return rows


@pytest.mark.parametrize(("cls", "options"), [(ANO, {}), (ANO, {"shaping": "ppo", "clip_range_high": 0.3}), (SPO, {})])
def test_each_factor_is_the_fourth_root_of_the_missing_kl_within_bounds(cls, options):
    rows = logged_updates(model(cls, desired_kl=0.005, **options), 8)
    for before, after in itertools.pairwise(rows):
        growth = min(max((0.005 / before["kl_mean"]) ** 0.25, 0.8), 1.25)
        assert after["clip_range"] == pytest.approx(min(max(before["clip_range"] * growth, 0.05), 4.0), rel=1e-5)
    assert rows[0]["clip_range"] == pytest.approx(0.2)
    assert len({row["clip_range"] for row in rows}) > 4
    if options:  # asymmetric radii keep their proportion
        assert [row["clip_range_high"] / row["clip_range"] for row in rows] == pytest.approx([1.5] * 8)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.001, 0.003])
def test_kl_of_a_training_meets_the_target(target):
    rows = logged_updates(model(desired_kl=target, n_epochs=10), 60)
    # The radius stands still where the logarithms of the KL average to that of the target.
    assert np.exp(np.mean([np.log(row["kl_mean"]) for row in rows[20:]])) == pytest.approx(target, rel=0.25)


@pytest.mark.parametrize(("target", "bound"), [(1e-12, 0.05), (1e6, 4.0)])
def test_radius_stays_within_its_bounds(target, bound):
    rows = logged_updates(model(desired_kl=target, n_epochs=1, learning_rate=1e-4), 18)
    assert rows[-1]["clip_range"] == pytest.approx(bound, rel=1e-6)
    assert rows[1]["clip_range"] == pytest.approx(0.2 * (0.8 if bound < 1 else 1.25))


def test_without_any_change_of_the_policy_the_radius_grows():
    rows = logged_updates(model(desired_kl=0.01, learning_rate=0.0), 2)
    assert rows[1]["clip_range"] == pytest.approx(0.25)


def test_target_may_be_a_schedule():
    constant = logged_updates(model(desired_kl=0.01), 3)
    for schedule in (LinearSchedule(0.01, 0.01, 1.0), lambda progress: 0.01):
        assert logged_updates(model(desired_kl=schedule), 3)[-1]["clip_range"] == constant[-1]["clip_range"]
    constant, falling = (logged_updates(model(desired_kl=target), 8) for target in (0.0005, "lin_0.0005"))
    assert falling[-1]["clip_range"] < constant[-1]["clip_range"]


def test_without_it_the_radius_is_clip_range():
    assert [row["clip_range"] for row in logged_updates(model(), 3)] == pytest.approx([0.2] * 3)


def test_resumed_training_is_the_uninterrupted_one(tmp_path):
    def train(*callbacks: BaseCallback) -> ANO:
        return model(desired_kl=0.003).learn(6 * 256, callback=[*callbacks])

    whole = train()
    train(TrainingCheckpoints(tmp_path, every=256, verbose=0), EveryNTimesteps(4 * 256, ConvertCallback(lambda *_: False)))
    resumed = train(TrainingCheckpoints(tmp_path, every=256, resume=True, verbose=0))
    assert resumed.num_timesteps == whole.num_timesteps
    assert resumed.radius_factor == whole.radius_factor != 1.0
    np.testing.assert_array_equal(parameters(resumed), parameters(whole))
    whole.save(tmp_path / "whole")
    loaded = ANO.load(tmp_path / "whole")
    assert (loaded.radius_factor, loaded.desired_kl(1.0)) == (whole.radius_factor, 0.003)
