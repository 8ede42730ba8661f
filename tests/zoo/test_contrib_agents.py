"""Algorithms with LSTM policies or masks in the zoo, the safe format and the Hub's tools."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer

from sb3_ano._registry import ALGORITHMS
from sb3_ano.hub import load_safe, save_safe
from sb3_ano.hub.codec import CLASSES
from sb3_ano.hub.documents import SafeFormatError
from tests.common import SMALL, parameters
from tests.hub.agents import rewrite
from tests.tiny_envs import BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, masked_vec_env

CONTRIB = [name for name in ALGORITHMS if "_" in name]
SPACES = {
    "Mlp": (BOX_OBSERVATIONS, spaces.Discrete(5)),
    "MultiInput": (DICT_OBSERVATIONS, spaces.MultiDiscrete([3, 2])),
    "Cnn": (IMAGE_OBSERVATIONS, spaces.MultiBinary(3)),
}


@pytest.mark.parametrize("algo", CONTRIB)
def test_train_resume_enjoy_and_record_use_masks_and_states(algo, zoo, monkeypatch):
    # It raises if an action is not allowed: in the training, its evaluations, the returns and the video.
    monkeypatch.setitem(gym.registry, "TwoAllowed-v0", None)
    del gym.registry["TwoAllowed-v0"]  # again at the end
    register = "gymnasium.register('TwoAllowed-v0', 'tests.tiny_envs:TwoAllowed', max_episode_steps=20)"
    Path(f"tasks_of_{algo}.py").write_text(f"import gymnasium\n{register}\n")
    monkeypatch.syspath_prepend(Path.cwd())
    env = "TwoAllowed-v0" if "mask" in algo else "CartPole-v1"
    lstm = 'policy_kwargs:"dict(lstm_hidden_size=8, net_arch=[8])"' if "lstm" in algo else ""
    size = "-n 256 --eval-freq 64 --eval-episodes 1 -params n_envs:2 n_steps:32 batch_size:64"
    zoo(f"train --algo {algo} --env {env} {size} {lstm} --gym-packages tasks_of_{algo}")
    assert Path("logs", algo, f"{env}_1", f"{env}.zip").is_file()
    assert "finished" in zoo(f"train --algo {algo} --env {env} --resume").output
    assert "Mean reward" in zoo(f"enjoy --algo {algo} --env {env} -n 600 --no-render").output
    monkeypatch.setenv("PATH", "nothing")
    zoo(f"record_video --algo {algo} --env {env} -n 10")
    assert os.environ["PATH"] == "nothing", "ffmpeg was only there for the video"
    assert list(Path("logs").rglob("*.mp4"))


def agent(algo, kind="Mlp", **options):
    is_recurrent = "lstm" in algo
    lstm = {"lstm_hidden_size": 8, "n_lstm_layers": 2} if is_recurrent else {}
    policy, env = f"{kind}{'Lstm' * is_recurrent}Policy", masked_vec_env(*SPACES[kind])
    return ALGORITHMS[algo].algorithm(policy, env, **SMALL, policy_kwargs={"net_arch": [8], **lstm}, **options)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("algo", CONTRIB)
def test_the_safe_format_brings_back_actions_and_states_and_counts_rollouts(algo, kind, tmp_path, monkeypatch):
    options = {"rollout_buffer_class": MaskableRolloutBuffer} if (algo, kind) == ("ano_mask", "Mlp") else {}
    model = agent(algo, kind, **options)
    stored = vars(model.rollout_buffer)
    arrays = [*stored.values(), *(stored["observations"].values() if kind == "MultiInput" else ())]
    taken = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    save_safe(model.learn(64), tmp_path / "agent")
    monkeypatch.setattr("sb3_ano.hub.safe_format.MAX_ROLLOUT_BYTES", taken - 1)
    with pytest.raises(SafeFormatError, match="asks for rollouts of n_steps=32 x 2 environments"):
        load_safe(tmp_path / "agent")
    monkeypatch.setattr("sb3_ano.hub.safe_format.MAX_ROLLOUT_BYTES", 3 * taken)
    loaded = load_safe(tmp_path / "agent", env=model.env)
    assert type(loaded) is type(model)
    assert torch.equal(parameters(loaded), parameters(model))
    observation = model.env.reset()
    actions_and_states = (each.predict(observation, deterministic=True) for each in (loaded, model))
    np.testing.assert_equal(*actions_and_states)
    assert not torch.equal(parameters(loaded.learn(64)), parameters(model))


@pytest.mark.parametrize("algo", CONTRIB)
@pytest.mark.parametrize("policy", ["MlpPolicy", *(name for name in CLASSES["policy"] if "." in name)])
def test_the_safe_format_rejects_the_policy_of_another_algorithm(algo, policy, tmp_path):
    allowed = ALGORITHMS[algo].algorithm.policy_aliases.values()
    if CLASSES["policy"][policy] in allowed or (algo == "ano_lstm" and "MaskableMlpLstm" in policy):
        return  # allowed; the masks are left out
    save_safe(agent(algo), tmp_path / "agent")
    rewrite(tmp_path / "agent", {"policy": policy})
    with pytest.raises(SafeFormatError):
        load_safe(tmp_path / "agent")


LSTMS = [
    ("n_lstm_layers", 2000, "n_lstm_layers=2000 is not allowed; allowed are integers up to 1000"),
    ("lstm_kwargs", {"device": "cpu"}, "lstm_kwargs has the unknown key 'device'"),  # which would take memory
    ("lstm_kwargs", {"dropout": "0"}, "lstm_kwargs.dropout='0' is not allowed"),
    ("lstm_kwargs", [1], r"lstm_kwargs=\[1\] is not allowed"),
]


@pytest.mark.parametrize(("name", "value", "message"), LSTMS)
def test_the_safe_format_bounds_lstms_before_they_take_memory(name, value, message, tmp_path):
    save_safe(agent("ano_lstm"), tmp_path / "agent")
    rewrite(tmp_path / "agent", {f"arguments/policy_kwargs/{name}": value})
    with pytest.raises(SafeFormatError, match=message):
        load_safe(tmp_path / "agent")
