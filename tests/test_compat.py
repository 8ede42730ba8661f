"""Remove private names of PyTorch: the package must go on in the slow way, with a warning."""

import re

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from sb3_ano import ANO, explain
from sb3_ano.envs import batched
from sb3_ano.fast import private
from sb3_ano.fast.act import NumpyActor, Snapshot
from tests.common import ROOT, SMALL, parameters

HOOKS = ("_MODULE_HOOKS", "_PARAMETER_HOOKS", "_OPTIMIZER_HOOKS", "_HOOKS_OF_ALL_MODULES")
LACKING = {
    "cache": lambda patch: patch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list"),
    "setting": lambda patch: patch.setitem(private._TRACING, "no_such_setting", True),
    "option": lambda patch: patch.setattr(torch._inductor, "list_options", lambda: []),
}


@pytest.mark.filterwarnings("ignore:this training leaves the fast path")
@pytest.mark.parametrize("lack", [*HOOKS, *LACKING])
def test_without_a_private_name_models_train_as_before_with_one_warning(lack, monkeypatch):
    import torch._dynamo
    import torch._inductor

    expected = parameters(ANO("MlpPolicy", "Pendulum-v1", **SMALL).learn(64))
    private._warn_of_absence.cache_clear()
    if lack in LACKING:
        LACKING[lack](monkeypatch)
        message = f"torch_compile: the update cannot be compiled.*torch {torch.__version__[0]}"
    else:  # and then as SB3 does
        monkeypatch.setattr(private, lack, (*getattr(private, lack), "_no_such_hooks"))
        message = "has no _no_such_hooks: hooks cannot be ruled out"
    with pytest.warns(UserWarning, match=message) as warned:
        model = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=lack in LACKING or "auto").learn(64)
    assert sum(re.search(message, str(warning.message)) is not None for warning in warned) == 1
    assert explain(model).compilation.path == "not compiled"
    torch.testing.assert_close(parameters(model), expected, **{} if lack in HOOKS else {"rtol": 0, "atol": 0})


def test_without_the_registries_of_modules_a_policy_may_have_changed(monkeypatch):
    model = ANO("MlpPolicy", "Pendulum-v1", **SMALL)
    assert Snapshot(model.policy, True).is_current(model.policy)
    monkeypatch.setattr(private, "_REGISTRIES", ("_no_such_registry",))
    assert not Snapshot(model.policy, True).is_current(model.policy)


def test_threads_go_on_without_openmps_pause(monkeypatch):
    monkeypatch.setattr(batched.ctypes, "CDLL", lambda name: object())
    batched._pause_of_openmp.cache_clear()
    batched.end_idle_threads()
    assert batched._pause_of_openmp() is None
    batched._pause_of_openmp.cache_clear()


def test_hooks_are_found():
    model = ANO("MlpPolicy", "Pendulum-v1", **SMALL)
    owners = model.policy.value_net, model.policy.optimizer
    for register, *found in (register_module_forward_hook, True, False), (register_optimizer_step_post_hook, False, True):
        with register(lambda *_: None):
            assert list(map(private.has_hooks, owners)) == found
            model.engine.decide(model, model.engine_options())
            assert isinstance(model.engine.make_actor(model, model.engine_options()), NumpyActor) != found[0]
        assert not any(map(private.has_hooks, owners))


def test_products_of_onednn_are_those_of_float64():
    torch.manual_seed(0)
    left, right = torch.randn(70, 300), torch.randn(300, 8)
    private.products_by_onednn(1)
    product = torch.ops.sb3_ano.product(left, right.T.contiguous().T)  # both may be views
    torch.testing.assert_close(product.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-5)


def test_without_onednn_pytorch_multiplies(monkeypatch):
    private.products_by_onednn.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert private.products_by_onednn(1) is None
    private.products_by_onednn.cache_clear()


def test_no_other_module_reads_private_names_of_pytorch():
    names = "|".join([*private._MODULE_HOOKS, *private._PARAMETER_HOOKS, *private._OPTIMIZER_HOOKS])
    pattern = re.compile(rf"\btorch(\.\w+)*\._[a-z]|\.({names}|_version|_metadata)\b")
    assert [path.name for path in (ROOT / "sb3_ano").rglob("*.py") if pattern.search(path.read_text())] == ["private.py"]
