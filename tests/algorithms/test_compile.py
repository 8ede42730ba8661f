"""The compiled update against the update as it stands."""

import contextlib
import math
import threading
import warnings
import zipfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO
from sb3_ano.algorithms import compiled as compiled_module
from sb3_ano.algorithms import update
from tests.algorithms.test_equals_sb3_ppo import (
    CASES,
    NormalisedExtractor,
    after_three_rollouts,
    make,
    relative_difference,
    tolerance,
)
from tests.algorithms.test_policy_evaluation import Overriding
from tests.common import ALGORITHMS, SMALL, needs_compiler, parameters
from tests.tiny_envs import BOX_OBSERVATIONS, tiny_vec_env

COMPILED = {"torch_compile": True}


@contextlib.contextmanager
def traced_only() -> Iterator[list]:
    """Trace as the compiler would, without a graph break, but run what was traced without compiling it; yields the graphs."""
    graphs = []
    compile_it = torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def trace(function, fullgraph, dynamic, options):
        assert fullgraph
        return compile_it(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compiled_module.torch, "compile", trace)
        yield graphs


@pytest.fixture
def traced() -> Iterator[list]:
    with traced_only() as graphs:
        yield graphs


def is_compiled(model) -> bool:
    return model._updater.compiled


@pytest.mark.parametrize("case", CASES)
def test_every_policy_and_distribution_is_one_graph(case, traced):
    few = {"n_epochs": 2, "n_steps": 64}
    expected = after_three_rollouts(ANO, case, shaping="ppo", torch_compile=False, **few)
    found = after_three_rollouts(ANO, case, shaping="ppo", torch_compile=True, **few)
    assert is_compiled(found)
    assert len(traced) == 1
    assert relative_difference(parameters(expected), parameters(found)) <= tolerance(case)


@pytest.mark.filterwarnings("ignore:batch_size=24 does not divide")
@pytest.mark.parametrize("cls", ALGORITHMS)
def test_schedules_and_a_short_last_minibatch_make_two_graphs(cls, traced):
    schedule = LinearSchedule(0.3, 0.1, 1.0)
    options = {"clip_range": schedule, "clip_range_high": schedule, "clip_range_vf": schedule, "learning_rate": schedule}
    runs = [
        cls("MlpPolicy", "CartPole-v1", **{**SMALL, "batch_size": 24}, **options, torch_compile=compiled).learn(160)
        for compiled in (False, True)
    ]
    assert len(traced) == 2
    assert is_compiled(runs[1])
    assert relative_difference(*map(parameters, runs)) <= 1e-6


def test_two_models_in_one_process_do_not_share_compiled_code(traced):
    expected = [after_three_rollouts(ANO, "CartPole", shaping=shape, n_epochs=2) for shape in ("ppo", "spo")]
    found = [after_three_rollouts(ANO, "CartPole", shaping=shape, n_epochs=2, **COMPILED) for shape in ("ppo", "spo")]
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_difference(parameters(theirs), parameters(mine)) <= 1e-6
    assert relative_difference(*map(parameters, found)) > 1e-5


class Reading(ANO):
    """A policy loss that reads Python attributes."""

    bonus = None
    squared = False
    kernel = staticmethod(torch.tanh)

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
        if self.bonus is not None:
            loss = loss + self.bonus * log_ratio.mean()
        return loss + 0.1 * self.kernel(log_ratio.square() if self.squared else log_ratio).mean()


class Scaling(FlattenExtractor):
    """An extractor that reads Python attributes."""

    scale = 1.0
    doubled = False

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations) * self.scale * (2.0 if self.doubled else 1.0)


def load_former_parameters(model) -> None:
    kept = model.get_parameters()
    model.learn(64)
    model.set_parameters(kept)
    np.random.seed(0)


CHANGES = {
    "ent_coef": lambda model: setattr(model, "ent_coef", 5.0),
    "vf_coef": lambda model: setattr(model, "vf_coef", 0.1),
    "max_grad_norm": lambda model: setattr(model, "max_grad_norm", 0.01),
    "normalize_advantage": lambda model: setattr(model, "normalize_advantage", False),
    "bonus": lambda model: setattr(model, "bonus", 0.5),
    "squared": lambda model: setattr(model, "squared", True),
    "kernel": lambda model: setattr(model, "kernel", torch.neg),
    "extractor.scale": lambda model: setattr(model.policy.features_extractor, "scale", 3.0),
    "extractor.doubled": lambda model: setattr(model.policy.features_extractor, "doubled", True),
    "loaded parameters": load_former_parameters,
}


