"""The adaptive radius: ``desired_kl``."""

import itertools
import math

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback, EveryNTimesteps
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO, SPO
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


@pytest.mark.parametrize("coefficient", [0.01, 0.1, 1.0])
def test_radius_converges_where_the_kl_is_quadratic_in_it(coefficient):
    # A small step of size d has a KL divergence of order d^2: with kl = c r^2, the radius that meets the target is known.
    adapted, target = model(desired_kl=0.01), 0.01
    for _ in range(40):
        radius = 0.2 * adapted.radius_factor
        adapted._adapt_radius(radius, coefficient * radius**2)
    assert 0.2 * adapted.radius_factor == pytest.approx(math.sqrt(target / coefficient), rel=1e-3)


@pytest.mark.parametrize(("cls", "shape"), [(ANO, "ano"), (ANO, "ppo"), (SPO, None)])
def test_each_factor_is_the_fourth_root_of_the_missing_kl_within_bounds(cls, shape):
    rows = logged_updates(model(cls, desired_kl=0.005, **({} if shape is None else {"shaping": shape})), 8)
    for before, after in itertools.pairwise(rows):
        growth = min(max((0.005 / before["kl_mean"]) ** 0.25, 0.8), 1.25)
        assert after["clip_range"] == pytest.approx(min(max(before["clip_range"] * growth, 0.05), 4.0), rel=1e-5)
    assert rows[0]["clip_range"] == pytest.approx(0.2)
    assert len({row["clip_range"] for row in rows}) > 4


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


def test_asymmetric_radii_keep_their_proportion():
    rows = logged_updates(model(desired_kl=0.005, clip_range_high=0.3), 4)
    assert [row["clip_range_high"] / row["clip_range"] for row in rows] == pytest.approx([1.5] * 4)


def test_target_may_be_a_schedule():
    constant = logged_updates(model(desired_kl=0.01), 3)
    for schedule in (LinearSchedule(0.01, 0.01, 1.0), lambda progress: 0.01):
        assert logged_updates(model(desired_kl=schedule), 3)[-1]["clip_range"] == constant[-1]["clip_range"]
    constant, falling = (logged_updates(model(desired_kl=target), 8) for target in (0.0005, "lin_0.0005"))
    assert falling[-1]["clip_range"] < constant[-1]["clip_range"]


def test_without_it_the_radius_is_clip_range():
    assert [row["clip_range"] for row in logged_updates(model(), 3)] == pytest.approx([0.2] * 3)


def test_saved_model_continues_with_its_radius(tmp_path):
    whole, half = model(desired_kl=0.003), model(desired_kl=0.003)
    whole.learn(6 * 256)
    half.learn(3 * 256)
    half.save(tmp_path / "half")
    loaded = ANO.load(tmp_path / "half", env=half.get_env())
    assert loaded.radius_factor == half.radius_factor != 1.0
    assert loaded.desired_kl(1.0) == 0.003


def test_resumed_training_is_the_uninterrupted_one(tmp_path):
    def train(*callbacks: BaseCallback) -> ANO:
        return model(desired_kl=0.003).learn(6 * 256, callback=[*callbacks])

    whole = train()
    train(TrainingCheckpoints(tmp_path, every=256, verbose=0), EveryNTimesteps(4 * 256, ConvertCallback(lambda *_: False)))
    resumed = train(TrainingCheckpoints(tmp_path, every=256, resume=True, verbose=0))
    assert resumed.num_timesteps == whole.num_timesteps
    assert resumed.radius_factor == whole.radius_factor != 1.0
    np.testing.assert_array_equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize(
    ("value", "error"), [(0.0, ValueError), (-0.01, ValueError), (math.nan, ValueError), ("0.01", ValueError), ([], TypeError)]
)
def test_invalid_targets_are_named(value, error):
    with pytest.raises(error, match="desired_kl"):
        model(desired_kl=value)


def test_papo_has_none():
    with pytest.raises(TypeError, match="desired_kl"):
        model(PAPO, desired_kl=0.01)
