"""Each fix removes its fault while a command runs, such as settings that run code.

``nothing_stays_replaced`` checks that the fix ends with the command.
"""

import functools
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import rl_zoo3.exp_manager
import rl_zoo3.load_from_hub
import rl_zoo3.utils
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName

from sb3_ano.zoo import fixes


def test_an_agent_is_found_in_the_newest_run_that_has_one(stack, tmp_path):
    model = functools.partial(rl_zoo3.utils.get_model_path, 0, str(tmp_path), "ano", EnvironmentName("CartPole-v1"))
    runs = [tmp_path / "ano" / f"CartPole-v1_{number}" for number in (1, 2, 3, 4)]
    for run in runs:
        run.mkdir(parents=True)
    fixes.newest_run_without_agent(stack)
    with pytest.raises(ValueError, match="No model found"):
        model()
    for run in runs[:2]:
        (run / "CartPole-v1.zip").touch()
    (runs[2] / "best_model.zip").touch()  # left by a training that is running or was killed
    assert model()[1] == str(runs[1] / "CartPole-v1.zip")
    assert rl_zoo3.exp_manager.get_latest_run_id(str(tmp_path / "ano"), "CartPole-v1") == 4, "training uses no number twice"


def test_a_changed_zoo_costs_one_fix_but_no_guard(stack, monkeypatch):
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    monkeypatch.delattr(rl_zoo3.utils, "get_latest_run_id")
    call = subprocess.call
    with pytest.warns(UserWarning, match="newest_run_without_agent is not fixed: .*get_latest_run_id"):
        fixes.apply_fixes(stack, [fixes.newest_run_without_agent, fixes.child_processes])
    assert subprocess.call is not call
    monkeypatch.delattr(rl_zoo3.utils, "get_trained_models")
    with pytest.raises(ValueError, match="unsafe_settings is not fixed.*--trust-remote-code goes ahead"):
        fixes.apply_fixes(stack, [fixes.unsafe_settings])
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    with pytest.warns(UserWarning, match="unsafe_settings is not fixed"):
        fixes.apply_fixes(stack, [fixes.unsafe_settings])


def test_a_missing_file_is_what_the_zoo_waits_for_and_a_lost_connection_is_not(stack):
    fixes.missing_optional_file(stack)
    for error, is_awaited in {RemoteEntryNotFoundError: True, LocalEntryNotFoundError: False}.items():
        assert issubclass(error, rl_zoo3.load_from_hub.HTTPError) == is_awaited


RUN = Path("ano/CartPole-v1_1/CartPole-v1")


def read(config: str, args: str = "env_kwargs: null\n") -> dict:
    """Write settings and read them with the zoo's function."""
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "config.yml").write_text(config)
    (RUN / "args.yml").write_text(args)
    return rl_zoo3.utils.get_saved_hyperparams(str(RUN))[0]


HOSTILE = {
    # as UTF-8 a comment that ends at U+2028; as the zoo reads it in another locale, a tag
    "another encoding": 'a: # \u2028 "\nb: !!python/object/apply:os.mkdir [{target}]\nc: # \u2028 "\n',
    "a call": "a: !!python/object/apply:os.mkdir [{target}]\n",
    "an object": "a: !!python/object/new:os.mkdir [{target}]\n",
    "a name": "a: !!python/name:os.system\n",
    "an expression": "normalize: \"__import__('os').mkdir('{target}') or {{}}\"\n",
    "a key": "? !!python/object/apply:os.mkdir [{target}]\n: 1\n",
    # Plain strings that the zoo imports and calls
    "wrappers": "env_wrapper: [builtins.repr, re.sub: {{repl: '', string: \"open('{target}','w')\"}}, builtins.eval]\n",
    "a wrapper's module": "env_wrapper: antigravity.Wrapper\n",
    "a wrapper of environments": "vec_env_wrapper: {{antigravity.Wrapper: {{}}}}\n",
    "a callback": "callback: [antigravity.Callback]\n",
    "a function of a library": "env_wrapper: rl_zoo3.utils.get_class_by_name\n",
    "a module that is a script": "env_wrapper: rl_zoo3.benchmark.Wrapper\n",
    "a name in a script": "a: !!python/name:rl_zoo3.benchmark.x\n",
    "a wrapper that writes": "env_wrapper: [stable_baselines3.common.monitor.Monitor: {{filename: '{target}'}}]\n",
}


# Without keys, the zoo's enjoy raised an AttributeError. 26 levels of merge keys did not end.
ODD = {kind: (content, "it has no keys") for kind, content in {"nothing": "", "a list": "[1]", "text": "text"}.items()}
BOMB = "a0: &a0 {{x: 1}}\n" + "".join(f"a{i}: &a{i} {{{{<<: [*a{i - 1}, *a{i - 1}]}}}}\n" for i in range(1, 27))
ODD |= {"a bomb": (BOMB, "more than 10 aliases")}
ODD |= {"a long text": ("a: " + "x" * 200_000, "it is not a file of up to 100,000 bytes")}


@pytest.mark.parametrize("file", ["config", "args"])
@pytest.mark.parametrize("kind", [*HOSTILE, *ODD])
def test_settings_that_would_run_code_are_rejected(file, kind, zoo, stack, tmp_path):
    fixes.unsafe_settings(stack)
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


def test_what_the_zoo_writes_is_read_as_before_and_anything_if_it_is_trusted(zoo, stack, monkeypatch):
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
    fixes.unsafe_settings(stack)
    assert read(*files) == before
    assert before["policy_kwargs"]["activation_fn"] is torch.nn.Tanh
    flat = yaml.dump(OrderedDict(env_wrapper="minigrid.wrappers.FlatObsWrapper"))  # of our own settings
    monkeypatch.setitem(sys.modules, "minigrid.wrappers", SimpleNamespace())
    with pytest.raises(ValueError, match="no Wrapper of a known library"):
        read(flat)
    monkeypatch.setitem(sys.modules, "minigrid.wrappers", SimpleNamespace(FlatObsWrapper=gym.Wrapper))
    assert read(flat)["env_wrapper"] == "minigrid.wrappers.FlatObsWrapper"
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    assert read("a: !!python/name:os.getcwd\n")["a"] is os.getcwd
