"""Remove private names of PyTorch: the package must go on in the slow way, with a warning."""

import re

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from sb3_ano import ANO, _compat
from sb3_ano.algorithms.actor import Snapshot, TorchActor, make_actor
from tests.common import ROOT, SMALL, parameters

HOOKS = ("_MODULE_HOOKS", "_PARAMETER_HOOKS", "_OPTIMIZER_HOOKS", "_HOOKS_OF_ALL_MODULES")
LACKING = {
    "cache": lambda patch: patch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list"),
    "setting": lambda patch: patch.setitem(_compat._TRACING, "no_such_setting", True),
    "option": lambda patch: patch.setattr(torch._inductor, "list_options", lambda: []),
}


@pytest.mark.parametrize("lack", [*HOOKS, *LACKING])
def test_without_a_private_name_models_train_as_before_with_one_warning(lack, monkeypatch):
    import torch._dynamo
    import torch._inductor

    expected = parameters(ANO("MlpPolicy", "Pendulum-v1", **SMALL).learn(64))
    _compat._warn_of_absence.cache_clear()
    if lack in LACKING:
        LACKING[lack](monkeypatch)
        message = f"torch_compile: the update cannot be compiled.*torch {torch.__version__[0]}"
    else:  # and then as SB3 does
        monkeypatch.setattr(_compat, lack, (*getattr(_compat, lack), "_no_such_hooks"))
        message = "has no _no_such_hooks: hooks cannot be ruled out"
    with pytest.warns(UserWarning, match=message) as warned:
        model = ANO("MlpPolicy", "Pendulum-v1", **SMALL, torch_compile=lack in LACKING or "auto").learn(64)
    assert (len(warned), model._updater.compiled) == (1, False)
    torch.testing.assert_close(parameters(model), expected, **{} if lack in HOOKS else {"rtol": 0, "atol": 0})


def test_without_the_registries_of_modules_a_policy_may_have_changed(monkeypatch):
    model = ANO("MlpPolicy", "Pendulum-v1", **SMALL)
    assert Snapshot(model.policy).is_current(model.policy)
    monkeypatch.setattr(_compat, "_REGISTRIES", ("_no_such_registry",))
    assert not Snapshot(model.policy).is_current(model.policy)


def test_threads_go_on_without_openmps_pause(monkeypatch):
    monkeypatch.setattr(_compat.ctypes, "CDLL", lambda name: object())
    _compat._pause_of_openmp.cache_clear()
    _compat.end_idle_threads()
    assert _compat._pause_of_openmp() is None
    _compat._pause_of_openmp.cache_clear()


def test_hooks_are_found():
    model = ANO("MlpPolicy", "Pendulum-v1", **SMALL)
    owners = model.policy.value_net, model.policy.optimizer
    for register, *found in (register_module_forward_hook, True, False), (register_optimizer_step_post_hook, False, True):
        with register(lambda *_: None):
            assert list(map(_compat.has_hooks, owners)) == found
            assert isinstance(make_actor(model, 1), TorchActor) == found[0]
        assert not any(map(_compat.has_hooks, owners))


@pytest.mark.parametrize(
    ("rows", "dtype", "tolerance"), [(8, torch.float32, 1e-6), (1, torch.float32, 1e-6), (8, torch.bfloat16, 1e-2)]
)
def test_packed_layers_and_products_of_onednn_are_those_of_float64(rows, dtype, tolerance):
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(300, 70).to(dtype), torch.randn(rows, 300).to(dtype)
    expected = inputs.double() @ layer.weight.double().T + layer.bias.double()
    with torch.no_grad():
        outputs = _compat.packed_linear(layer, batch_size=8)(inputs)
    torch.testing.assert_close(outputs.double(), expected, rtol=tolerance, atol=tolerance)
    _compat.products_by_onednn(1)
    if dtype == torch.float32:
        product = torch.ops.sb3_ano.product(inputs.T, outputs)  # both may be views
        torch.testing.assert_close(product.double(), inputs.double().T @ expected, rtol=tolerance, atol=1e-5)


def test_without_onednn_pytorch_multiplies(monkeypatch):
    _compat.products_by_onednn.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    layer = torch.nn.Linear(3, 2)
    assert _compat.packed_linear(layer, 8) == layer.forward
    assert _compat.products_by_onednn(1) is None
    _compat.products_by_onednn.cache_clear()


def test_no_other_module_reads_private_names_of_pytorch():
    names = "|".join([*_compat._MODULE_HOOKS, *_compat._PARAMETER_HOOKS, *_compat._OPTIMIZER_HOOKS])
    private = re.compile(rf"\btorch(\.\w+)*\._[a-z]|\.({names}|_version|_metadata)\b")
    assert [path.name for path in (ROOT / "sb3_ano").rglob("*.py") if private.search(path.read_text())] == ["_compat.py"]
