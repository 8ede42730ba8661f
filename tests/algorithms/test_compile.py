"""The compiled update against the update as it stands."""

import math
import warnings
import zipfile

import numpy as np
import pytest
import torch
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO
from sb3_ano.algorithms import base, update
from sb3_ano.algorithms.update import CapturedStep, StepResult
from tests.algorithms.test_equals_sb3_ppo import CASES, after_three_rollouts, make, relative_difference, tolerance
from tests.algorithms.test_policies import Overriding
from tests.common import ALGORITHMS, SMALL, needs_compiler, parameters

COMPILED = {"torch_compile": True}


@pytest.fixture
def traced(monkeypatch) -> list:
    """Trace as the compiler would, without a graph break or a guard, but run what was traced without compiling it."""
    graphs = []
    compile_it = torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def trace(function, fullgraph, dynamic, options):
        assert fullgraph
        kept = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_it(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend, options=kept)

    monkeypatch.setattr(update.torch, "compile", trace)
    return graphs


def is_compiled(model) -> bool:
    return model._step.compiled


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


@pytest.mark.parametrize(
    "change", [{"ent_coef": 0.1}, {"vf_coef": 0.1}, {"max_grad_norm": 0.01}, {"normalize_advantage": False}]
)
def test_a_coefficient_that_is_changed_between_two_calls_acts(change, traced):
    def run(compiled: bool) -> torch.Tensor:
        model = ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=compiled).learn(64)
        for name, value in change.items():
            setattr(model, name, value)
        return parameters(model.learn(64, reset_num_timesteps=False))

    assert relative_difference(run(False), run(True)) <= 1e-6


def test_a_number_that_a_policy_loss_reads_acts_when_it_is_changed(traced):
    def run(compiled: bool, omega: float) -> torch.Tensor:
        model = PAPO("MlpPolicy", "CartPole-v1", **SMALL, max_epoch_kl=None, torch_compile=compiled).learn(64)
        model.omega1 = omega
        return parameters(model.learn(64, reset_num_timesteps=False))

    assert relative_difference(run(False, 0.5), run(True, 0.5)) <= 1e-6
    assert relative_difference(run(True, 0.005), run(True, 0.5)) > 1e-5


def test_loaded_parameters_and_optimizer_states_are_gone_on_with(traced, tmp_path):
    def run(compiled: bool) -> torch.Tensor:
        model = ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=compiled).learn(64)
        kept = model.get_parameters()
        model.learn(64)
        model.set_parameters(kept)
        np.random.seed(0)
        return parameters(model.learn(64))

    assert relative_difference(run(False), run(True)) <= 1e-6


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
        ({"policy_kwargs": {"optimizer_class": torch.optim.RMSprop}}, "not a plain torch.optim.Adam, but RMSprop"),
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
        def policy_loss(self, log_ratio, advantages, region, samples):
            loss = super().policy_loss(log_ratio, advantages, region, samples)
            return -loss if loss.item() == math.inf else loss

    expected = ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=False).learn(96)
    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        found = Untraceable("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True).learn(96)
    assert len(warned) == 1
    assert relative_difference(parameters(expected), parameters(found)) <= 1e-6


@pytest.mark.parametrize(("minibatches", "compiles"), [(100, False), (4, True)])
def test_auto_compiles_where_the_run_is_long_enough(minibatches, compiles, traced, monkeypatch):
    monkeypatch.setattr(base, "AUTO_COMPILE_MINIBATCHES", minibatches)
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    assert model.torch_compile == "auto"
    assert is_compiled(model.learn(64)) is compiles  # 2 epochs of 64 / 32 minibatches


def test_a_short_run_does_not_compile():
    assert not is_compiled(ANO("MlpPolicy", "CartPole-v1", **SMALL).learn(64))


def test_a_captured_step_replays_the_graph_on_the_indices_of_the_call(monkeypatch):
    """No CUDA here: the graph is one that remembers what it would run."""
    calls, captured = [], []

    class Graph:
        def replay(self) -> None:
            calls.append(("replayed", captured[0].tolist()))

    class Capturing:
        def __init__(self, graph) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_) -> None: ...

    def step(rollout, indices):
        if len(calls) == 3:
            captured.append(indices)
        else:
            calls.append(("ran", indices.tolist()))
        return StepResult(*torch.zeros(6))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    each = CapturedStep(step)
    for i in range(5):
        each(None, torch.tensor([i, i + 1]))
    assert calls == [("ran", [0, 1]), ("ran", [1, 2]), ("ran", [2, 3]), ("replayed", [3, 4]), ("replayed", [4, 5])]


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
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    expected = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=False).learn(96)
    with pytest.warns(UserWarning, match="torch_compile: the update cannot be compiled") as warned:
        found = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=True).learn(96)
    assert len([w for w in warned if "torch_compile" in str(w.message)]) == 1
    assert torch.equal(parameters(expected), parameters(found))
