"""The losses of examples/other_trainers.py against those of the trainers, where they are installed."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.common import ROOT, python

SPEC = importlib.util.spec_from_file_location("other_trainers", ROOT / "examples/other_trainers.py")
other_trainers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(other_trainers)


def samples():
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 50, generator=generator, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(8, 50, generator=generator, dtype=torch.float64)).clamp(max=0).requires_grad_()
    return old, new, torch.randn(8, 50, generator=generator, dtype=torch.float64)


def test_the_example_runs_and_agrees_with_the_lines_it_replaces():
    lines = python(ROOT / "examples/other_trainers.py", check=True).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["CleanRL", "prime-rl"]
    assert all(float(line.rpartition(" ")[2]) < 1e-6 for line in lines)


def test_cleanrls_script_has_the_lines_that_the_shape_replaces():
    cleanrl = pytest.importorskip("cleanrl")
    script = (Path(cleanrl.__path__[0]) / "ppo.py").read_text()
    lines = re.findall(r"^ +(pg_loss\d? = .+)$", script, re.MULTILINE)
    old, new, advantages = samples()
    values = {"torch": torch, "args": SimpleNamespace(clip_coef=0.2), "mb_advantages": advantages, "ratio": (new - old).exp()}
    for line in lines:
        exec(line, values)
    ours = other_trainers.cleanrl_loss(new - old, advantages, 0.2, "ppo")
    expected, found = (torch.autograd.grad(loss, new, retain_graph=True)[0] for loss in (values["pg_loss"], ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "shaping", "settings"),
    [
        ("vanilla", "dual_clip", {}),
        ("vanilla", "dual_clip", {"clip_ratio_high": 0.28}),
        ("dppo_tv", "dppo", {}),
        ("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
        ("cispo", "cispo", {"clip_ratio_low": 10.0}),
    ],
)
def test_verls_losses_are_the_shapes(mode, shaping, settings):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    options = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **settings}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    mode_of_mean = "seq-mean-token-mean" if mode == "sapo" else "token-mean"
    old, new, advantages = samples()
    mask = torch.ones_like(old)
    mask[:, 40:] = 0
    arguments = (old, new, advantages, mask, mode_of_mean, config)
    theirs, _ = core.POLICY_LOSS_REGISTRY[mode](*arguments)
    core.register_policy_loss("a shape")(other_trainers.verl_loss(shaping))
    ours, _ = core.get_policy_loss_fn("a shape")(*arguments)
    expected, found = (torch.autograd.grad(loss, new, retain_graph=True)[0] for loss in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
