"""Packages: what the Hub reads in the card, what a stranger runs, and what is published."""

import ast
import base64
import io
import json
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import RenderError, load_safe, package
from sb3_ano.hub.card import hyperparameters, install_line, model_card, versions
from sb3_ano.hub.evaluation import Task
from tests.common import SMALL, pseudo_huber
from tests.hub.own_parts import FirstTwo, OwnPolicy

CARTPOLE = Task("CartPole-v1", {})
RESULTS = {"mean_reward": 11.0, "std_reward": 1.633, "n_eval_episodes": 3, "is_deterministic": True, "seed": 4}
ROOT = Path(__file__).parents[2]
QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


def card_of(model, task=CARTPOLE, **options) -> ModelCard:
    return model_card(model, "somebody/agent", task, {**RESULTS, "episode_lengths": [9, 11, 13]}, **options)


def small(policy="MlpPolicy", **options):
    return ANO(policy, make_vec_env("CartPole-v1", 1, backend="gymnasium"), **SMALL, **options)


def code_of(card: str | Path) -> str:
    return (card.read_text() if isinstance(card, Path) else card).split("```python\n")[1].split("\n```")[0]


def test_the_hub_reads_numbers_and_the_words_to_search_by(cartpole):
    data = card_of(cartpole, license="apache-2.0", tags=("demo",)).data.to_dict()
    assert data["library_name"] == "stable-baselines3"
    assert data["pipeline_tag"] == "reinforcement-learning"
    assert data["license"] == "apache-2.0"
    expected = ["CartPole-v1", "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-ano", "ano"]
    assert data["tags"] == [*expected, "demo"]
    ((result,),) = (entry["results"] for entry in data["model-index"])
    assert result["dataset"] == {"name": "CartPole-v1", "type": "CartPole-v1"}
    arguments = {"n_eval_episodes": 3, "deterministic": True, "seed": 4}
    assert [(metric["type"], metric["value"], metric["args"]) for metric in result["metrics"]] == [
        ("mean_reward", 11.0, arguments),
        ("std_reward", 1.633, arguments),
    ]
    # users U6 d: the license is only named if the author names one.
    assert "licen" not in str(card_of(cartpole)).lower()


def test_the_page_says_how_the_agent_was_judged_and_trained(cartpole):
    text = card_of(cartpole).text
    for part in (
        "| 11.00 | 1.63 | 3 | 11.0 | deterministic | 4 |",
        "- algorithm: ANO, 2,048 steps, 2 environment(s)",
        "- seed: 0",
        f"torch {metadata.version('torch')}",
        "zhang2026ano",
        "raffin2021stable",
        "docs/algorithms.md",
        "pickles: loading it runs whatever code",
    ):
        assert part in text
    settings = json.loads(text.split("```json\n")[1].split("```")[0])
    assert settings == json.loads(json.dumps(hyperparameters(cartpole)))
    assert (settings["n_steps"], settings["policy_kwargs"]) == (SMALL["n_steps"], {"net_arch": [16]})


