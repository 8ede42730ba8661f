"""Aggregates and intervals against tables worked by hand, rliable's own functions, and a bootstrap written out."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from rliable import library, metrics

from sb3_ano.bench.statistics import (
    METRICS,
    Bootstrap,
    aggregate,
    area_under_curve,
    iqm_curve,
    performance_profile,
    probability_of_improvement,
    relative_change,
    time_to_threshold,
    window_means,
)

BOOTSTRAP = Bootstrap(reps=200)
# Four seeds on two tasks. In order: 0.1 0.2 | 0.3 0.4 0.6 0.8 | 1.0 1.6; IQM = 2.1 / 4.
HAND = np.array([[0.1, 1.6], [0.3, 0.2], [0.4, 1.0], [0.8, 0.6]])
HAND_VALUES = {"IQM": 0.525, "mean": 0.625, "median": 0.625, "optimality gap": 1.0 - 4.4 / 8.0}
RLIABLE = {
    "IQM": metrics.aggregate_iqm,
    "mean": metrics.aggregate_mean,
    "median": metrics.aggregate_median,
    "optimality gap": metrics.aggregate_optimality_gap,
}


def scores(seeds=5, tasks=40, seed=0):
    return np.random.default_rng(seed).lognormal(0.0, 1.0, (seeds, tasks))


def resample(rng, sample):
    """One stratified resample, drawn as rliable draws it."""
    rows = rng.choice(len(sample), sample.shape, replace=True)
    return np.take_along_axis(sample, rows, axis=0)


def test_aggregates_of_a_hand_worked_table():
    found = aggregate(HAND, BOOTSTRAP)
    assert {name: one.value for name, one in found.items()} == pytest.approx(HAND_VALUES, abs=1e-12)


@pytest.mark.parametrize("shape", [(5, 40), (3, 1), (4, 3), (7, 9), (1, 6)])
def test_aggregates_equal_those_of_rliable(shape):
    sample = scores(*shape)
    found = aggregate(sample, BOOTSTRAP)
    for name, function in RLIABLE.items():
        assert found[name].value == pytest.approx(function(sample), abs=1e-12)


def test_iqm_equals_exact_arithmetic():
    sample = scores()
    ordered = sorted(Fraction(float(value)) for value in sample.flat)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    assert METRICS["IQM"](sample) == pytest.approx(float(sum(middle) / len(middle)), rel=1e-15)


def test_intervals_equal_percentiles_of_a_bootstrap_that_is_written_out():
    sample, rng = scores(4, 6), np.random.RandomState(3)
    resamples = [resample(rng, sample) for _ in range(500)]
    found = aggregate(sample, Bootstrap(reps=500, seed=3, confidence=0.9))
    for name, function in RLIABLE.items():
        expected = np.percentile([function(one) for one in resamples], [5.0, 95.0])
        assert (found[name].low, found[name].high) == pytest.approx(tuple(expected), abs=1e-12)


def test_the_bootstrap_comes_close_to_all_resamples_that_there_are():
    sample = np.array([[0.0], [1.0], [5.0]])
    # A fifth of the 27 resamples, and four fifths, lie well inside a step of the distribution of their means.
    means = [np.mean(one) for one in itertools.product(sample[:, 0], repeat=3)]
    found = aggregate(sample, Bootstrap(reps=3000, confidence=0.6))["mean"]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.2, 0.8])))


def test_one_seed_of_the_bootstrap_gives_one_interval_whatever_was_drawn_before():
    sample = scores()
    first = aggregate(sample, BOOTSTRAP)
    np.random.seed(7)
    assert aggregate(sample, BOOTSTRAP) == first
    assert aggregate(sample, Bootstrap(reps=200, seed=1)) != first


def test_numpys_global_generator_is_left_as_it_was():
    np.random.seed(11)
    expected = np.random.random(4)
    np.random.seed(11)
    aggregate(scores(), BOOTSTRAP)
    assert np.random.random(4).tolist() == expected.tolist()


def test_a_single_seed_has_no_interval():
    found = aggregate(scores(seeds=1), BOOTSTRAP)
    assert all(math.isnan(one.low) and math.isnan(one.high) for one in found.values())


def test_probability_of_improvement_of_a_hand_worked_table():
    # First task: 3 of 4 pairs higher. Second: 1 higher, 2 ties, 1 lower.
    better = np.array([[2.0, 1.0], [4.0, 2.0]])
    worse = np.array([[1.0, 1.0], [3.0, 2.0]])
    assert probability_of_improvement(better, worse, BOOTSTRAP).value == pytest.approx((0.75 + 0.5) / 2, abs=1e-12)


@pytest.mark.parametrize("other_seeds", [3, 5, 8])
def test_probability_of_improvement_equals_that_of_rliable_with_ties_too(other_seeds):
    rounded, others = np.round(scores(), 1), np.round(scores(other_seeds, seed=1), 1)
    found = probability_of_improvement(rounded, others, BOOTSTRAP)
    assert found.value == pytest.approx(metrics.probability_of_improvement(rounded, others), abs=1e-12)
    opposite = probability_of_improvement(others, rounded, BOOTSTRAP)
    assert found.value + opposite.value == pytest.approx(1.0, abs=1e-12)


def test_its_interval_equals_one_from_rliables_own_function():
    sample, others = scores(4, 3), scores(5, 3, seed=1)

    def ranks(first, second):
        return np.array([metrics.probability_of_improvement(first, second)])

    np.random.seed(0)
    _, expected = library.get_interval_estimates({"": [sample, others]}, ranks, reps=100)
    found = probability_of_improvement(sample, others, Bootstrap(reps=100))
    assert [found.low, found.high] == pytest.approx(expected[""].ravel().tolist(), abs=1e-12)


def test_performance_profiles_equal_those_of_rliable():
    sample, thresholds = scores(4, 6), np.linspace(0.0, 3.0, 13)
    thresholds[5] = sample[2, 3]  # a score at the threshold is not above it
    np.random.seed(0)
    values, intervals = library.create_performance_profile({"": sample}, thresholds, reps=100)
    band = performance_profile(sample, thresholds, Bootstrap(reps=100))
    np.testing.assert_allclose(band.values, values[""], atol=1e-12)
    np.testing.assert_allclose([band.low, band.high], intervals[""], atol=1e-12)


def test_iqm_curves_equal_rliables_iqm_at_every_point():
    sample = np.random.default_rng(0).normal(size=(4, 3, 6))
    band = iqm_curve(sample, BOOTSTRAP)
    assert band.values == pytest.approx([metrics.aggregate_iqm(sample[..., point]) for point in range(6)], abs=1e-12)
    assert (band.low <= band.values).all()
    assert (band.values <= band.high).all()


def test_relative_change_is_in_units_of_what_was():
    found = relative_change(HAND, 0.6 * HAND, BOOTSTRAP)
    assert found.value == pytest.approx(-0.4, abs=1e-12)
    assert found.low < -0.4 < found.high
    assert math.isnan(relative_change(-HAND, HAND, BOOTSTRAP).value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aggregate(np.zeros(3), BOOTSTRAP), r"shape \(3,\) are not allowed; allowed is \(seeds, tasks\)"),
        (lambda: aggregate(np.zeros((0, 3)), BOOTSTRAP), r"shape \(0, 3\)"),
        (lambda: aggregate(np.array([[1.0, np.nan], [0.0, 1.0]]), BOOTSTRAP), "1 of 4 scores are not finite"),
        (
            lambda: probability_of_improvement(scores(2, 3), scores(2, 4), BOOTSTRAP),
            "of 3 tasks cannot be compared",
        ),
        (lambda: Bootstrap(reps=0), "reps=0 is not allowed"),
        (lambda: Bootstrap(seed=-1), "seed=-1 is not allowed"),
        (lambda: Bootstrap(confidence=95), "confidence=95 is not allowed"),
    ],
)
def test_what_cannot_be_reckoned_with_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_area_under_a_curve_is_its_mean_height():
    steps = np.array([0.0, 1.0, 3.0, 4.0])
    assert area_under_curve(steps, 2.0 * steps + 1.0) == pytest.approx(5.0)  # a line: its height in the middle
    assert area_under_curve(steps, np.array([0.0, 3.0, 3.0, 0.0])) == pytest.approx(9.0 / 4.0)
    assert area_under_curve(np.array([5.0]), np.array([7.0])) == 7.0


def test_time_to_a_threshold_is_that_of_the_first_point_there():
    seconds, returns = np.array([10.0, 20.0, 30.0, 40.0]), np.array([1.0, 5.0, 2.0, 6.0])
    assert time_to_threshold(seconds, returns, 5.0) == 20.0
    assert time_to_threshold(seconds, returns, 7.0) == math.inf


def test_window_means_leave_out_what_is_not_there():
    found = window_means(np.array([0, 0, 2, 2, 3]), np.array([1.0, 3.0, np.nan, 4.0, np.nan]), 4)
    np.testing.assert_array_equal(found, [2.0, np.nan, 4.0, np.nan])
