"""Files, pickles and copies of a policy and its parts, in size and content next to SB3's."""

import contextlib
import copy
import io
import pickle
import zipfile
from typing import Any

import cloudpickle
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from sb3_ano import ANO
from tests.algorithms.comparison import traced_only
from tests.common import SMALL
from tests.tiny_envs import BOX_ACTIONS, IMAGE_OBSERVATIONS, tiny_vec_env


def saved(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer().nbytes


#: Sizes of what users store, in bytes.
PARTS = {
    "policy": lambda model: len(pickle.dumps(model.policy)),
    "copied layers": lambda model: len(pickle.dumps(copy.deepcopy(model.policy.mlp_extractor))),
    "copied state": lambda model: len(pickle.dumps(copy.deepcopy(model.policy.state_dict()))),
    "state of the policy": lambda model: len(cloudpickle.dumps(model.policy.state_dict())),
    "file of the policy": lambda model: saved(model.policy.state_dict()),
    "file of a head": lambda model: saved(model.policy.action_net.state_dict()),
    "optimizer": lambda model: len(pickle.dumps(model.policy.optimizer.state_dict())),
    "file of the optimizer": lambda model: saved(model.policy.optimizer.state_dict()),
    "parameters": lambda model: len(pickle.dumps(model.get_parameters())),
    "storage of a parameter": lambda model: model.policy.action_net.weight.untyped_storage().nbytes(),
}


class Measure(BaseCallback):
    """Measure all parts in the middle of a training."""

    def _on_rollout_start(self) -> None:
        self.sizes = sizes(self.model)

    def _on_step(self) -> bool:
        return True


def sizes(model: Any) -> dict[str, int]:
    return {name: size(model) for name, size in PARTS.items()}


def train(cls: type, policy: str, callback: BaseCallback | None = None, **options: Any) -> Any:
    if policy == "CnnPolicy":
        env: Any = tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS, 1)
        settings: dict = {}
    else:
        env = "CartPole-v1"
        settings = {"policy_kwargs": {"net_arch": [128, 128]}}
    return cls(policy, env, **{**SMALL, "device": "cpu", **settings, **options}).learn(64, callback=callback)


def require_like(found: dict[str, int], expected: dict[str, int]) -> None:
    for name, size in expected.items():
        assert found[name] <= 1.02 * size + 256, f"{name}: {found[name]:,} bytes, SB3's has {size:,}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["MlpPolicy", "CnnPolicy"])
def test_parts_have_the_size_of_sb3s_during_and_after_a_training_and_after_loading(policy, compiled, tmp_path):
    theirs = Measure()
    expected = train(PPO, policy, theirs)
    ours = Measure()
    with traced_only() if compiled else contextlib.nullcontext():
        found = train(ANO, policy, ours, torch_compile=compiled)
    require_like(ours.sizes, theirs.sizes)
    require_like(sizes(found), sizes(expected))
    assert type(found.policy.optimizer) is type(expected.policy.optimizer)

    found.save(tmp_path / "ours")
    expected.save(tmp_path / "theirs")
    require_like(sizes(ANO.load(tmp_path / "ours", device="cpu")), sizes(PPO.load(tmp_path / "theirs", device="cpu")))
    with zipfile.ZipFile(tmp_path / "ours.zip") as mine, zipfile.ZipFile(tmp_path / "theirs.zip") as other:
        assert mine.namelist() == other.namelist()
        for entry in other.infolist():
            if entry.filename.endswith(".pth"):
                assert mine.getinfo(entry.filename).file_size <= 1.02 * entry.file_size + 256, entry.filename


def test_what_a_user_holds_of_a_policy_stays_part_of_it():
    with traced_only():
        model = ANO("MlpPolicy", "CartPole-v1", **SMALL, torch_compile=True)
        weight = model.policy.action_net.weight
        held = [weight, weight.data, model.policy.state_dict()["action_net.weight"]]
        before = weight.detach().clone()
        model.learn(64)
        model.learn(64)
    assert not torch.equal(weight, before)
    assert all(torch.equal(part, model.policy.action_net.weight) for part in held)