@pytest.mark.parametrize(
    ("task", "extras", "packages"),
    [
        (CARTPOLE, "hub", []),
        (Task("HalfCheetah-v5", {}), "hub,mujoco", ["mujoco"]),
        (Task("PongNoFrameskip-v4", {}), "hub,atari", ["ale-py"]),
        (Task("Pong-v5", {}), "hub,atari", ["ale-py"]),
        (Task("LunarLander-v3", {}), "hub,zoo", ["box2d"]),
        (Task("FrozenLake-v1", {}, backend="envpool"), "hub,envpool", ["envpool"]),
    ],
)
def test_the_requirements_are_those_of_the_package_and_the_environment(task, extras, packages):
    """users U5, U6 e: the first command of the card failed; the versions of all packages were listed."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert install_line(task) == f'pip install "sb3-ano[{extras}] @ git+{repository}"'
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    common = {"python", "sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy"}
    assert set(versions(task)) == common | (set(packages) & installed)


def test_no_name_writes_code_or_markdown_into_the_card(cartpole, tmp_path):
    """safety H8: env_id= went unescaped into the Python of the card."""
    with pytest.raises(ValueError, match="env_id=.* is not allowed"):
        package(cartpole, tmp_path / "agent", "me/agent", cartpole.get_env(), env_id='x"); evil("-v0', **QUICK)
    assert not list(tmp_path.iterdir())
    hostile = Task("x\"); evil('-v0", {"g": '");evil()\n```\nevil()'}, additions=("`evil`\n```\nEvil()",))
    for task in (hostile, Task(hostile.env_id, hostile.env_kwargs)):
        text = card_of(cartpole, task).text
        calls = [node.func for node in ast.walk(ast.parse(code_of(text))) if isinstance(node, ast.Call)]
        assert not any(getattr(function, "id", "") == "evil" for function in calls)
        assert text.count("\n```") == 8, "two fences for each of four blocks"


def run_snippet(folder, monkeypatch, supplied: str = "", env=None) -> dict:
    """Run a card's Python with the agent taken from the directory instead of the Hub, and the reader's parts filled in."""
    code = code_of(folder / "README.md").replace("env=env", f"env=env{supplied}").replace("env = ...", "env = given")
    monkeypatch.setattr("sb3_ano.hub.load_from_hub", lambda repo_id, env, **options: load_safe(folder, env, **options))
    names: dict = {"given": env, "pseudo_huber": pseudo_huber, "OwnPolicy": OwnPolicy}
    exec(code, names)
    assert names["mean"] == pytest.approx(json.loads((folder / "results.json").read_text())["mean_reward"])
    return names


@pytest.mark.filterwarnings("ignore:.*(stored by name only|cannot be imported|is another function|holds the code):UserWarning")
@pytest.mark.parametrize(
    ("options", "supplied", "remark"),
    [
        ({"shaping": pseudo_huber}, ", shaping=pseudo_huber", "`shaping=`: `tests.common:pseudo_huber`"),
        (
            {"shaping": ("ano", pseudo_huber)},
            ", shaping=('ano', pseudo_huber)",
            "`shaping=`: `ano, tests.common:pseudo_huber`",
        ),
        # Neither a shape without a name nor a schedule matters for acting.
        (
            {"shaping": lambda x: x - x * x, "learning_rate": lambda progress: 1e-3},
            ", shaping='ano'",
            f"`shaping=`: `{__name__}:<lambda>`",
        ),
        (
            {"policy": OwnPolicy},
            ", custom_objects={'policy': OwnPolicy}",
            "`custom_objects=`: `{'policy': 'tests.hub.own_parts:OwnPolicy'}`",
        ),
    ],
)
def test_the_card_names_what_only_the_author_has(options, supplied, remark, tmp_path, monkeypatch):
    folder = package(small(**options), tmp_path / "agent", "somebody/agent", **QUICK)
    assert f"- {remark}" in (folder / "README.md").read_text()
    model = run_snippet(folder, monkeypatch, supplied)["model"]
    assert isinstance(model.policy, options.get("policy", object))


def test_an_environment_that_needs_more_than_its_id_is_left_to_the_reader(tmp_path, monkeypatch):
    model = ANO("MlpPolicy", FirstTwo(gym.make("Pendulum-v1")), **SMALL)
    with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in.*pass it as env="):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not list(tmp_path.iterdir())
    folder = package(model, tmp_path / "agent", "somebody/agent", FirstTwo(gym.make("Pendulum-v1")), **QUICK)
    assert "The agent's environment is `Pendulum-v1` with `FirstTwo`." in (folder / "README.md").read_text()
    env = make_vec_env("Pendulum-v1", wrapper_class=FirstTwo, seed=0, backend="gymnasium")
    run_snippet(folder, monkeypatch, env=env)


def test_settings_and_the_package_of_the_environment_are_part_of_the_snippet(tmp_path, monkeypatch):
    folder = package(ANO("MlpPolicy", gym.make("Pendulum-v1", g=2.0), **SMALL), tmp_path / "agent", "somebody/agent", **QUICK)
    assert run_snippet(folder, monkeypatch)["env"].get_attr("g") == [2.0]
    assert yaml.safe_load((folder / "env_kwargs.yml").read_text()) == {"g": 2.0}
    gym.register("Elsewhere-v0", entry_point="tests.hub.own_parts:RegisteredElsewhere")
    try:
        text = card_of(small(), Task("Elsewhere-v0", {})).text
        assert code_of(text).startswith("import tests  # registers the environment\nfrom stable_baselines3")
    finally:
        del gym.registry["Elsewhere-v0"]


def contents(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file, every entry of an archive, and every pickle in SB3's JSON."""
    yield name, data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.namelist():
                yield from contents(f"{name}!{entry}", archive.read(entry))
    elif name.endswith("!data"):
        for key, value in json.loads(data).items():
            if isinstance(value, dict) and ":serialized:" in value:
                yield f"{name}:{key}", base64.b64decode(value[":serialized:"])


