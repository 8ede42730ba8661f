"""An update: schedules and limits that end it, minibatches that are not finite, precision, and the diagnostics."""

import copy
import math

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from sb3_ano import ANO
from sb3_ano.algorithms.flat_adam import FlatAdam
from tests.algorithms.custom_policies import Overriding
from tests.algorithms.test_equals_sb3_ppo import make
from tests.common import ALGORITHMS, SMALL, parameters

SETTINGS = {"n_steps": 64, "batch_size": 16, "n_epochs": 2, "seed": 0}
NAN = math.nan
every_algorithm = pytest.mark.parametrize("cls", ALGORITHMS)


def logged(model) -> dict[str, float]:
    values = model.logger.name_to_value.items()
    return {name.removeprefix("train/"): value for name, value in values if name.startswith("train/")}


@every_algorithm
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


class Move(BaseCallback):
    """Moves the policy between collection and update."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        torch.nn.init.normal_(self.model.policy.action_net.weight)


@every_algorithm
def test_target_kl_may_end_the_update_at_its_first_minibatch(cls, capsys):
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, target_kl=1e-6, verbose=1)
    before = parameters(model)
    model.learn(32, callback=Move())
    moved = parameters(model) != before
    assert moved.sum() == model.policy.action_net.weight.numel()
    assert logged(model)["grad_norm"] == 0.0
    assert logged(model)["approx_kl"] > 1.5e-6
    assert "Early stopping in epoch 0: the KL of a minibatch reached" in capsys.readouterr().out


def test_target_kl_ends_the_update_above_one_and_a_half_times_its_value():
    def train(target_kl: float | None = None) -> ANO:
        options = {**SETTINGS, "batch_size": 64, "learning_rate": 0.0}
        return ANO("MlpPolicy", "CartPole-v1", **options, target_kl=target_kl).learn(64, callback=Move())

    kl = logged(train())["kl_max"]
    assert train(kl / 1.49)._n_updates == 2
    assert train(kl / 1.51)._n_updates == 1


class Spoiled(ANO):
    """ANO whose policy loss is multiplied by ``number`` in the minibatches of ``spoiled``, counted from 0."""

    spoiled: range = range(0)
    number = NAN
    seen = 0

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
        self.seen += 1
        return loss * self.number if self.seen - 1 in self.spoiled else loss


def steps_made(model) -> set[float]:
    return {state["step"].item() for state in model.policy.optimizer.state.values()}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("number", [NAN, math.inf])
def test_a_minibatch_that_is_not_finite_is_skipped_counted_and_reported_once(number, optimizer):
    model = Spoiled("MlpPolicy", "CartPole-v1", **SETTINGS, policy_kwargs={"optimizer_class": optimizer})
    model.spoiled, model.number = range(2, 5), number
    with pytest.warns(UserWarning, match="a minibatch was skipped .* because of NaN or Inf in policy_loss") as warned:
        model.learn(64)
    assert len(warned) == 1
    assert model.n_skipped_minibatches == logged(model)["skipped_minibatches"] == 3
    assert all(map(math.isfinite, logged(model).values()))
    assert steps_made(model) == {5.0}
    model.spoiled = range(8, 9)
    model.learn(64, reset_num_timesteps=False)  # without a warning
    assert logged(model)["skipped_minibatches"] == 4


class OwnLoss(ANO):
    """ANO with another policy loss, a function of the bias of the action head, that is turned on by ``loss``."""

    loss = None

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        regular = super().policy_loss(log_ratio, advantages, clip_range, samples)
        return regular if self.loss is None else 0.0 * regular + self.loss(self.policy.action_net.bias)


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
def test_an_update_that_is_not_finite_changes_nothing_raises_and_names_the_term(loss, vf_coef, term):
    model = OwnLoss("MlpPolicy", "CartPole-v1", **SETTINGS).learn(64)
    before = state(model)
    model.loss, model.vf_coef = loss, vf_coef
    with pytest.raises(FloatingPointError, match="all 8 minibatches .* were skipped, because of NaN or Inf in ") as caught:
        model.learn(64)
    assert f"in {term}. Look at" in str(caught.value)
    assert all(map(torch.equal, state(model), before))


def test_an_interrupted_update_leaves_an_optimizer_that_continues():
    class Interrupted(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            if self._n_updates == 3:
                raise KeyboardInterrupt
            return super().policy_loss(log_ratio, advantages, clip_range, samples)

    model = Interrupted("MlpPolicy", "CartPole-v1", **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        model.learn(128)
    assert steps_made(model) == {12.0}


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
    model = Recording("MlpPolicy", "CartPole-v1", **{**SETTINGS, "learning_rate": 0.01}, shaping=shaping, clip_range_high=0.3)
    model.rows = []
    model.learn(64, callback=Move())
    assert len(model.rows) == 8
    ratios = [np.exp(row["log_ratio"]) for row in model.rows]
    kls = [np.mean(ratio - 1 - np.log(ratio)) for ratio in ratios]
    above, below = (
        np.mean([np.mean(side) for side in sides]) for sides in zip(*((r > 1.3, r < 0.8) for r in ratios), strict=True)
    )
    discarded = total = 0.0
    for row, ratio in zip(model.rows, ratios, strict=True):
        clipped = np.where(row["advantages"] >= 0, ratio > 1.3, ratio < 0.8)
        discarded, total = discarded + row["gradient"][clipped].sum(), total + row["gradient"].sum()
    expected = {
        "policy_gradient_loss": np.mean([row["loss"] for row in model.rows]),
        "approx_kl": np.mean(kls[4:]),  # of the last epoch, as in SB3
        "kl_mean": np.mean(kls),
        "kl_max": np.max(kls),
        "ratio_mean": np.mean(ratios),
        "ratio_max": np.max(ratios),
        "fraction_above": above,
        "fraction_below": below,
        "clip_fraction": above + below,
        "ppo_discarded_gradient": discarded / total,
    }
    found = logged(model)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert min(above, below) > 0
    assert (found["ppo_discarded_gradient"] > 0) == (shaping == "ano")  # where PPO's clip lets nothing through


class Switch(Move):
    """Updates in another precision than that of the rollout."""

    def _on_rollout_end(self) -> None:
        self.model.precision = self.precision


@pytest.mark.parametrize("case", ["Pendulum", "gSDE", "MultiDiscrete", "Dict", "image"])
@pytest.mark.filterwarnings("ignore:precision='bfloat16'.*no instructions")
def test_bfloat16_is_close_to_float32_in_rollout_and_update(case):
    def run(collecting: str, updating: str) -> ANO:
        callback = Switch()
        callback.precision = updating
        model = make(ANO, case, n_steps=64, n_epochs=1, precision=collecting, torch_compile=False)
        return model.learn(64 * model.n_envs, callback=callback)

    exact, collected, updated = run("float32", "float32"), run("bfloat16", "float32"), run("float32", "bfloat16")
    values = [model.rollout_buffer.values[0] for model in (exact, collected, updated)]  # of the same observations
    np.testing.assert_allclose(values[1], values[0], rtol=0.05, atol=0.05)
    assert not np.array_equal(values[0], values[1])
    assert np.array_equal(values[0], values[2])
    losses = [logged(model)["value_loss"] for model in (exact, updated)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0] != losses[1]
    assert all(parameter.dtype == torch.float32 for parameter in updated.policy.parameters())


def test_bfloat16_has_no_effect_on_custom_policies_which_is_said():
    with pytest.warns(UserWarning, match="precision='bfloat16' has no effect, because Overriding overrides evaluate_actions"):
        model = ANO(Overriding, "CartPole-v1", **SMALL, precision="bfloat16").learn(32)
    assert torch.equal(parameters(model), parameters(ANO(Overriding, "CartPole-v1", **SMALL).learn(32)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sizes", [[(3, 5), (7,), ()], [(300, 300)]], ids=["small", "large"])
def test_a_step_on_vectors_is_adams_and_a_skipped_one_changes_nothing(sizes, fused, monkeypatch):
    # Compiled code and other devices take the formulas instead of the kernel.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: not fused)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (
        [torch.nn.Parameter(torch.linspace(-1.0, 1.0, math.prod(size)).reshape(size)) for size in sizes] for _ in "ab"
    )
    options = {"betas": (0.8, 0.99), "eps": 1e-5}
    adam, expected = FlatAdam(ours, 1e-2, **options), torch.optim.Adam(theirs, 1e-2, **options, foreach=False)
    for step in range(30):
        rate = 1e-2 * (1.0 - step / 40.0)
        adam.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = rate
        gradients = [torch.randn(size, generator=generator) * 10.0 ** (step % 5 - 4) for size in sizes]
        vectors = adam.flatten()
        state = [vectors.parameters.clone(), vectors.first.clone(), vectors.second.clone(), vectors.steps.clone()]
        vectors.step(vectors.flattened([gradient * NAN for gradient in gradients]), torch.tensor(0.0, dtype=torch.float64))
        assert all(map(torch.equal, state, [vectors.parameters, vectors.first, vectors.second, vectors.steps]))
        vectors.step(vectors.flattened(gradients), torch.tensor(1.0, dtype=torch.float64))
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        for name, value in expected.state[other].items():
            torch.testing.assert_close(adam.state[mine][name], value, rtol=1e-5, atol=1e-12)
            assert adam.state[mine][name].dtype is torch.float32
