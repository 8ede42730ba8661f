"""An update: what ends it, minibatches that are not finite, precision, the diagnostics, and the adaptive radius."""

import copy
import itertools
import math
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.hub import load_safe, save_safe
from tests.algorithms.comparison import traced_only
from tests.algorithms.configurations import Callback
from tests.algorithms.custom_policies import Overriding
from tests.algorithms.test_equals_sb3_contrib import make
from tests.common import ALGORITHMS, SMALL, parameters

# Policies, optimizers and buffers of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

SETTINGS = {"n_steps": 64, "batch_size": 16, "n_epochs": 2, "seed": 0}
NAN = math.nan


def logged(model) -> dict[str, float]:
    values = model.logger.name_to_value.items()
    return {name.removeprefix("train/"): value for name, value in values if name.startswith("train/")}


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize(("total", "n_steps"), [(96, 32), (100, 128)])
@pytest.mark.parametrize("end", [0.0, -0.01])
def test_schedules_may_end_at_zero_or_slightly_below(cls, total, n_steps, end):
    def to_the_end(progress_remaining: float) -> float:
        return 0.2 * progress_remaining + end

    schedules = dict.fromkeys(("clip_range", "clip_range_high", "clip_range_vf"), to_the_end)
    options = {**SMALL, **schedules, "n_steps": n_steps, "learning_rate": lambda progress: 1e-3 * progress}
    model = cls("MlpPolicy", "CartPole-v1", **options)
    before = parameters(model)
    model.learn(total)
    assert model.num_timesteps >= total
    assert model.n_skipped_minibatches == 0
    assert parameters(model).isfinite().all()
    assert [logged(model)[name] for name in schedules] == pytest.approx([1e-6, 1e-6, 0.0])
    assert model.policy.optimizer.param_groups[0]["lr"] == 0.0  # not below, although the last rollout may overshoot
    assert torch.equal(parameters(model), before) == (n_steps > total)  # a single update, with nothing to learn


def move(model) -> None:
    torch.nn.init.normal_(model.policy.action_net.weight)


def test_target_kl_ends_the_update_above_one_and_a_half_times_its_value(capsys):
    def train(target_kl: float | None, learning_rate: float = 0.0) -> ANO:
        options = {**SETTINGS, "batch_size": 64, "learning_rate": learning_rate, "verbose": 1}
        return ANO("MlpPolicy", "CartPole-v1", **options, target_kl=target_kl).learn(64, callback=Callback(after=move))

    kl = logged(train(None))["kl_max"]
    assert train(kl / 1.49)._n_updates == 2
    printed = capsys.readouterr().out
    assert "Wrapping the env in a DirectVecEnv" in printed
    assert not re.search("Early stopping|Compiling", printed)
    stopped = train(kl / 1.51, learning_rate=1e-3)
    assert (stopped._n_updates, steps_made(stopped), logged(stopped)["grad_norm"]) == (1, set(), 0.0)
    assert logged(stopped)["approx_kl"] == pytest.approx(kl)
    assert "Early stopping in epoch 0: the KL of a minibatch reached" in capsys.readouterr().out


class Spoiled(ANO):
    """ANO with another policy loss, a function of the bias of the action head, in the minibatches of ``spoiled``."""

    spoiled: range = range(0)
    seen = 0

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        regular = super().policy_loss(log_ratio, advantages, clip_range, samples)
        self.seen += 1
        return 0.0 * regular + self.loss(self.policy.action_net.bias) if self.seen - 1 in self.spoiled else regular


def steps_made(model) -> set[float]:
    return {state["step"].item() for state in model.policy.optimizer.state.values()}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("number", [NAN, math.inf])
def test_a_minibatch_that_is_not_finite_is_skipped_counted_and_reported_once(number, optimizer):
    model = Spoiled("MlpPolicy", "CartPole-v1", **SETTINGS, policy_kwargs={"optimizer_class": optimizer})
    model.spoiled, model.loss = range(2, 5), lambda bias: bias.sum() + number
    with pytest.warns(UserWarning, match="a minibatch was skipped .* because of NaN or Inf in policy_loss") as warned:
        model.learn(64)
    assert sum("a minibatch was skipped" in str(warning.message) for warning in warned) == 1
    assert model.n_skipped_minibatches == logged(model)["skipped_minibatches"] == 3
    assert all(map(math.isfinite, logged(model).values()))
    assert steps_made(model) == {5.0}
    model.spoiled = range(8, 9)
    model.learn(64, reset_num_timesteps=False)  # without a warning
    assert logged(model)["skipped_minibatches"] == 4


