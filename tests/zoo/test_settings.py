"""Settings next to an agent run no code."""

import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import rl_zoo3.utils
import torch
import yaml

from sb3_ano.zoo.fixes import unsafe_settings

RUN = Path("ano/CartPole-v1_1/CartPole-v1")


def read(config: str, args: str = "env_kwargs: null\n") -> dict:
    """Write settings and read them with the zoo's function."""
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "config.yml").write_text(config)
    (RUN / "args.yml").write_text(args)
    return rl_zoo3.utils.get_saved_hyperparams(str(RUN))[0]


HOSTILE = {
    "a call": "a: !!python/object/apply:os.mkdir [{target}]\n",
    "an object": "a: !!python/object/new:os.mkdir [{target}]\n",
    "a name": "a: !!python/name:os.system\n",
    "an expression": "normalize: \"__import__('os').mkdir('{target}') or {{}}\"\n",
    "a key": "? !!python/object/apply:os.mkdir [{target}]\n: 1\n",
    # safety H3: plain strings that the zoo imports and calls
    "wrappers": "env_wrapper: [builtins.repr, re.sub: {{repl: '', string: \"open('{target}','w')\"}}, builtins.eval]\n",
    "a wrapper's module": "env_wrapper: antigravity.Wrapper\n",
    "a wrapper of environments": "vec_env_wrapper: {{antigravity.Wrapper: {{}}}}\n",
    "a callback": "callback: [antigravity.Callback]\n",
    "a function of a library": "env_wrapper: rl_zoo3.utils.get_class_by_name\n",
    "a module that is a script": "env_wrapper: rl_zoo3.benchmark.Wrapper\n",
    "a name in a script": "a: !!python/name:rl_zoo3.benchmark.x\n",
    "a wrapper that writes": "env_wrapper: [stable_baselines3.common.monitor.Monitor: {{filename: '{target}'}}]\n",
}


# Without keys, the zoo's enjoy raised an AttributeError (review safety). 26 levels of merge keys did not end (safety H8).
ODD = {kind: (content, "it has no keys") for kind, content in {"nothing": "", "a list": "[1]", "text": "text"}.items()}
BOMB = "a0: &a0 {{x: 1}}\n" + "".join(f"a{i}: &a{i} {{{{<<: [*a{i - 1}, *a{i - 1}]}}}}\n" for i in range(1, 27))
ODD |= {"a bomb": (BOMB, "more than 10 aliases")}
ODD |= {"a long text": ("a: " + "x" * 200_000, "it is not a file of up to 100,000 bytes")}


@pytest.mark.parametrize("file", ["config", "args"])
@pytest.mark.parametrize("kind", [*HOSTILE, *ODD])
def test_settings_that_would_run_code_are_rejected(file, kind, zoo, stack, tmp_path):
    unsafe_settings(stack)
    content, reason = ODD.get(kind) or (HOSTILE[kind], "")
    hostile = content.format(target=tmp_path / "made")
    message = rf"(?s){file}\.yml is not YAML as the zoo writes it: {reason}.* use --trust-remote-code"
    with pytest.raises(ValueError, match=message):
        read(*([hostile] if file == "config" else ["a: 1\n", hostile]))
    if file == "args":  # which the list of agents is made of
        with pytest.raises(ValueError, match=message):
            rl_zoo3.utils.get_trained_models(".")
    assert not (tmp_path / "made").exists()
    assert not {"antigravity", "rl_zoo3.benchmark"} & set(sys.modules)


def test_trusted_settings_are_read_as_they_are(zoo, stack, monkeypatch):
    unsafe_settings(stack)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    assert read("a: !!python/name:os.getcwd\n")["a"] is os.getcwd


def test_what_the_zoo_writes_is_read_as_before(zoo, stack):
    wrappers = [{"gymnasium.wrappers.TimeLimit": {"max_episode_steps": 5}}, "sb3_contrib.common.wrappers.TimeFeatureWrapper"]
    written = OrderedDict(
        policy="MlpPolicy",
        policy_kwargs={"activation_fn": torch.nn.Tanh, "net_arch": (64, 64)},
        normalize="dict(norm_obs=True, norm_reward=False)",
        env_wrapper=[*wrappers, "stable_baselines3.common.atari_wrappers.AtariWrapper"],
        vec_env_wrapper="stable_baselines3.common.vec_env.VecFrameStack",
    )
    files = yaml.dump(written), yaml.dump(OrderedDict(env_kwargs=None, env="x"))
    before = read(*files)
    unsafe_settings(stack)
    assert read(*files) == before
    assert before["policy_kwargs"]["activation_fn"] is torch.nn.Tanh