def before_and_after(change, compiled: bool) -> torch.Tensor:
    extractor = {"features_extractor_class": Scaling}
    model = Reading("MlpPolicy", "Pendulum-v1", **SMALL, policy_kwargs=extractor, torch_compile=compiled).learn(32)
    change(model)
    model.learn(32)
    assert is_compiled(model) is compiled
    return parameters(model)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_two_calls_acts(name, traced):
    expected = before_and_after(CHANGES[name], False)
    assert relative_difference(expected, before_and_after(CHANGES[name], True)) <= 1e-6
    assert relative_difference(expected, before_and_after(lambda model: None, False)) > 5e-6


def test_saved_models_are_the_same_file_whatever_the_mode(traced, tmp_path):
    contents = []
    for compiled in (False, True):
        path = tmp_path / f"{compiled}.zip"
        ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=compiled).learn(64).save(path)
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.getinfo(name).file_size for name in archive.namelist()})
            states = torch.load(archive.open("policy.pth"), weights_only=True)
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in states.values())
        loaded = ANO.load(path, env=None)
        assert torch.equal(parameters(loaded), parameters(ANO.load(path)))
    eager, compiled = contents
    assert eager.keys() == compiled.keys()
    assert eager["policy.pth"] == compiled["policy.pth"]
    assert eager["policy.optimizer.pth"] == compiled["policy.optimizer.pth"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": Overriding}, "Overriding overrides evaluate_actions"),
        ({"policy_kwargs": {"optimizer_class": torch.optim.RMSprop}}, "not the Adam that the model has made, but RMSprop"),
    ],
)
def test_what_cannot_be_compiled_is_warned_about_once_and_trains_the_same(options, reason):
    settings = {**SMALL, "policy": "MlpPolicy", **options, "env": "Pendulum-v1"}
    expected = ANO(**settings, torch_compile=False).learn(96)
    with pytest.warns(UserWarning, match=f"torch_compile: the update cannot be compiled.*{reason}") as warned:
        found = ANO(**settings, torch_compile=True).learn(96)
    assert len(warned) == 1
    assert torch.equal(parameters(expected), parameters(found))


def test_code_that_cannot_be_traced_is_warned_about_once_and_trains_the_same():
    class Untraceable(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
            return -loss if loss.item() == math.inf else loss

    expected = ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=False).learn(96)
    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        found = Untraceable("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True).learn(96)
    assert len(warned) == 1
    assert relative_difference(parameters(expected), parameters(found)) <= 1e-6


@pytest.mark.parametrize(("seconds", "compiles"), [(1.0, False), (4 * 4e-4, True)])
def test_auto_compiles_where_the_run_is_long_enough(seconds, compiles, traced, monkeypatch):
    monkeypatch.setattr(compiled_module, "COMPILE_SECONDS", seconds)
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL).learn(32)
    assert model.torch_compile == "auto"
    assert not is_compiled(model)
    assert is_compiled(model.learn(64)) is compiles  # 2 epochs of 64 / 32 minibatches


@pytest.mark.parametrize(("width", "batch_size", "steps"), [(64, 64, 256_000), (256, 1024, 500_000)])
def test_auto_compiles_wide_networks_after_fewer_minibatches(width, batch_size, steps):
    model = ANO("MlpPolicy", "CartPole-v1", batch_size=batch_size, policy_kwargs={"net_arch": [width, width]})
    model._total_timesteps = steps // 2
    assert not model._compiles()
    model._total_timesteps = 2 * steps
    assert model._compiles()


