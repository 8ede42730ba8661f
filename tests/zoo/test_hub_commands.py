"""``push_to_hub`` and ``load_from_hub`` of the zoo, against a Hub on this machine."""

import json
import re
import sys
import zipfile
from pathlib import Path
from unittest import mock

import gymnasium as gym
import pytest
import rl_zoo3.utils
import torch
import yaml
from huggingface_hub import constants
from stable_baselines3 import PPO

from sb3_ano import SPO
from sb3_ano.algorithms.loading import read_saved_model
from tests.common import parameters
from tests.hub.hub_server import USER, FakeHub, running_hub
from tests.zoo.conftest import rejected, run

ENV = "Pendulum-v1"
TRAINING = "-n 256 --eval-freq -1 --seed 1 -params n_envs:2 n_steps:16 batch_size:32 normalize:True"
LOAD = f"load_from_hub --algo spo --env {ENV} -orga {USER}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with an agent of ours and one of SB3's, trained in the current directory and pushed from it."""
    directory = tmp_path_factory.mktemp("zoo")
    with running_hub() as server, pytest.MonkeyPatch.context() as patch:
        server.connect(patch, directory / "hf")
        patch.delenv("TRUST_REMOTE_CODE", raising=False)
        patch.chdir(directory)
        for algo, options in (("spo", "-m mine"), ("ppo", "-n 20")):
            run(f"train --algo {algo} --env {ENV} {TRAINING}")
            run(f"push_to_hub --algo {algo} --env {ENV} -f logs -orga {USER} --no-render {options}")
        yield server


def pushed(hub: FakeHub, algo: str = "spo") -> dict[str, bytes]:
    return hub.repositories[f"{USER}/{algo}-{ENV}"][-1]


def test_a_push_has_what_the_zoo_reads_and_tells_of_the_training(hub, tmp_path):
    """It said one environment and seed 0, which are those of the push."""
    for algo in ("ppo", "spo"):
        files = pushed(hub, algo)
        assert {f"{algo}-{ENV}.zip", "vec_normalize.pkl", "env_kwargs.yml", "README.md"} <= set(files)
        config, args = (yaml.unsafe_load(files[f"{name}.yml"]) for name in ("config", "args"))
        assert (config["n_envs"], args["seed"], "sb3_ano.json" in files) == (2, 1, algo == "spo")
    document, card = json.loads(files["sb3_ano.json"]), files["README.md"].decode()
    assert (document["n_envs"], document["arguments"]["seed"]) == (2, 1)
    assert all(text in card for text in ("256 steps, 2 environment(s)", "\n- seed: 1\n", '"n_envs": 2'))
    (tmp_path / "saved.zip").write_bytes(files[f"spo-{ENV}.zip"])
    attributes = read_saved_model(tmp_path / "saved.zip").attributes
    assert (attributes["n_envs"], attributes["seed"], attributes["num_timesteps"]) == (2, 1, 256)
    assert not [name for name, data in files.items() if str(Path.cwd()).encode() in data]


def test_our_agent_comes_back_without_a_pickle_and_is_the_same(hub):
    hub.requests.clear()
    run(f"{LOAD} -f safe")
    assert not {name for name in hub.fetched if name.endswith((".zip", ".pkl", ".yml"))}
    trained, loaded = (Path(folder, "spo", f"{ENV}_1", f"{ENV}.zip") for folder in ("logs", "safe"))
    assert torch.equal(parameters(SPO.load(trained)), parameters(SPO.load(loaded)))
    assert "Mean reward:" in run(f"enjoy --algo spo --env {ENV} -f safe --no-render -n 400").output