def state(model) -> list[torch.Tensor]:
    moments = [value for part in model.policy.optimizer.state_dict()["state"].values() for value in part.values()]
    return copy.deepcopy([parameters(model), *moments])


@pytest.mark.parametrize(
    ("loss", "vf_coef", "term"),
    [
        (lambda bias: bias.sum() * NAN, 0.5, "policy_loss"),
        (lambda bias: bias.sum() * 0.0, 3e38, "the weighted sum of the losses (vf_coef, ent_coef)"),
        # A loss of 0 whose slope is not a number, and one whose squared slope overflows.
        (lambda bias: (bias * 0).sum().sqrt(), 0.5, "the gradient"),
        (lambda bias: (bias - bias.detach()).sum() * 1e30, 0.5, "the gradient"),
    ],
)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_an_update_that_is_not_finite_changes_nothing_raises_and_names_the_term(loss, vf_coef, term, optimizer):
    model = Spoiled("MlpPolicy", "CartPole-v1", **SETTINGS, policy_kwargs={"optimizer_class": optimizer}).learn(64)
    before = state(model)
    model.loss, model.vf_coef, model.spoiled = loss, vf_coef, range(99)
    with pytest.raises(FloatingPointError, match="all 8 minibatches .* were skipped, because of NaN or Inf in ") as caught:
        model.learn(64)
    assert f"in {term}. The largest observation" in str(caught.value)
    assert all(map(torch.equal, state(model), before))


class Recording(ANO):
    """Keeps log-ratios, advantages, and the gradient of the loss by each log-ratio."""

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
        row = {"log_ratio": log_ratio.detach().double().numpy(), "advantages": advantages.numpy(), "loss": loss.item()}
        log_ratio.register_hook(lambda gradient: row.update(gradient=gradient.abs().double().numpy()))
        self.rows.append(row)
        return loss


@pytest.mark.parametrize("shaping", ["ppo", "ano"])
def test_the_log_is_that_of_the_minibatches(shaping):
    options = {**SETTINGS, "learning_rate": 0.01, "shaping": shaping, "clip_range_high": 0.3}
    found = []
    for cls in (ANO, Recording):  # the first one is traced for the compiler
        with traced_only():
            model = cls("MlpPolicy", "CartPole-v1", **options, torch_compile=cls is ANO)
            model.rows = []
            found.append(logged(model.learn(64, callback=Callback(after=move))))
    assert len(model.rows) == 8
    rows = {name: np.stack([row[name] for row in model.rows]) for name in model.rows[0]}
    log_ratio, advantages, gradient = rows["log_ratio"], rows["advantages"], rows["gradient"]
    ratio = np.exp(log_ratio)
    kls = np.mean(ratio - 1 - log_ratio, axis=1)
    above, below = np.mean(ratio > 1.3), np.mean(ratio < 0.8)
    clipped = np.where(advantages >= 0, ratio > 1.3, ratio < 0.8)
    expected = {
        "policy_gradient_loss": np.mean(rows["loss"]),
        "approx_kl": np.mean(kls[4:]),  # of the last epoch, as in SB3
        "kl_mean": np.mean(kls),
        "kl_max": np.max(kls),
        "ratio_mean": np.mean(ratio),
        "ratio_max": np.max(ratio),
        "fraction_above": above,
        "fraction_below": below,
        "clip_fraction": above + below,
        "ppo_discarded_gradient": gradient[clipped].sum() / gradient.sum(),
    }
    for log in found:
        assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert (log["ppo_discarded_gradient"] > 0) == (shaping == "ano")  # where PPO's clip lets nothing through
    assert min(above, below) > 0


@pytest.mark.parametrize("policy", ["MlpPolicy", Overriding])
def test_the_norm_of_the_gradient_is_logged_before_clipping(policy):
    once = {**SETTINGS, "batch_size": 64, "n_epochs": 1}
    models = [ANO(policy, "CartPole-v1", **once, max_grad_norm=limit).learn(64) for limit in (0.01, 1e9)]
    short, whole = (logged(model)["grad_norm"] for model in models)
    assert short == whole > 0.02


