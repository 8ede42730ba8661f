"""``push_to_hub`` and ``load_from_hub`` of the zoo, against a Hub on this machine."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from stable_baselines3 import PPO

from sb3_ano import SPO
from sb3_ano.algorithms.loading import read_saved_model
from tests.common import parameters
from tests.hub.hub_server import USER
from tests.zoo.conftest import Finished, run
from tests.zoo.zoo_hub import running_zoo_hub

ENV = "Pendulum-v1"
TRAINING = "-n 256 --eval-freq -1 --seed 1 -params n_envs:2 n_steps:16 batch_size:32 normalize:True"
CLASSES = {"spo": SPO, "ppo": PPO}


class Zoo:
    """The zoo's commands in the current folder, in this process, which has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, command: str, algo: str, rest: str) -> Finished:
        return run(f"{command} --algo {algo} --env {ENV} {rest}", status=None)

    def must_run(self, command: str, algo: str, rest: str) -> str:
        return run(f"{command} --algo {algo} --env {ENV} {rest}").output


@pytest.fixture(scope="module")
def hub_and_zoo(tmp_path_factory):
    """An agent of ours and one of SB3's, trained in a folder and pushed from it."""
    folder = tmp_path_factory.mktemp("zoo")
    with running_zoo_hub() as (hub, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "PATH": os.environ["PATH"]}.items():
            patch.setenv(name, value)
        # huggingface_hub reads its variables when it is imported, which has happened in this process.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.delenv("TRUST_REMOTE_CODE", raising=False)
        patch.chdir(folder)
        zoo = Zoo(folder)
        for algo, options in (("spo", "-m mine"), ("ppo", "-n 20")):
            zoo.must_run("train", algo, TRAINING)
            zoo.must_run("push_to_hub", algo, f"-f logs -orga {USER} --no-render {options}")
        yield hub, zoo


def model_in(folder: Path, algo: str):
    return CLASSES[algo].load(next(folder.glob(f"{algo}/*_1/{ENV}.zip")))


@pytest.mark.parametrize("algo", CLASSES)
def test_a_push_has_what_the_zoo_needs_and_ours_the_safe_format_too(algo, hub_and_zoo):
    hub, _ = hub_and_zoo
    files = set(hub.repositories[f"{USER}/{algo}-{ENV}"].files)
    assert {f"{algo}-{ENV}.zip", "vec_normalize.pkl", "args.yml", "config.yml", "env_kwargs.yml", "README.md"} <= files
    assert ({"sb3_ano.json", "policy.safetensors", "vec_normalize.safetensors"} <= files) == (algo == "spo")


def test_a_push_and_a_download_tell_of_the_training(hub_and_zoo, tmp_path):
    """users Z1: both said one environment and seed 0, which are those of the push."""
    hub, zoo = hub_and_zoo
    files = hub.repositories[f"{USER}/spo-{ENV}"].files
    saved = tmp_path / "saved.zip"
    saved.write_bytes(files[f"spo-{ENV}.zip"])
    document = json.loads(files["sb3_ano.json"])
    card = files["README.md"].decode()
    assert (document["n_envs"], document["arguments"]["seed"]) == (2, 1)
    assert "256 steps, 2 environment(s)" in card
    assert "\n- seed: 1\n" in card
    assert '"n_envs": 2' in card
    zoo.must_run("load_from_hub", "spo", f"-f told -orga {USER}")
    run = zoo.folder / "told" / "spo" / f"{ENV}_1"
    for path in (saved, run / f"{ENV}.zip"):
        attributes = read_saved_model(path).attributes
        assert (attributes["n_envs"], attributes["seed"], attributes["num_timesteps"]) == (2, 1, 256)
    for config, arguments in (
        (files["config.yml"], files["args.yml"]),
        ((run / ENV / "config.yml").read_bytes(), (run / ENV / "args.yml").read_bytes()),
    ):
        assert yaml.load(config, yaml.UnsafeLoader)["n_envs"] == 2
        assert yaml.safe_load(arguments)["seed"] == 1
    assert not [name for name, data in files.items() if str(zoo.folder).encode() in data]


def test_our_agent_comes_back_without_a_pickle_and_is_the_same(hub_and_zoo):
    hub, zoo = hub_and_zoo
    hub.requests.clear()
    zoo.must_run("load_from_hub", "spo", f"-f safe -orga {USER}")
    fetched = {request.rsplit("/", 1)[1] for request in hub.requests if "/resolve/" in request}
    assert not {name for name in fetched if name.endswith((".zip", ".pkl", ".yml"))}
    before, after = (model_in(zoo.folder / folder, "spo") for folder in ("logs", "safe"))
    assert torch.equal(parameters(before), parameters(after))
    assert "Mean reward:" in zoo.must_run("enjoy", "spo", "-f safe --no-render -n 400")
    settings = zoo.folder / "safe" / "spo" / f"{ENV}_1" / ENV
    assert yaml.safe_load((settings / "args.yml").read_text())["env"] == ENV
    assert (settings / "vecnormalize.pkl").is_file()


def test_a_pickle_is_loaded_only_with_the_option_and_a_line_says_what_it_is(hub_and_zoo):
    _, zoo = hub_and_zoo
    refused = zoo.run("load_from_hub", "ppo", f"-f trusted -orga {USER}")
    assert refused.status == 2
    assert "runs any code that its author put in; if you trust the author" in refused.errors
    assert not (zoo.folder / "trusted").exists()
    said = zoo.must_run("load_from_hub", "ppo", f"-f trusted -orga {USER} --trust-remote-code")
    assert "runs any code that its author put in" in said
    before, after = (model_in(zoo.folder / folder, "ppo") for folder in ("logs", "trusted"))
    assert torch.equal(parameters(before), parameters(after))