def test_a_pickle_is_loaded_only_with_the_option_and_what_is_not_there_is_one_line(hub):
    load = f"load_from_hub --algo ppo --env {ENV} -f trusted -orga {USER}"
    assert "`pickle.load` is insecure and will execute arbitrary code" in rejected(load)
    assert not Path("trusted").exists()
    for algo in ("ppo", "spo"):
        run(f"{load} --trust-remote-code --algo {algo}")
        trained, loaded = (Path(folder, algo, f"{ENV}_1") for folder in ("logs", "trusted"))
        assert torch.equal(*(parameters(PPO.load(folder / f"{ENV}.zip")) for folder in (trained, loaded)))
        assert (loaded / ENV / "config.yml").read_text() == (trained / ENV / "config.yml").read_text()
        assert (loaded / ENV / "vecnormalize.pkl").is_file()
    hub.add(f"{USER}/old", {f"spo-{ENV}.zip": b"a pickle"})
    assert "use --trust-remote-code" in rejected(f"{LOAD} -f old -name old"), "an agent of ours without the safe format"
    for line in (LOAD, f"{load} --trust-remote-code"):
        assert "Repository Not Found" in rejected(f"{line} -f nothing -name nothing")
        assert not Path("nothing").exists()


def test_agents_in_the_cache_load_without_the_hub(hub, monkeypatch):
    commands = [LOAD, f"{LOAD} --trust-remote-code".replace("--algo spo", "--algo ppo")]
    for command in commands:
        run(f"{command} -f cached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for command in commands:
        run(f"{command} -f cached")
        line = rejected(f"{command} -f uncached -name uncached")
        assert re.search("HF_HUB_OFFLINE is set|cannot find the requested files in the local cache", line)
    agents = {str(path.relative_to("cached")) for path in Path("cached").glob("*/*/*.zip")}
    assert agents == {f"{algo}/{ENV}_{number}/{ENV}.zip" for algo in ("ppo", "spo") for number in (1, 2)}
    assert not Path("uncached").exists()


def test_benchmark_downloads_no_pickle_without_the_option_and_its_table_is_here(hub, monkeypatch):
    for agent in (f"spo-{ENV}", f"ppo-{ENV}", "elsewhere"):
        evaluated = Path("evaluated", agent, "0.monitor.csv")
        evaluated.parent.mkdir(parents=True)
        evaluated.write_text('#{"t_start": 0.0}\nr,l,t\n-7.5,200,1.0\n')
    benchmark = "benchmark --log-dir logs --benchmark-dir evaluated"
    run(f"{benchmark} --no-hub")
    table = Path("benchmark.md").read_text()
    assert re.findall(r"^\|(\w+) *\|Pendulum-v1 *\| *-7.5\|", table, re.MULTILINE) == ["ppo", "spo"]
    assert Path("evaluated/benchmark.md").read_text() == table
    monkeypatch.setattr(rl_zoo3.utils, "get_hf_trained_models", lambda: {"elsewhere": ("a2c", ENV)})
    assert "`pickle.load` is insecure" in rejected(benchmark)
    assert "Repository Not Found" in rejected(f"{benchmark} --trust-remote-code")


def test_an_agent_of_another_algorithm_is_named(hub):
    load = LOAD.replace("--algo spo", "--algo ano")
    assert "holds an agent of spo; use --algo spo" in rejected(f"{load} -f other -name spo-{ENV}")
    assert not Path("other").exists()


def test_runs_are_numbered_and_replaced_only_by_force_and_as_a_whole(hub):
    for number in (1, 2):
        assert run(f"{LOAD} -f numbered").output.endswith(f"Saved to numbered/spo/{ENV}_{number}\n")
    note = Path("numbered", "spo", f"{ENV}_1", "note.txt")
    note.write_text("mine")
    assert "--force replaces it" in rejected(f"{LOAD} -f numbered --exp-id 1")
    hub.add(f"{USER}/broken", pushed(hub))
    hub.fail["broken/.*policy.safetensors"] = 403
    errors = rejected(f"{LOAD} -f numbered -name broken --exp-id 1 --force")
    assert re.search("cannot download|locate the file", errors)
    assert note.exists()
    assert {path.name for path in note.parents[1].iterdir()} == {f"{ENV}_1", f"{ENV}_2"}
    run(f"{LOAD} -f numbered --exp-id 1 --force")
    assert (note.exists(), (note.parent / f"{ENV}.zip").is_file()) == (False, True)


def test_without_a_number_nothing_else_in_the_directory_is_replaced(hub):
    run(f"{LOAD} -f shared --exp-id 1")
    other = Path("shared", "spo", "CartPole-v1_1", "note.txt")
    other.parent.mkdir()
    other.write_text("mine")

    load = f"{LOAD} -f shared --exp-id -1 --force"
    assert run(load).output.endswith(f"Saved to shared/spo/{ENV}.zip\n")
    assert "Mean reward:" in run(f"enjoy --algo spo --env {ENV} -f shared --exp-id -1 --no-render -n 400").output
    assert f"{ENV} exists, and --exp-id -1 replaces nothing" in rejected(load)
    there = {path.name for path in Path("shared", "spo").iterdir()}
    assert there == {f"{ENV}_1", "CartPole-v1_1", ENV, f"{ENV}.zip"}
    assert other.read_text() == "mine"


def test_the_download_of_a_pickle_replaces_only_the_run_and_only_when_it_is_complete(hub):
    load = f"load_from_hub --algo ppo --env {ENV} -f upstream -orga {USER} --trust-remote-code"
    run(load)
    old = Path("upstream", "ppo", f"{ENV}_1")
    other = Path("upstream", "ppo", "CartPole-v1_1", "note.txt")
    for note in (old / "note.txt", other):
        note.parent.mkdir(exist_ok=True)
        note.write_text("mine")
    assert run(f"{load} --exp-id -1 --force").output.endswith(f"Saved to upstream/ppo/{ENV}.zip\n")
    assert f"{ENV} exists, and --exp-id -1 replaces nothing" in rejected(f"{load} --exp-id -1 --force")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert "No space left" in rejected(f"{load} --exp-id 1 --force")
    assert (old / "note.txt").exists()
    assert run(f"{load} --exp-id 1 --force").output.endswith(f"Saved to {old}\n")
    assert not (old / "note.txt").exists()
    assert (old / f"{ENV}.zip").is_file()
    assert (old / ENV / "config.yml").is_file()
    assert {path.name for path in old.parent.iterdir()} == {old.name, "CartPole-v1_1", ENV, f"{ENV}.zip"}
    assert other.read_text() == "mine"


def test_recordings_of_a_training_remove_nothing_else(hub):
    mine = Path("videos", "holiday.mp4")
    mine.parent.mkdir()
    mine.write_text("mine")
    assert "videos holds 'holiday.mp4', which would be lost" in rejected(f"record_training --algo spo --env {ENV} -o videos")
    assert mine.read_text() == "mine"


STRANGERS = [
    ("train:Pendulum-v1", "names the environment 'train:Pendulum-v1', which is not registered here"),
    ("\x1b]0;title\x07", "which is not registered here"),
    ("CartPole-v1", f"holds an agent for CartPole-v1, not for {ENV}"),
]


@pytest.mark.parametrize(("env_id", "message"), STRANGERS)
def test_a_stranger_chooses_neither_module_nor_environment(env_id, message, hub):
    """Another environment was taken without a word, escape sequences reached the terminal."""
    Path("train.py").write_text("raise SystemExit('imported')")
    hub.add(f"{USER}/hostile", {**pushed(hub), "results.json": json.dumps({"env_id": env_id}).encode()})
    assert message in rejected(f"{LOAD} -f hostile -name hostile")
    assert not Path("hostile").exists()
    assert "train" not in sys.modules


class Blind(gym.Env):
    """An environment without render_mode."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, True, False, {}


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes:UserWarning")
def test_an_environment_without_render_mode_is_pushed_without_a_video(hub, zoo, monkeypatch):
    monkeypatch.setitem(gym.registry, "Blind-v0", gym.envs.registration.EnvSpec("Blind-v0", Blind))
    run("train --algo ano --env Blind-v0 -n 64 --eval-freq -1 -params n_steps:64")
    output = run(f"push_to_hub --algo ano --env Blind-v0 -f logs -orga {USER} -n 20").output
    assert "no video" in output
    files = hub.repositories[f"{USER}/ano-Blind-v0"][-1]
    assert "README.md" in files
    assert "replay.mp4" not in files
