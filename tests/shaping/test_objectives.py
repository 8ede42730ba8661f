"""The published objectives against formulas that are written here from their sources, in NumPy, without the package."""

import functools
import math
import re

import numpy as np
import pytest
import torch
from scipy import optimize

from sb3_ano.shaping import OBJECTIVES, check, fingerprint, is_importable, require_trainable, surrogate
from tests.common import ROOT, needs_compiler

RADII = [(0.2, 0.2), (0.1, 0.28)]
# Not at an edge of a clip, where one side or the other is a matter of taste.
LOG_RATIOS = np.linspace(math.log(1e-4), math.log(1e4), 997)


def inside(r, a, low, high):
    """Whether PPO's clip lets a sample through."""
    return np.where(a >= 0, r <= 1 + high, r >= 1 - low)


def cosh_weight(r, tau):
    """``r / cosh^2(tau (r - 1) / 2)``, for large arguments, too."""
    decay = np.exp(-np.abs(tau * (r - 1)))
    return r * 4 * decay / (1 + decay) ** 2


def ano_slope(x):
    """``-45 / (32 ln 2) phi'(x - 1)`` with ``phi'(z) = ln 2 (-2 / (1 + 4^z) + 4 2^-z / (1 + 2^-z)^2)``."""
    power = 2.0 ** -np.abs(x - 1)
    first = np.where(x >= 1, 2 * power**2 / (1 + power**2), 2 / (1 + power**2))
    return 45 / 32 * (first - 4 * power / (1 + power) ** 2)


def trgppo_edge(p, a, low, high):
    """The ratio at which ``KL(old, new)`` of two outcomes is the limit, by bisection."""
    eps = high if a >= 0 else low
    delta = math.log(1 + eps) + ((1 + eps) ** -2 - 1) / 2
    p = min(max(p, 0.01), 0.99)

    def excess(r):
        return (1 - p) * math.log((1 - p) / (1 - p * r)) - p * math.log(r) - delta

    bounds = (1.0, (1 - 1e-12) / p) if a >= 0 else (1e-12, 1.0)
    return optimize.brentq(excess, *bounds, xtol=1e-15)


def within_kl(r, a, low, high, p):
    edges = {(probability, sign): trgppo_edge(probability, sign, low, high) for probability in set(p) for sign in (1, -1)}
    edge = np.array([edges[probability, 1 if sign >= 0 else -1] for probability, sign in zip(p, a, strict=True)])
    return np.where(a >= 0, r <= edge, r >= edge)


def weights(constants):
    """The weight ``w`` in ``d J / d log r = w A`` of each, as a function of ratio, advantage, radii and old probability."""
    c = constants
    return {
        "ano": lambda r, a, low, high, p: r * ano_slope(np.sign(a) * (r - 1) / np.where(a >= 0, high, low)),
        "spo": lambda r, a, low, high, p: r * (1 - np.sign(a) * (r - 1) / np.where(a >= 0, high, low)),
        "ppo": lambda r, a, low, high, p: r * inside(r, a, low, high),
        "identity": lambda r, a, low, high, p: r,
        "dual_clip": lambda r, a, low, high, p: r * inside(r, a, low, high) * ((a >= 0) | (r <= c["c"])),
        "two_sided_clip": lambda r, a, low, high, p: r * inside(r, a, low, high) * ((a >= 0) | (r <= c["delta"])),
        "sapo": lambda r, a, low, high, p: cosh_weight(r, np.where(a >= 0, c["tau_pos"], c["tau_neg"])),
        "tanh": lambda r, a, low, high, p: cosh_weight(r, 2 / np.where(a >= 0, high, low)),
        "pspo": lambda r, a, low, high, p: (1 - c["alpha"]) * r,
        "leaky_ppo": lambda r, a, low, high, p: np.where(inside(r, a, low, high), r, c["alpha"] * r),
        "ppo_rb": lambda r, a, low, high, p: np.where(inside(r, a, low, high), r, -c["alpha"] * r),
        "dppo": lambda r, a, low, high, p: r * np.where(a >= 0, p * r - p <= high, p * r - p >= -low),
        "trgppo": lambda r, a, low, high, p: r * within_kl(r, a, low, high, p),
        "cispo": lambda r, a, low, high, p: np.minimum(r, 1 + high),
        "tis": lambda r, a, low, high, p: np.minimum(r, c["c"]),
        "icepop": lambda r, a, low, high, p: r * ((c["alpha"] <= r) & (r <= c["beta"])),
        "topr": lambda r, a, low, high, p: np.where(a >= 0, 1.0, np.clip(r, 0, 1)),
        "reinforce": lambda r, a, low, high, p: np.ones_like(r),
        "aspo": lambda r, a, low, high, p: np.minimum(np.where(a >= 0, 1 / r, r), c["c"]) * inside(r, a, low, high),
        "gppo": lambda r, a, low, high, p: np.where(inside(r, a, low, high), r, np.where(a >= 0, 1 + high, 1 - low)),
    }


