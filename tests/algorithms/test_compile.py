"""The compiled update against the update as it stands. An update that is not compiled warns, which is an error here."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, RecurrentANO
from sb3_ano.fast import compiled
from tests.algorithms.comparison import relative_difference, traced_only
from tests.algorithms.configurations import Callback
from tests.algorithms.custom_policies import Counting, Normalizing, Overriding, Unused
from tests.algorithms.test_equals_sb3_contrib import CASES, PAIRS, after_three_rollouts, make
from tests.algorithms.test_equals_sb3_ppo import tolerance
from tests.common import ALGORITHMS, SMALL, needs_compiler, parameters


@pytest.fixture
def traced() -> Iterator[list]:
    with traced_only() as graphs:
        yield graphs


def both(train: Callable[..., ANO], tolerance: float = 1e-6) -> tuple[ANO, ANO]:
    """Train without and with compilation, require the same parameters, and return both models."""
    eager, compiled = train(torch_compile=False), train(torch_compile=True)
    assert relative_difference(eager, compiled) <= tolerance
    return eager, compiled


def learn(cls: type = ANO, env: Any = "CartPole-v1", steps: int = 96, **options: Any) -> ANO:
    return cls("MlpPolicy", env, **{**SMALL, **options}).learn(steps)


every_case = pytest.mark.parametrize(("cls", "case"), [pair for pair in PAIRS if pair[0] is not RecurrentANO])


def train_case(cls: type, case: str, **options: Any) -> None:
    both(lambda **each: after_three_rollouts(cls, case, shaping="ppo", **options, **each), tolerance(case))


@every_case
def test_every_policy_and_distribution_is_one_graph(cls, case, traced):
    train_case(cls, case, n_epochs=2)
    assert len(traced) == 1


@pytest.mark.filterwarnings("ignore:batch_size=24 does not divide")
@pytest.mark.parametrize("cls", ALGORITHMS)
def test_schedules_and_a_short_last_minibatch_make_two_graphs(cls, traced):
    schedules = dict.fromkeys(("clip_range", "clip_range_high", "clip_range_vf"), LinearSchedule(0.3, 0.1, 1.0))
    # A learning rate of this size would make differences of rounding grow to any size.
    schedules["learning_rate"] = LinearSchedule(3e-3, 1e-3, 1.0)
    both(lambda **options: learn(cls, steps=160, batch_size=24, **schedules, **options))
    assert len(traced) == 2


def test_two_models_in_one_process_do_not_share_compiled_code(traced):
    found = [both(lambda shape=shape, **options: learn(shaping=shape, **options))[1] for shape in ("ppo", "spo")]
    assert relative_difference(*found) > 1e-5


class Untraceable(ANO):
    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
        return -loss if loss.item() == math.inf else loss


class CountingUpdates(ANO):
    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        return super().policy_loss(log_ratio, advantages, clip_range, samples) * (1.0 + 1e-5 * self._n_updates)


def tie(policy) -> None:
    policy.mlp_extractor.value_net[0].weight = policy.mlp_extractor.policy_net[0].weight
    policy.optimizer = type(policy.optimizer)(policy.parameters(), lr=3e-4, eps=1e-5)


def train_longer(policy) -> None:
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    policy.action_net.weight.grad = None
    policy.optimizer.step()


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"policy": Overriding}, None, "evaluate_actions overrides evaluate_actions"),
        ({"policy_kwargs": {"optimizer_kwargs": {"amsgrad": True}}}, None, "not a plain Adam"),
        ({}, lambda policy: policy.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}), "plain Adam"),
        ({}, lambda policy: policy.optimizer.register_step_post_hook(lambda *_: None), "its optimizer has hooks"),
        ({}, lambda policy: policy.value_net.weight.register_hook(lambda _: None), "policy.value_net.weight has hooks"),
        ({}, lambda policy: setattr(policy, "value_net", torch.nn.Linear(64, 1)), "other parameters than the policy"),
        ({}, train_longer, "trained longer than others"),
        ({}, tie, "several of its layers share parameters"),
    ],
)
def test_what_cannot_be_compiled_is_warned_about_once_and_trains_the_same(options, change, reason):
    def train(**compile_it: Any) -> ANO:
        torch.manual_seed(0)
        model = ANO(**{"policy": "MlpPolicy", "env": "Pendulum-v1", **SMALL, **options, **compile_it})
        if change is not None:
            change(model.policy)
        return model.learn(96)

    with pytest.warns(UserWarning, match=f"this training leaves the fast path: .*({reason})") as warned:
        both(train)
    # Once per model; the one without compilation is told about other parts only.
    assert len(warned) in (1, 2)


def test_a_parameter_without_a_gradient_is_warned_about_and_trains_the_same(traced):
    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled"):
        both(lambda **each: learn(policy_kwargs={"features_extractor_class": Unused}, **each))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options", "reason", "graphs"),
    [
        (Untraceable, {}, "", 0),
        (CountingUpdates, {"steps": 160, "batch_size": 16}, "compiled 8 times", 8),
        (ANO, {"steps": 64, "n_epochs": 8, "policy_kwargs": {"features_extractor_class": Counting}}, "compiled 3 times", 3),
    ],
    ids=["untraceable", "at every update", "at every call"],
)
def test_code_that_keeps_changing_is_warned_about_once_and_trains_the_same(cls, options, reason, graphs, traced, capfd):
    with pytest.warns(UserWarning, match=f"torch_compile: the update cannot be compiled.*{reason}") as warned:
        both(lambda **compile_it: learn(cls, **options, **compile_it))
    assert len(warned) == 1
    assert len(traced) == graphs
    assert "recompile_limit" not in capfd.readouterr().err


# With SB3's defaults from 176,000 steps; wide networks save more for each minibatch.
@pytest.mark.parametrize(("width", "batch_size", "steps"), [(64, 64, 176_000), (256, 1024, 344_000)])
@pytest.mark.parametrize(("factor", "compiles"), [(0.8, False), (1.25, True)])
def test_auto_compiles_where_the_run_is_long_enough(width, batch_size, steps, factor, compiles, traced):
    options = {"n_steps": batch_size, "batch_size": batch_size, "n_epochs": 10, "policy_kwargs": {"net_arch": [width, width]}}
    model = ANO("MlpPolicy", "CartPole-v1", **options)
    model.learn(int(factor * steps), callback=lambda *_: model.num_timesteps <= batch_size)
    assert model._n_updates == 10
    assert bool(traced) is compiles


def test_a_loss_that_looks_at_the_policy_itself_has_its_gradient(traced):
    class Regularised(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            penalty = sum(parameter.square().sum() for parameter in self.policy.parameters())
            latent = self.policy.mlp_extractor.forward_actor(samples.observations)
            return super().policy_loss(log_ratio, advantages, clip_range, samples) + 0.1 * penalty + latent.square().mean()

    found, _ = both(lambda **options: learn(Regularised, "Pendulum-v1", **options))
    assert relative_difference(learn(env="Pendulum-v1"), found) > 1e-4
    assert len(traced) == 1


def anneal_and_spoil(model: ANO) -> None:
    model.ent_coef *= 0.5
    model.vf_coef *= 0.9
    model.max_grad_norm *= 0.9
    model.rollout_buffer.advantages[3] = math.nan  # in one minibatch of each epoch


@pytest.mark.filterwarnings("ignore:a minibatch was skipped")
def test_coefficients_and_skipped_minibatches_need_one_graph(traced):
    # With this seed, the very first minibatch is skipped, before which Adam has made no step.
    options = {**SMALL, "batch_size": 16, "ent_coef": 0.1, "seed": 1}
    callback = Callback(after=anneal_and_spoil)
    for model in both(lambda **each: ANO("MlpPolicy", "CartPole-v1", **options, **each).learn(320, callback=callback)):
        assert model.n_skipped_minibatches == 20
    assert len(traced) == 1


def test_before_compilation_the_user_is_told_that_it_takes_a_while(traced, capsys):
    learn(torch_compile=True, verbose=1)
    assert capsys.readouterr().out.count("Compiling the update") == 1
    learn(torch_compile=True)
    learn(torch_compile=False, verbose=1)
    assert "Compiling" not in capsys.readouterr().out


def test_no_setting_of_the_compiler_outlives_a_training(traced):
    from torch._dynamo import config, eval_frame

    def global_settings() -> tuple:
        return eval_frame._stance, config.trace_autograd_ops, config.recompile_limit, torch.get_num_threads()

    before = global_settings()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda env: learn(env=env, torch_compile=True), ("CartPole-v1", "Pendulum-v1")))
    assert len(traced) == 2
    assert global_settings() == before


@pytest.mark.parametrize(
    ("options", "stock", "threads"),
    [
        ({}, True, 1),
        ({"policy_kwargs": {"net_arch": [512, 512]}}, True, None),
        ({"use_sde": True}, True, 1),
        ({"use_sde": True, "policy_kwargs": {"squash_output": True}}, False, 1),
        ({"policy_kwargs": {"features_extractor_class": Normalizing}}, False, 1),
        ({"shaping": torch.sin}, False, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*violates enclosure")
def test_only_known_code_gets_another_tanh_and_only_small_networks_get_one_thread(options, stock, threads, traced):
    learn(env="Pendulum-v1", **options, torch_compile=True)
    assert [(graph["cpp.use_decompose_tanh"], graph.get("cpp.threads")) for graph in traced] == [(stock, threads)]


@pytest.mark.parametrize(
    ("cpu", "flags", "width", "given"),
    [
        ("AMD EPYC", "AVX512", 512, True),
        ("AMD EPYC", "AVX512", 16, False),
        ("AMD EPYC", "AVX2", 512, False),
        ("Xeon", "AVX512", 512, False),
    ],
)
def test_products_of_wide_networks_are_given_to_onednn_where_mkl_is_slow(cpu, flags, width, given, traced, monkeypatch):
    monkeypatch.setattr(compiled, "machine", lambda: {"cpu": cpu})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: flags)
    learn(policy_kwargs={"net_arch": [width, width]}, torch_compile=True)
    assert [graph.get("post_grad_custom_pre_pass") is not None for graph in traced] == [given]


compiler_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")


def real_compiler(test: Callable) -> Callable:
    """Mark a slow test that needs a compiler, whose own code warns."""
    return pytest.mark.slow(needs_compiler(compiler_warnings(test)))


@real_compiler
@every_case
def test_the_compiled_update_gives_the_same_parameters(cls, case):
    train_case(cls, case, **({"n_epochs": 4} if case == "image" else {"clip_range": LinearSchedule(0.2, 0.1, 1.0)}))


@real_compiler
def test_products_by_onednn_give_the_same_parameters(monkeypatch):
    monkeypatch.setattr(compiled, "_mkl_is_slow", lambda: True)
    with torch.profiler.profile() as profile:
        wide = {"policy_kwargs": {"net_arch": [192, 192]}, "n_steps": 256, "batch_size": 256}
        both(lambda **options: learn(env="Pendulum-v1", steps=768, **{**wide, **options}))
    assert any(event.key == "mkldnn::_linear_pointwise" for event in profile.key_averages())


@real_compiler
@pytest.mark.parametrize("case", ["Box", "image"])
def test_bfloat16_compiles(case):
    model = make(ANO, case, torch_compile=True, precision="bfloat16", n_epochs=1)
    model.learn(2 * model.n_steps * model.n_envs)
    assert parameters(model).isfinite().all()


@pytest.mark.slow
@compiler_warnings
def test_without_a_compiler_the_update_runs_as_it_stands_with_one_warning(monkeypatch, tmp_path):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # monkeypatch would leave the setting deleted.
    no_compiler = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        both(lambda **options: learn(env="Pendulum-v1", **options))
    assert len([w for w in warned if "torch_compile" in str(w.message)]) == 1


@real_compiler
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {}) for case in CASES if case not in ("Dict", "image")),
        ("Box", {"policy_kwargs": {"log_std_init": -3.0}}),
        ("gSDE", {"policy_kwargs": {"use_expln": True}}),
        ("gSDE", {"policy_kwargs": {"squash_output": True, "log_std_init": 1.0}}),
    ],
)
def test_compiled_log_probabilities_are_those_of_the_rollout(case, options):
    model = make(ANO, case, **{**options, "n_epochs": 2, "learning_rate": 0.0, "torch_compile": True})
    model.learn(model.n_steps * model.n_envs)
    # The compiled policy has the parameters of the rollout's: ratios are 1 but for rounding.
    assert model.logger.name_to_value["train/ratio_max"] == pytest.approx(1.0, abs=2e-5)


@real_compiler
def test_compiled_dropout_draws_the_masks_of_pytorch():
    both(lambda **each: learn(env="Pendulum-v1", policy_kwargs={"features_extractor_class": Normalizing}, **each))
