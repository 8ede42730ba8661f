"""Paired differences, against a table worked by hand and against SciPy."""

import numpy as np
import pytest
from scipy import stats

from sb3_ano.bench.paired import half_width, paired_difference

SB3 = [10.0, 12.0, 14.0, 16.0]
FAST = [11.0, 12.0, 16.0, 17.0]


def test_the_table_worked_by_hand():
    # Differences 1, 0, 2, 1: mean 1, standard deviation sqrt(2 / 3), standard error sqrt(1 / 6) = 0.40825.
    # Student's t at 0.975 with 3 degrees of freedom is 3.18245, so half the interval is 1.29923. SB3's mean is 13.
    found = paired_difference(FAST, SB3)
    assert (found.n, found.mean, found.reference_mean, found.difference) == (4, 14.0, 13.0, 1.0)
    assert found.t_interval == pytest.approx((-0.29923, 2.29923), abs=1e-5)
    assert found.share == pytest.approx(1 / 13)
    assert found.share_interval == pytest.approx((-0.29923 / 13, 2.29923 / 13), abs=1e-6)
    assert found.within
    assert found.interval_within


def test_the_interval_is_that_of_scipy():
    rng = np.random.default_rng(0)
    values, reference = rng.normal(5, 2, 8), rng.normal(4, 2, 8)
    expected = stats.ttest_rel(values, reference).confidence_interval(0.95)
    assert paired_difference(values, reference).t_interval == pytest.approx((expected.low, expected.high))
    column = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert half_width(values) == pytest.approx((column.high - column.low) / 2)


def test_the_bootstrap_resamples_pairs():
    # The means of four draws of 1, 0, 2, 1 range from 0 to 2; P(mean <= 0.25) = 5 / 256 < 0.025 < P(mean <= 0.5).
    # The other side is the same by symmetry.
    low, high = paired_difference(FAST, SB3, resamples=200_000).bootstrap_interval
    assert (low, high) == (0.25, 1.75) or (low, high) == (0.5, 1.5)
    assert paired_difference(FAST, SB3).bootstrap_interval == paired_difference(FAST, SB3).bootstrap_interval
    constant = paired_difference([2.0, 3.0], [1.0, 2.0])
    assert constant.bootstrap_interval == constant.t_interval == (1.0, 1.0)


def test_the_margin_is_a_share_of_the_absolute_mean():
    found = paired_difference([-12.0, -13.0], [-10.0, -10.0], margin=0.2)
    assert found.share == pytest.approx(-0.25)
    assert not found.within
    narrow = paired_difference(FAST, SB3, margin=0.1)
    assert narrow.within
    assert not narrow.interval_within


def test_a_reference_of_zero_gives_no_finite_share():
    found = paired_difference([1.0, 1.0], [-1.0, 1.0])
    assert found.share == np.inf
    assert not found.within


@pytest.mark.parametrize(("values", "reference"), [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_too_few_pairs_are_refused(values, reference):
    with pytest.raises(ValueError, match="two pairs are the least"):
        paired_difference(values, reference)
