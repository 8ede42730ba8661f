"""Faults of the zoo that this package's commands do not have, such as settings that run code."""

import contextlib
import os
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import pytest
import rl_zoo3.exp_manager
import rl_zoo3.utils
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName

from sb3_ano.zoo.agents import newest_run
from sb3_ano.zoo.hub_commands import download_pickle
from sb3_ano.zoo.settings import check_settings
from tests.zoo.conftest import rejected


def test_an_agent_is_found_in_the_newest_run_that_has_one(tmp_path):
    directory = tmp_path / "ano"
    assert newest_run(directory, "CartPole-v1") == 0
    runs = [directory / f"CartPole-v1_{number}" for number in (1, 2, 3, 4)]
    for run in runs:
        run.mkdir(parents=True)
    assert newest_run(directory, "CartPole-v1") == 4, "none has an agent"
    (runs[2] / "best_model.zip").touch()  # left by a training that is running or was killed
    assert newest_run(directory, "CartPole-v1") == 3
    for run in runs[:2]:
        (run / "CartPole-v1.zip").touch()
    assert newest_run(directory, "CartPole-v1") == 2
    assert rl_zoo3.exp_manager.get_latest_run_id(str(directory), "CartPole-v1") == 4, "training uses no number twice"


MISSING = {RemoteEntryNotFoundError: True, LocalEntryNotFoundError: False}


@pytest.mark.parametrize("error", MISSING)
def test_a_missing_file_of_statistics_is_none_and_a_lost_connection_is_an_error(error, tmp_path, monkeypatch):
    def fetch(repo_id, name):
        if name == "vec_normalize.pkl":
            raise error(name, response=mock.Mock()) if MISSING[error] else error(name)
        file = tmp_path / name
        with zipfile.ZipFile(file, "w"):
            return file

    monkeypatch.setattr("huggingface_sb3.load_from_hub", fetch)
    with contextlib.nullcontext() if MISSING[error] else pytest.raises(error):
        download_pickle("me/ppo-CartPole-v1", tmp_path / "run", "ppo", EnvironmentName("CartPole-v1"))


RUN = Path("ano/CartPole-v1_1/CartPole-v1")


def read(config: str, args: str = "env_kwargs: null\nenv: CartPole-v1\n") -> dict:
    """Write settings and read them with the zoo's function."""
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "config.yml").write_text(config)
    (RUN / "args.yml").write_text(args)
    for name in ("config.yml", "args.yml"):
        check_settings(RUN / name)
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
def test_settings_that_would_run_code_are_rejected(file, kind, zoo, tmp_path):
    content, reason = ODD.get(kind) or (HOSTILE[kind], "")
    hostile = content.format(target=tmp_path / "made")
    message = rf"(?s){file}\.yml is not YAML as the zoo writes it: {reason}.* use --trust-remote-code"
    with pytest.raises(ValueError, match=message):
        read(*([hostile] if file == "config" else ["a: 1\n", hostile]))
    which = "--algo ano --env CartPole-v1"
    commands = [f"enjoy {which} -f . --no-render", f"push_to_hub {which} -f . -orga me --no-render"]
    commands += ["benchmark --log-dir . --benchmark-dir b --no-hub"]
    (RUN.parent / "CartPole-v1.zip").touch()
    for command in commands:
        assert f"{file}.yml is not YAML as the zoo writes it" in rejected(command)
    assert not (tmp_path / "made").exists()
    assert not {"antigravity", "rl_zoo3.benchmark"} & set(sys.modules)


def test_what_the_zoo_writes_is_read_as_before_and_anything_if_it_is_trusted(zoo, monkeypatch):
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
    assert list(before) == [*written, "normalize_kwargs"]
    assert before["policy_kwargs"]["activation_fn"] is torch.nn.Tanh
    flat = yaml.dump(OrderedDict(env_wrapper="minigrid.wrappers.FlatObsWrapper"))  # of our own settings
    monkeypatch.setitem(sys.modules, "minigrid.wrappers", SimpleNamespace())
    with pytest.raises(ValueError, match="no Wrapper of a known library"):
        read(flat)
    monkeypatch.setitem(sys.modules, "minigrid.wrappers", SimpleNamespace(FlatObsWrapper=gym.Wrapper))
    assert read(flat)["env_wrapper"] == "minigrid.wrappers.FlatObsWrapper"
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    assert read("a: !!python/name:os.getcwd\n")["a"] is os.getcwd