@pytest.mark.parametrize("case", ["Box", "gSDE", "MultiDiscrete", "Dict", "image"])
def test_bfloat16_is_close_to_float32_in_rollout_and_update(case):
    def run(collecting: str, updating: str) -> tuple[np.ndarray, float, float]:
        options = {"n_steps": 64, "n_epochs": 1, "learning_rate": 0.0, "torch_compile": False}
        model = make(ANO, case, precision=collecting, **options)
        with torch.no_grad():
            model.policy.action_net.weight *= 100.0  # SB3's are so small that all probabilities are alike
        model.learn(64 * model.n_envs, callback=Callback(after=lambda model: setattr(model, "precision", updating)))
        assert all(parameter.dtype == torch.float32 for parameter in model.policy.parameters())
        return model.rollout_buffer.values[0], logged(model)["value_loss"], logged(model)["ratio_max"]

    assert run("bfloat16", "bfloat16")[2] == pytest.approx(1.0, abs=1e-5)
    exact, collected, updated = run("float32", "float32"), run("bfloat16", "float32"), run("float32", "bfloat16")
    np.testing.assert_allclose(collected[0], exact[0], rtol=0.05, atol=0.05)  # of the same observations
    assert not np.array_equal(collected[0], exact[0])
    assert np.array_equal(updated[0], exact[0])
    assert updated[1] == pytest.approx(exact[1], rel=0.1)
    assert updated[1] != exact[1]
    assert updated[2] > 1.001


def test_bfloat16_has_no_effect_on_custom_policies_which_is_said():
    with pytest.warns(
        UserWarning, match="precision='bfloat16' has no effect, because evaluate_actions overrides evaluate_actions"
    ):
        model = ANO(Overriding, "CartPole-v1", **SMALL, precision="bfloat16").learn(32)
    assert torch.equal(parameters(model), parameters(ANO(Overriding, "CartPole-v1", **SMALL).learn(32)))


def desired(kl: Any, cls: type = ANO, **options: Any) -> ANO:
    short = {"n_steps": 256, "batch_size": 64, "n_epochs": 4, "seed": 0, "learning_rate": 1e-3}
    return cls("MlpPolicy", "Pendulum-v1", **{**short, **options}, desired_kl=kl)


def logged_updates(trained: ANO, updates: int) -> list[dict[str, float]]:
    """Train, and return what each update logged."""
    rows: list[dict] = []  # what is logged at the start of a rollout is of the update before it
    trained.learn(updates * trained.n_steps, callback=Callback(before=lambda model: rows.append(logged(model))))
    return [*rows[1:], logged(trained)]


@pytest.mark.parametrize(("cls", "options"), [(ANO, {}), (ANO, {"shaping": "ppo", "clip_range_high": 0.3}), (SPO, {})])
def test_each_factor_is_the_fourth_root_of_the_missing_kl_within_bounds(cls, options):
    rows = logged_updates(desired(0.005, cls, **options), 8)
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
    rows = logged_updates(desired(target, n_epochs=10), 60)
    # The radius stands still where the logarithms of the KL average to that of the target.
    assert np.exp(np.mean([np.log(row["kl_mean"]) for row in rows[20:]])) == pytest.approx(target, rel=0.25)


@pytest.mark.parametrize(
    ("target", "rate", "second", "last"),
    [(1e-12, 1e-4, 0.16, 0.05), (0.99, 1e-4, 0.25, 4.0), (0.01, 0.0, 0.25, 4.0), (None, 1e-4, 0.2, 0.2)],
)
@pytest.mark.filterwarnings("ignore:desired_kl=.* is out of reach")
def test_radius_changes_at_most_by_a_factor_within_its_bounds(target, rate, second, last):
    rows = logged_updates(desired(target, n_epochs=1, learning_rate=rate), 18)
    assert [rows[1]["clip_range"], rows[-1]["clip_range"]] == pytest.approx([second, last], rel=1e-6)


def test_a_schedule_of_the_radius_would_work_against_the_target():
    with pytest.raises(ValueError, match="clip_range is a schedule, which desired_kl would work against"):
        desired(0.01, clip_range="lin_0.2")
    model = desired(0.01)
    model.clip_range = LinearSchedule(0.2, 0.0, 1.0)
    with pytest.raises(ValueError, match="clip_range is a schedule"):
        model.learn(256)


def test_what_cannot_be_adapted_is_rejected_before_an_update(tmp_path):
    with pytest.raises(ValueError, match="clip_range_high is a schedule"):
        desired(0.01, clip_range_high="lin_0.28")
    desired(None, clip_range="lin_0.2").save(tmp_path / "falling")
    desired(0.01).save(tmp_path / "model")
    for name, target, message in (
        ("falling", 0.01, "clip_range is a schedule"),
        ("model", 0, "desired_kl=0.* is not allowed"),
    ):
        model = ANO.load(tmp_path / name, env="Pendulum-v1", desired_kl=target)
        before = parameters(model).clone()
        with pytest.raises(ValueError, match=message):
            model.learn(256)
        assert torch.equal(parameters(model), before)