#: The constants that the sources have.
CONSTANTS = {
    "dual_clip": {"c": 3.0},
    "two_sided_clip": {"delta": 4.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "pspo": {"alpha": 0.1},
    "leaky_ppo": {"alpha": 0.01},
    "ppo_rb": {"alpha": 0.3},
    "tis": {"c": 2.0},
    "icepop": {"alpha": 0.5, "beta": 5.0},
    "aspo": {"c": 3.0},
}


def samples():
    """Log-ratios, advantages of both signs, and old log-probabilities, the same number of each."""
    log_ratio, advantages = map(np.ravel, np.meshgrid(LOG_RATIOS, [-2.0, -0.5, 0.7, 3.0]))
    probability = np.resize([0.02, 0.3, 0.9], len(log_ratio))
    return log_ratio, advantages, probability


def gradient(name, log_ratio, advantages, probability, low, high):
    x = torch.from_numpy(log_ratio).requires_grad_()
    objective = surrogate(
        x, torch.from_numpy(advantages), name, eps_low=low, eps_high=high, old_log_prob=torch.from_numpy(probability).log()
    )
    (found,) = torch.autograd.grad(objective.sum(), x)
    return found.numpy()


def test_the_constants_are_those_of_the_sources():
    assert {name: dict(objective.constants) for name, objective in OBJECTIVES.items() if objective.constants} == CONSTANTS


@pytest.mark.parametrize("radii", RADII, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_formula(name, radii):
    log_ratio, advantages, probability = samples()
    formula = weights(CONSTANTS.get(name, {}))[name]
    expected = advantages * formula(np.exp(log_ratio), advantages, *radii, probability)
    found = gradient(name, log_ratio, advantages, probability, *radii)
    # Numbers below 1e-300 have fewer digits.
    assert (np.abs(found - expected) <= 1e-9 * np.abs(expected) + 1e-300).all()
    assert np.count_nonzero(expected) > len(expected) / 20


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_formula_holds_under_schedules_of_the_radius(name):
    log_ratio, advantages, probability = samples()
    formula = weights(CONSTANTS.get(name, {}))[name]
    for progress in (1.0, 0.37, 0.05):
        low, high = 0.2 * progress, 0.28 * progress
        x = torch.from_numpy(log_ratio).requires_grad_()
        radii = {"eps_low": torch.tensor(low).double(), "eps_high": torch.tensor(high).double()}
        low, high = radii["eps_low"].item(), radii["eps_high"].item()
        old_log_prob = torch.from_numpy(probability).log()
        objective = surrogate(x, torch.from_numpy(advantages), name, **radii, old_log_prob=old_log_prob)
        (found,) = torch.autograd.grad(objective.sum(), x)
        expected = advantages * formula(np.exp(log_ratio), advantages, low, high, probability)
        assert (np.abs(found.numpy() - expected) <= 1e-9 * np.abs(expected) + 1e-300).all()


EXTREMES = [-1e4, -100.0, -20.5, -1.0, -1e-3, 0.0, 1e-3, 1.0, 19.0, 20.5, 100.0, 1e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_are_finite_for_every_finite_log_ratio(name, dtype):
    numbers = [EXTREMES, [-50.0, -1.0, 0.0, 1.0, 50.0], [-1e4, -30.0, -0.1, 0.0, 30.0]]
    log_ratio, advantages, old_log_prob = (
        grid.flatten().to(dtype) for grid in torch.meshgrid(*map(torch.tensor, numbers), indexing="ij")
    )
    log_ratio.requires_grad_()
    for eps in (0.0, 1e-6, 0.2, 4.0):
        arguments = {"eps_low": eps, "eps_high": eps, "old_log_prob": old_log_prob}
        value = surrogate(log_ratio, advantages, name, **arguments)
        (slope,) = torch.autograd.grad(value.sum(), log_ratio)
        assert value.isfinite().all()
        assert slope.isfinite().all()
        assert not slope[log_ratio > 20].any()  # beyond saturation
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(surrogate(log_ratio, advantages, name, **arguments), value)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
@pytest.mark.parametrize("name", ["cispo", "aspo", pytest.param("all", marks=pytest.mark.slow)])
def test_compiled_code_gives_the_same_value_and_gradient(name):
    log_ratio = torch.tensor(EXTREMES).repeat(4)
    advantages = torch.tensor([-50.0, -1.0, 1.0, 50.0]).repeat_interleave(len(EXTREMES))
    old_log_prob = torch.linspace(-5, 0, len(log_ratio))
    for each in OBJECTIVES if name == "all" else [name]:

        def objective(log_ratio, advantages, eps, old_log_prob, each=each):
            return surrogate(log_ratio, advantages, each, eps_low=eps, eps_high=eps, old_log_prob=old_log_prob)

        compiled = torch.compile(objective, fullgraph=True)
        for dtype in (torch.float32, torch.bfloat16):
            for eps in (1e-6, 0.2):
                found = []
                for function in (objective, compiled):
                    x = log_ratio.to(dtype).requires_grad_()
                    value = function(x, advantages.to(dtype), torch.tensor(eps), old_log_prob.to(dtype))
                    (slope,) = torch.autograd.grad(value.sum(), x)
                    assert value.isfinite().all()
                    assert slope.isfinite().all()
                    found.append((value, slope))
                (value, slope), (compiled_value, compiled_slope) = found
                torch.testing.assert_close(compiled_value, value, rtol=1e-5, atol=1e-4)
                torch.testing.assert_close(compiled_slope, slope, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_name_leads_to_its_shape_and_says_what_it_loses(name):
    assert is_importable(name)
    assert np.isfinite(fingerprint(name)).all()
    properties = measured(name)
    parts = properties if isinstance(properties, tuple) else [properties]
    lost = require_trainable(name)
    assert len(lost) == sum(not part.verdicts["enclosed"] for part in parts)
    assert all("violates enclosure" in message for message in lost)
    assert all(part.verdicts["anchored"] for part in parts)


measured = functools.cache(check)


def page_rows():
    """The rows of the table of properties in docs/objectives.md, by name and side."""
    text = (ROOT / "docs/objectives.md").read_text()
    table = text[text.index("## Properties") :]
    rows = re.findall(r"^\| `(\w+)`(?:, \$A (\\ge|<) 0\$)? \| ([^\n]+) \|$", table, re.MULTILINE)
    return {(name, side): tuple(cell.strip() for cell in cells.split("|")) for name, side, cells in rows}


def test_the_page_has_the_properties_that_are_measured():
    expected = {}
    for name in OBJECTIVES:
        properties = measured(name)
        sides = [("\\ge", properties.f), ("<", properties.g)] if isinstance(properties, tuple) else [("", properties)]
        for side, part in sides:
            verdicts = part.verdicts
            cells = [f"{part.slope_at_zero:g}", *("yes" if verdicts[key] else "no" for key in verdicts if key != "anchored")]
            expected[name, side] = tuple(cells)
    assert page_rows() == expected


def test_the_page_has_formula_source_and_constants_of_each():
    text = (ROOT / "docs/objectives.md").read_text()
    table = text[text.index("## Formulas") : text.index("## Properties")]
    for name, objective in OBJECTIVES.items():
        (row,) = re.findall(rf"^\| `{name}` \| [^\n]+ \|$", table, re.MULTILINE)
        assert objective.code in row
        for number in re.findall(r"\d{4}\.\d{5}", objective.source):
            assert number in row
        for value in objective.constants.values():
            assert f"{value:g}" in row