def test_runs_are_numbered_on_and_replaced_only_by_force(hub_and_zoo):
    _, zoo = hub_and_zoo
    rest = f"-f numbered -orga {USER}"
    for number in (1, 2):
        assert zoo.must_run("load_from_hub", "spo", rest).endswith(f"Saved to numbered/spo/{ENV}_{number}\n")
    note = zoo.folder / "numbered" / "spo" / f"{ENV}_1" / "note.txt"
    note.write_text("mine")
    refused = zoo.run("load_from_hub", "spo", f"{rest} --exp-id 1")
    assert refused.status == 2
    assert "--force replaces it" in refused.errors
    assert note.exists()
    zoo.must_run("load_from_hub", "spo", f"{rest} --exp-id 1 --force")
    assert not note.exists()
    assert (note.parent / f"{ENV}.zip").is_file()


def test_a_failed_download_leaves_the_run_that_was_there(hub_and_zoo):
    hub, zoo = hub_and_zoo
    rest = f"-f kept -orga {USER}"
    zoo.must_run("load_from_hub", "spo", rest)
    hub.add(f"{USER}/broken", hub.repositories[f"{USER}/spo-{ENV}"].files)
    hub.fail["broken/.*policy.safetensors"] = 403
    try:
        failed = zoo.run("load_from_hub", "spo", f"{rest} -name broken --exp-id 1 --force")
    finally:
        hub.fail.clear()
    assert failed.status == 2
    assert "error: cannot download" in failed.errors
    assert (zoo.folder / "kept" / "spo" / f"{ENV}_1" / f"{ENV}.zip").is_file()
    assert [path.name for path in (zoo.folder / "kept" / "spo").iterdir()] == [f"{ENV}_1"]


@pytest.mark.parametrize(("algo", "options"), [("spo", ""), ("ppo", "--trust-remote-code")])
def test_a_repository_that_is_not_there_is_one_clear_line(algo, options, hub_and_zoo):
    _, zoo = hub_and_zoo
    failed = zoo.run("load_from_hub", algo, f"-f nothing -orga {USER} -name nothing {options}")
    assert failed.status == 2
    assert re.search(r"no such repository|Repository Not Found", failed.errors)
    assert failed.errors.count("\n") == 1
    assert not (zoo.folder / "nothing").exists()


def test_a_stranger_chooses_neither_module_nor_environment(hub_and_zoo):
    """Review safety H1, and H8: another environment was taken without a word, escape sequences reached the terminal."""
    hub, zoo = hub_and_zoo
    (zoo.folder / "train.py").write_text("raise SystemExit('imported')")
    files = hub.repositories[f"{USER}/spo-{ENV}"].files
    for env_id, message in (
        ("train:Pendulum-v1", "names the environment 'train:Pendulum-v1', which is not registered here"),
        ("\x1b]0;title\x07", "which is not registered here"),
        ("CartPole-v1", f"holds an agent for CartPole-v1, not for {ENV}"),
    ):
        results = json.dumps({"env_id": env_id}).encode()
        hub.add(f"{USER}/hostile", {**files, "results.json": results})
        failed = zoo.run("load_from_hub", "spo", f"-f hostile -orga {USER} -name hostile")
        assert failed.status == 2
        assert message in failed.errors
        assert failed.errors.count("\n") == 1
        assert failed.errors[:-1].isprintable()
        assert not (zoo.folder / "hostile").exists()
    assert "train" not in sys.modules


def test_settings_of_a_stranger_do_not_reach_enjoy(hub_and_zoo):
    """Review safety H2: enjoy passes a run's env_kwargs to the environment."""
    hub, zoo = hub_and_zoo
    files = hub.repositories[f"{USER}/spo-{ENV}"].files
    results = json.dumps({"env_id": ENV, "env_kwargs": {"g": "/etc/passwd"}}).encode()
    hub.add(f"{USER}/settings", {**files, "results.json": results})
    with pytest.warns(UserWarning, match="env_kwargs=.*are left out"):
        zoo.must_run("load_from_hub", "spo", f"-f settings -orga {USER} -name settings")
    assert "Mean reward:" in zoo.must_run("enjoy", "spo", "-f settings --no-render -n 400")


@pytest.mark.parametrize(("file", "content"), [("config", "[1]"), ("config", ""), ("args", "[1]")])
def test_enjoy_rejects_settings_without_keys_in_one_line(file, content, hub_and_zoo):
    """Review safety, unclear errors."""
    _, zoo = hub_and_zoo
    run = next((zoo.folder / "logs" / "spo").glob("*_1"))
    folder = zoo.folder / f"broken_{file}_{len(content)}" / "spo"
    shutil.copytree(run, folder / run.name)
    (folder / run.name / ENV / f"{file}.yml").write_text(content)
    failed = zoo.run("enjoy", "spo", f"-f {folder.parent.name} --no-render -n 10")
    assert failed.status == 2
    assert f"{file}.yml is not YAML as the zoo writes it" in failed.errors
    assert failed.errors.count("\n") == 1


def test_an_agent_of_ours_without_the_safe_format_needs_the_option(hub_and_zoo):
    hub, zoo = hub_and_zoo
    hub.add(f"{USER}/old", {f"spo-{ENV}.zip": b"a pickle"})
    failed = zoo.run("load_from_hub", "spo", f"-f old -orga {USER} -name old")
    assert failed.status == 2
    assert "use --trust-remote-code" in failed.errors