@pytest.mark.parametrize("load", [ANO.load, load_safe])
def test_a_new_radius_is_that_of_the_next_update(load, tmp_path):
    model = desired(0.99).learn(3 * 256)
    (model.save if load == ANO.load else partial(save_safe, model))(tmp_path / "agent")
    for radius, expected in ((0.2, 0.2 * 1.25**3), (0.1, 0.1)):
        loaded = load(tmp_path / "agent", env="Pendulum-v1")
        loaded.clip_range = radius
        first, second = logged_updates(loaded, 2)
        assert [first["clip_range"], second["clip_range"]] == pytest.approx([expected, 1.25 * expected], rel=1e-5)


@pytest.mark.slow
def test_target_may_be_a_schedule():
    schedules = (0.0005, LinearSchedule(0.0005, 0.0005, 1.0), lambda progress: 0.0005, "lin_0.0005")
    constant, *same, falling = (logged_updates(desired(target), 8)[-1]["clip_range"] for target in schedules)
    assert same == [constant, constant]
    assert falling < constant


def test_loading_keeps_the_adapted_radius(tmp_path):
    trained = desired(0.003).learn(3 * 256)
    trained.save(tmp_path / "model")
    loaded = ANO.load(tmp_path / "model", env="Pendulum-v1")
    assert (loaded.radius_factor, loaded.desired_kl(1.0)) == (trained.radius_factor, 0.003)
    assert logged_updates(loaded, 1)[0]["clip_range"] == pytest.approx(0.2 * trained.radius_factor) != pytest.approx(0.2)
    without = ANO.load(tmp_path / "model", env="Pendulum-v1", desired_kl=None)
    assert logged_updates(without, 1)[0]["clip_range"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("target", "options", "advice"),
    [
        (0.9, {"clip_range": 4.0, "learning_rate": 1e-4}, "raise learning_rate or n_epochs, or lower desired_kl"),
        (0.9, {"clip_range": 0.2, "learning_rate": 1e-4}, None),  # the radius grows for 14 updates
        (1e-9, {"clip_range": 0.05}, "lower learning_rate or n_epochs, or raise desired_kl"),
        # A falling learning rate ends below any target.
        (0.9, {"clip_range": 4.0, "learning_rate": lambda progress: 1e-4 * 0.4 ** (10.0 * (1.0 - progress))}, None),
    ],
)
def test_a_target_out_of_reach_is_warned_about_once_per_training(target, options, advice):
    model = desired(target, n_epochs=1, **options)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.learn(6 * 256)
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == (advice is not None)
        if advice is not None:
            assert f"desired_kl={target:g} is out of reach" in messages[0]
            assert f"the radius is at its bound of {options['clip_range']:.3g}, " in messages[0]
            assert advice in messages[0]


@pytest.mark.parametrize("target", [1, 1.5, -1, 0, math.inf, NAN])
def test_targets_are_above_0_and_below_1(target):
    with pytest.raises(ValueError, match=f"desired_kl={target}.* allowed are a number above 0 and below 1, such as 0.02"):
        desired(target)


def test_a_schedule_of_targets_stays_below_1_too():
    model = desired(LinearSchedule(0.9, 1.5, 1.0))
    before = parameters(model).clone()
    with pytest.raises(ValueError, match="desired_kl=1.5 is not allowed; allowed are a number above 0 and below 1"):
        model.learn(256)
    assert torch.equal(parameters(model), before)


def test_the_log_does_not_depend_on_when_minibatches_are_summarized(monkeypatch):
    def log(samples: int) -> dict[str, float]:
        monkeypatch.setattr("sb3_ano.fast.step._SAMPLES", samples)
        return logged(PAPO("MlpPolicy", "CartPole-v1", **SETTINGS, max_epoch_kl=None).learn(128))

    assert log(1) == pytest.approx(log(2**16), rel=1e-12)


def test_gradients_stay_in_the_parameters_clipped_as_in_sb3():
    def gradients(cls: type, **options: Any) -> torch.Tensor:
        once = {**SETTINGS, "batch_size": 64, "n_epochs": 1, "max_grad_norm": 0.01}
        model = cls("MlpPolicy", "CartPole-v1", **once, **options).learn(64)
        return torch.cat([parameter.grad.flatten() for parameter in model.policy.parameters()])

    found = gradients(ANO, shaping="ppo", torch_compile=False)
    torch.testing.assert_close(found, gradients(PPO), rtol=1e-4, atol=1e-8)
    assert found.norm() == pytest.approx(0.01, rel=1e-3)