def test_the_run_is_published_without_anything_of_the_authors_machine(tmp_path, monkeypatch):
    """users U4, safety H6: every byte of every file, of zip entries and of pickles; every CSV file was published."""
    home = tmp_path / "alice_q7x"
    run = home / "run"
    for name in ("HOME", "USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, str(home) if name == "HOME" else "alice_q7x")
    for function in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(function, lambda: "host_q7x")
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium", monitor_dir=run)
    model = ANO("MlpPolicy", VecNormalize(env), policy_kwargs={"net_arch": [8], "activation_fn": torch.nn.ReLU}, **SMALL)
    model.set_logger(configure(str(run), ["csv"]))
    model.learn(256)
    model.logger.close()
    model.tensorboard_log = str(home / "tensorboard")
    env.close()
    np.savez(run / "evaluations.npz", results=[1.0])
    for name in ("private_notes.csv", "other.npz"):
        (run / name).write_text(f"a,b\n1,{home}\n")
    (run / "CartPole-v1").mkdir()
    (run / "CartPole-v1" / "config.yml").write_text("policy: MlpPolicy\nnormalize: false\n")
    (run / "CartPole-v1" / "args.yml").write_text(f"tensorboard_log: {home}\n")
    options = {"n_eval_episodes": 1, "video_length": 3, "verbose": 0, "include_optimizer": True}
    folder = package(model, tmp_path / "agent", "somebody/agent", run=run, **options)
    assert model.tensorboard_log == str(home / "tensorboard"), "the author's model was changed"
    searched = [part for path in folder.iterdir() for part in contents(path.name, path.read_bytes())]
    assert {"ano-CartPole-v1.zip!data:policy_class", "vec_normalize.pkl"} <= {name for name, _ in searched}
    private = [b"q7x", str(tmp_path).encode(), str(ROOT).encode(), str(Path.cwd()).encode()]
    assert not [name for name, data in searched if any(text in data for text in private)]
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "![Returns of the training episodes](./learning_curve.png)" in (folder / "README.md").read_text()
    assert (folder / "config.yml").read_text() == "policy: MlpPolicy\nnormalize: false\n"
    arguments = yaml.safe_load((folder / "args.yml").read_text())
    assert arguments == {"algo": "ano", "env": "CartPole-v1", "env_kwargs": {}, "n_timesteps": 256, "seed": 0}
    logs = ["0.monitor.csv", "1.monitor.csv", "evaluations.npz", "progress.csv"]
    assert zipfile.ZipFile(folder / "train_eval_metrics.zip").namelist() == logs


@pytest.mark.filterwarnings("ignore:stored by name only:UserWarning")
def test_code_that_is_published_is_named(tmp_path):
    """safety H6: functions of the main script are pickled with the globals that they use."""
    names = {"__name__": "__main__"}
    exec("KEY = 3e-4\ndef schedule(progress): return KEY * progress", names)
    model = small(learning_rate=names["schedule"], policy_kwargs={"activation_fn": torch.nn.ReLU})
    with pytest.warns(UserWarning, match="^ano-CartPole-v1.zip holds the code of learning_rate, .*the path of its file"):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)


def test_without_frames_the_push_continues_unless_a_video_was_asked_for(tmp_path, capsys):
    model, blind = small(), Monitor(gym.make("CartPole-v1"))
    folder = package(model, tmp_path / "agent", "somebody/agent", blind, n_eval_episodes=1, verbose=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no video: the environment does not render: its render_mode is None")
    assert "<video" not in (folder / "README.md").read_text()
    with pytest.raises(RenderError):
        package(model, tmp_path / "other", "somebody/agent", blind, n_eval_episodes=1, video=True, verbose=0)
    assert {path.name for path in tmp_path.iterdir()} == {"agent"}


@pytest.mark.parametrize("format", ["safe format", "ano-CartPole-v1.zip"])
def test_an_agent_that_comes_back_as_another_is_not_packed(format, tmp_path, monkeypatch):
    model, other = small(), small()
    with torch.no_grad():
        other.policy.action_net.bias += torch.tensor([50.0, -50.0])
        model.policy.action_net.bias -= torch.tensor([50.0, -50.0])
    loader = "sb3_ano.hub.evaluation.load_safe" if format == "safe format" else "sb3_ano.ANO.load"
    monkeypatch.setattr(loader, lambda *args, **options: other)
    with pytest.raises(ValueError, match=f"does not act as before once it is loaded from its {format}"):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not list(tmp_path.iterdir())


def test_only_its_own_directories_are_replaced(cartpole, tmp_path):
    run = tmp_path / "run"
    make_vec_env("CartPole-v1", 1, backend="gymnasium", monitor_dir=run).close()
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", run=run, **QUICK)
    assert not (folder / "learning_curve.png").exists(), "no episode of the run has ended"
    package(cartpole, folder, "somebody/renamed", **QUICK)
    assert "somebody/renamed" in (folder / "README.md").read_text()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        package(cartpole, folder, "somebody/agent", **QUICK)
    with pytest.raises(ValueError, match="run=.* is not a directory"):
        package(cartpole, tmp_path / "new", "somebody/agent", run=tmp_path / "nowhere", **QUICK)


def test_hyperparameters_are_plain_values(pendulum):
    model = small(
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        clip_range_high=0.3,
        learning_rate=LinearSchedule(1e-3, 1e-4, 0.5),
        policy_kwargs={"activation_fn": torch.nn.ReLU},
    )
    found = hyperparameters(model)
    assert found["clip_range"] == "lin_0.2"
    assert found["clip_range_high"] == 0.3
    assert found["learning_rate"] == "LinearSchedule(start=0.001, end=0.0001, end_fraction=0.5)"
    assert found["policy_kwargs"] == {"activation_fn": "torch.nn.ReLU"}
    assert found["shaping"] == "ano"
    assert not {"env", "device", "verbose", "seed"} & set(found)
    assert hyperparameters(pendulum)["normalize"]["clip_obs"] == 5.0
    assert yaml.safe_load(yaml.safe_dump(found)) == json.loads(json.dumps(found)) == found