def test_a_loss_that_looks_at_the_policy_itself_has_its_gradient(traced):
    class Regularised(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            penalty = sum(parameter.square().sum() for parameter in self.policy.parameters())
            latent = self.policy.mlp_extractor.forward_actor(samples.observations)
            return super().policy_loss(log_ratio, advantages, clip_range, samples) + 0.1 * penalty + latent.square().mean()

    runs = [Regularised("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=compiled).learn(96) for compiled in (False, True)]
    assert is_compiled(runs[1])
    assert relative_difference(*map(parameters, runs)) <= 1e-6
    plain = ANO("MlpPolicy", "Pendulum-v1", **SMALL).learn(96)
    assert relative_difference(parameters(plain), parameters(runs[1])) > 1e-4


def test_annealed_coefficients_need_one_graph(traced):
    class Anneal(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            self.model.ent_coef *= 0.5
            self.model.vf_coef *= 0.9
            self.model.max_grad_norm *= 0.9

    def run(compiled: bool) -> torch.Tensor:
        model = ANO("MlpPolicy", "CartPole-v1", **SMALL, ent_coef=0.1, torch_compile=compiled)
        return parameters(model.learn(320, callback=Anneal()))

    assert relative_difference(run(False), run(True)) <= 1e-6
    assert len(traced) == 1


def test_what_changes_at_every_update_ends_compilation_with_one_warning(traced):
    class Counting(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            return super().policy_loss(log_ratio, advantages, clip_range, samples) * (1.0 + 1e-5 * self._n_updates)

    def run(compiled: bool) -> torch.Tensor:
        return parameters(Counting("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=compiled).learn(32 * 14))

    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        found = run(True)
    assert len(warned) == 1
    assert relative_difference(run(False), found) <= 1e-6


def test_what_changes_at_every_call_ends_compilation_with_one_warning_and_no_log(traced, capfd):  # review users U22
    class Counting(FlattenExtractor):
        calls = 0

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(observations) * (1.0 + 1e-3 * self.calls)

    def run(compiled: bool) -> torch.Tensor:
        options = {**SMALL, "n_epochs": 8, "policy_kwargs": {"features_extractor_class": Counting}}
        return parameters(ANO("MlpPolicy", "CartPole-v1", **options, torch_compile=compiled).learn(64))

    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled.*compiled 3 times") as warned:
        found = run(True)
    assert len(warned) == 1
    assert len(traced) == 3
    assert relative_difference(run(False), found) <= 1e-6
    assert "recompile_limit" not in capfd.readouterr().err


def test_after_compilation_the_user_is_told_that_it_takes_a_while(traced, capsys):  # review users U24
    ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True, verbose=1).learn(64)
    assert capsys.readouterr().out.count("Compiling the update") == 1
    ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True).learn(32)
    ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=False, verbose=1).learn(32)
    assert "Compiling" not in capsys.readouterr().out


def test_no_setting_of_the_compiler_outlives_or_leaves_a_training(traced):  # review core 10
    from torch._dynamo import config, eval_frame

    def global_settings() -> tuple:
        return eval_frame._stance, config.trace_autograd_ops, config.recompile_limit, torch.get_num_threads()

    before = global_settings()
    trained, stances = [], []

    def train(env: str) -> None:
        model = ANO("MlpPolicy", env, **SMALL, torch_compile=True)
        model._is_last_epoch = lambda statistics: stances.append(eval_frame._stance) or False
        trained.append(is_compiled(model.learn(128)))

    threads = [threading.Thread(target=train, args=(env,)) for env in ("CartPole-v1", "Pendulum-v1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trained == [True, True]
    assert global_settings() == before
    assert all(stance is before[0] for stance in stances)


@pytest.mark.parametrize(
    ("options", "stock"),
    [
        ({}, True),
        ({"use_sde": True}, True),
        ({"use_sde": True, "policy_kwargs": {"squash_output": True}}, False),  # review core 1
        ({"policy_kwargs": {"features_extractor_class": NormalisedExtractor}}, False),
        ({"shaping": torch.sin}, False),
    ],
)
def test_only_code_that_is_known_gets_another_tanh(options, stock):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ANO("MlpPolicy", "Pendulum-v1", **SMALL, **options, torch_compile=True)
    assert model._get_updater()._compiler_options(32)["cpp.use_decompose_tanh"] is stock


# The compiler's own code warns.
real_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")


@pytest.mark.slow
@needs_compiler
@real_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_update_gives_the_same_parameters(case):
    options = {"n_epochs": 4} if case == "image" else {}
    expected = after_three_rollouts(ANO, case, shaping="ppo", torch_compile=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_compile")
        found = after_three_rollouts(ANO, case, shaping="ppo", torch_compile=True, **options)
    assert is_compiled(found)
    assert relative_difference(parameters(expected), parameters(found)) <= tolerance(case)


@pytest.mark.slow
@needs_compiler
@real_compiler
@pytest.mark.parametrize("cls", ALGORITHMS)
def test_every_algorithm_compiles(cls):
    eager, compiled = (
        cls("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=compile_it, clip_range=LinearSchedule(0.2, 0.1, 1.0)).learn(96)
        for compile_it in (False, True)
    )
    assert is_compiled(compiled)
    assert relative_difference(parameters(eager), parameters(compiled)) <= 1e-6


@pytest.mark.slow
@needs_compiler
@real_compiler
@pytest.mark.parametrize("case", ["Pendulum", "image"])
def test_bfloat16_compiles(case):
    model = make(ANO, case, torch_compile=True, precision="bfloat16", n_epochs=1)
    model.learn(2 * model.n_steps * model.n_envs)
    assert is_compiled(model)
    assert parameters(model).isfinite().all()


@pytest.mark.slow
@real_compiler
def test_without_a_compiler_the_update_runs_as_it_stands_with_one_warning(monkeypatch, tmp_path):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=False).learn(96)
    # monkeypatch would leave the setting deleted.
    no_compiler = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        found = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=True).learn(96)
    assert len([w for w in warned if "torch_compile" in str(w.message)]) == 1
    assert torch.equal(parameters(expected), parameters(found))


DISTRIBUTIONS = {
    "Gaussian": (spaces.Box(-1.0, 1.0, (6,), np.float32), {}),
    "Gaussian, narrow": (spaces.Box(-1.0, 1.0, (6,), np.float32), {"policy_kwargs": {"log_std_init": -3.0}}),
    "Categorical": (spaces.Discrete(3), {}),
    "MultiCategorical": (spaces.MultiDiscrete([3, 2]), {}),
    "Bernoulli": (spaces.MultiBinary(3), {}),
    "gSDE": (spaces.Box(-1.0, 1.0, (6,), np.float32), {"use_sde": True}),
    "gSDE, expln": (spaces.Box(-1.0, 1.0, (6,), np.float32), {"use_sde": True, "policy_kwargs": {"use_expln": True}}),
    "gSDE, squashed": (
        spaces.Box(-1.0, 1.0, (6,), np.float32),
        {"use_sde": True, "policy_kwargs": {"squash_output": True, "log_std_init": 1.0}},
    ),
}


def largest_ratio(distribution: str) -> float:
    """Of the compiled policy to the one of the rollout, which has the same parameters: 1 but for rounding."""
    actions, options = DISTRIBUTIONS[distribution]
    settings = {"n_steps": 256, "batch_size": 512, "n_epochs": 2, "learning_rate": 0.0, "seed": 3, **options}
    model = ANO("MlpPolicy", tiny_vec_env(BOX_OBSERVATIONS, actions), **settings, torch_compile=True).learn(512)
    assert is_compiled(model)
    return model.logger.name_to_value["train/ratio_max"]


@pytest.mark.slow
@needs_compiler
@real_compiler
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_compiled_log_probabilities_are_those_of_the_rollout(distribution):  # review core 1
    assert largest_ratio(distribution) == pytest.approx(1.0, abs=2e-5)


@pytest.mark.slow
@needs_compiler
@real_compiler
def test_that_test_finds_a_tanh_that_loses_digits(monkeypatch):
    options = update.compiler_options
    monkeypatch.setattr(update, "compiler_options", lambda device, products, stock: options(device, products, True))
    assert largest_ratio("gSDE, squashed") > 1.01


@pytest.mark.slow
@needs_compiler
@real_compiler
def test_compiled_dropout_draws_the_masks_of_pytorch():  # review core 12
    options = {**SMALL, "policy_kwargs": {"features_extractor_class": NormalisedExtractor}}
    runs = [ANO("MlpPolicy", "Pendulum-v1", **options, torch_compile=compiled).learn(96) for compiled in (False, True)]
    assert is_compiled(runs[1])
    assert relative_difference(*map(parameters, runs)) <= 1e-6
