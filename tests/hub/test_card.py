"""Model cards: what the Hub reads, and what a stranger runs."""

import ast
import base64
import contextlib
import email.message
import importlib.metadata
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import packaging
from sb3_ano.hub.card import Agent, install_line, model_card, versions
from sb3_ano.hub.evaluation import Evaluation, Task
from sb3_ano.hub.hyperparameters import hyperparameters
from sb3_ano.hub.packaging import package
from sb3_ano.hub.video import RenderError
from tests.common import SMALL, pseudo_huber
from tests.hub.own_parts import FirstTwo, OwnPolicy

EVALUATION = Evaluation([9.0, 11.0, 13.0], [9, 11, 13], True, 4)
QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


CARTPOLE = Task("CartPole-v1", {})


def card_of(model, task=CARTPOLE, **options) -> ModelCard:
    agent = Agent(model, "somebody/agent", task, EVALUATION, False, False, **options)
    return ModelCard(str(model_card(agent)))


def small(cls=ANO, policy="MlpPolicy", **options):
    return cls(policy, make_vec_env("CartPole-v1", 1, backend="gymnasium"), **SMALL, **options)


def test_the_hub_reads_numbers_and_the_words_to_search_by(cartpole):
    data = card_of(cartpole, license="apache-2.0", tags=("demo",)).data.to_dict()
    assert data["library_name"] == "stable-baselines3"
    assert data["pipeline_tag"] == "reinforcement-learning"
    assert data["license"] == "apache-2.0"
    expected = ["CartPole-v1", "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-ano", "ano"]
    assert data["tags"] == [*expected, "demo"]
    (entry,) = data["model-index"]
    (result,) = entry["results"]
    assert result["dataset"] == {"name": "CartPole-v1", "type": "CartPole-v1"}
    metrics = {metric["type"]: metric for metric in result["metrics"]}
    assert metrics["mean_reward"]["value"] == 11.0
    assert metrics["std_reward"]["value"] == pytest.approx((8 / 3) ** 0.5)
    assert metrics["mean_reward"]["args"] == {"n_eval_episodes": 3, "deterministic": True, "seed": 4}


def test_a_license_is_only_named_if_the_author_names_one(cartpole):
    """users U6 d"""
    assert "licen" not in str(card_of(cartpole)).lower()


def test_the_page_says_how_the_agent_was_judged_and_trained(cartpole):
    text = card_of(cartpole).text
    assert "| 11.00 | 1.63 | 3 | 11.0 | deterministic | 4 |" in text
    assert "- algorithm: ANO, 2,048 steps, 2 environment(s)" in text
    assert "- seed: 0" in text
    assert f"torch {torch.__version__.split('+')[0]}" in text
    assert "zhang2026ano" in text
    assert "raffin2021stable" in text
    settings = json.loads(text.split("```json\n")[1].split("```")[0])
    assert settings["n_steps"] == SMALL["n_steps"]
    assert settings["clip_range"] == 0.2
    assert settings["policy_kwargs"] == {"net_arch": [16]}
    assert settings["shaping"] == "ano"
    assert "docs/algorithms.md" in text
    assert "pickles: loading it runs whatever code its author put in" in text


@pytest.mark.parametrize(
    ("task", "extras"),
    [
        (Task("CartPole-v1", {}), "hub"),
        (Task("HalfCheetah-v5", {}), "hub,mujoco"),
        (Task("PongNoFrameskip-v4", {}), "hub,atari"),
        (Task("Pong-v5", {}), "hub,atari"),
        (Task("LunarLander-v3", {}), "hub,zoo"),
        (Task("FrozenLake-v1", {}, backend="envpool"), "hub,envpool"),
    ],
)
def test_the_install_line_brings_the_package_and_the_environment(task, extras, monkeypatch):
    """users U5"""
    metadata = email.message.Message()
    metadata["Project-URL"] = "Documentation, https://example.org/docs"
    metadata["Project-URL"] = "Repository, https://example.org/code"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: {"sb3-ano": metadata}[name])
    assert install_line(task) == f'pip install "sb3-ano[{extras}] @ git+https://example.org/code"'


def test_versions_are_those_of_what_the_agent_needs():
    """users U6 e"""
    common = {"python", "sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy"}
    assert set(versions(CARTPOLE)) == common
    for name, task in (("mujoco", Task("Ant-v5", {})), ("envpool", Task("CartPole-v1", {}, backend="envpool"))):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            expected = importlib.metadata.version(name)
            assert {key: version for key, version in versions(task).items() if key not in common} == {name: expected}


def code_of(text: str) -> str:
    return text.split("```python\n")[1].split("\n```")[0]


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


def run_snippet(folder, monkeypatch, supplied: str | None = None) -> tuple[str, dict]:
    """Run a card's Python with the agent taken from the folder instead of the Hub, and the reader's own parts filled in."""
    from sb3_ano.hub.safe_format import load_safe

    code = code_of(ModelCard.load(folder / "README.md").text)
    monkeypatch.setattr(
        "sb3_ano.hub.pull.load_from_hub", lambda repo_id, env=None, **options: load_safe(folder, env, **options)
    )
    names: dict = {}
    exec(code if supplied is None else code.replace("=...", supplied), names)
    return code, names


@pytest.mark.filterwarnings("ignore:stored by name only|shaping=.* is stored by name only:UserWarning")
@pytest.mark.parametrize(
    ("options", "supplied", "remark"),
    [
        (
            {"shaping": pseudo_huber},
            "=__import__('tests.common').common.pseudo_huber",
            "`shaping=`: `tests.common:pseudo_huber`",
        ),
        (
            {"shaping": ("ano", pseudo_huber)},
            "=('ano', __import__('tests.common').common.pseudo_huber)",
            "`shaping=`: `ano, tests.common:pseudo_huber`",
        ),
        (
            {"policy": OwnPolicy},
            "={'policy': __import__('tests.hub.own_parts').hub.own_parts.OwnPolicy}",
            "`custom_objects=`: `{'policy': tests.hub.own_parts:OwnPolicy}`",
        ),
    ],
)
def test_the_card_names_what_is_the_authors_own(options, supplied, remark, tmp_path, monkeypatch, capsys):
    folder = package(small(**options), tmp_path / "agent", "somebody/agent", **QUICK)
    _, names = run_snippet(folder, monkeypatch, supplied)
    assert f"- {remark}\n" in (folder / "README.md").read_text()
    mean = json.loads((folder / "results.json").read_text())["mean_reward"]
    assert capsys.readouterr().out.startswith(f"{mean:.2f}")
    assert isinstance(names["model"].policy, options.get("policy", ActorCriticPolicy))


@pytest.mark.filterwarnings(
    "ignore:.*(stored by name only|cannot be imported|goes on with another one|holds the code):UserWarning"
)
def test_a_shape_without_a_name_and_a_schedule_do_not_matter_for_acting(tmp_path, monkeypatch):
    model = small(shaping=lambda x: x - x * x, learning_rate=lambda progress: 1e-3 * progress)
    folder = package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    code, names = run_snippet(folder, monkeypatch, "='ano'")
    assert ", shaping=...)" in code
    assert 'or any other, such as `"ano"`' in (folder / "README.md").read_text()
    assert names["mean"] == json.loads((folder / "results.json").read_text())["mean_reward"]


def test_an_environment_that_needs_more_than_its_id_is_left_to_the_reader(tmp_path, monkeypatch, capsys):
    env = FirstTwo(gym.make("Pendulum-v1"))
    model = ANO("MlpPolicy", env, **SMALL)
    with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in.*pass it as env="):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not list(tmp_path.iterdir())
    folder = package(model, tmp_path / "agent", "somebody/agent", env, **QUICK)
    code, _ = run_snippet(folder, monkeypatch)
    assert "make_vec_env" not in code
    assert "The agent's environment is `Pendulum-v1` with `FirstTwo`." in (folder / "README.md").read_text()
    assert capsys.readouterr().out.startswith("[")


def test_settings_of_the_task_are_part_of_the_snippet(tmp_path, monkeypatch):
    model = ANO("MlpPolicy", gym.make("Pendulum-v1", g=2.0), **SMALL)
    folder = package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    code, names = run_snippet(folder, monkeypatch)
    assert "env_kwargs={'g': 2.0}" in code
    assert names["env"].get_attr("g") == [2.0]
    assert yaml.safe_load((folder / "env_kwargs.yml").read_text()) == {"g": 2.0}


def test_an_environment_of_another_package_is_imported_first(tmp_path, monkeypatch):
    gym.register("Elsewhere-v0", entry_point="tests.hub.own_parts:RegisteredElsewhere")
    try:
        model = ANO("MlpPolicy", gym.make("Elsewhere-v0"), **SMALL)
        folder = package(model, tmp_path / "agent", "somebody/agent", **QUICK)
        assert "import tests  # registers the environment" in run_snippet(folder, monkeypatch)[0]
    finally:
        del gym.registry["Elsewhere-v0"]


def test_the_training_curve_and_the_logs_come_from_the_run(tmp_path):
    """safety H6: every CSV file of the run was published, and the zoo's args.yml with the paths in it."""
    run = tmp_path / "run"
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium", monitor_dir=run)
    model = ANO("MlpPolicy", env, **SMALL).learn(256)
    env.close()
    np.savez(run / "evaluations.npz", results=[1.0])
    for name in ("progress.csv", "private_notes.csv", "other.npz"):
        (run / name).write_text("a,b\n1,2\n")
    (run / "CartPole-v1").mkdir()
    (run / "CartPole-v1" / "config.yml").write_text("policy: MlpPolicy\nnormalize: false\n")
    (run / "CartPole-v1" / "args.yml").write_text("log_folder: /home/author/logs\n")
    folder = package(model, tmp_path / "agent", "somebody/agent", run=run, **QUICK)
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "![Returns of the training episodes](./learning_curve.png)" in (folder / "README.md").read_text()
    assert (folder / "config.yml").read_text() == "policy: MlpPolicy\nnormalize: false\n"
    arguments = yaml.safe_load((folder / "args.yml").read_text())
    assert arguments == {"algo": "ano", "env": "CartPole-v1", "env_kwargs": {}, "n_timesteps": 256, "seed": 0}
    logs = ["0.monitor.csv", "1.monitor.csv", "evaluations.npz", "progress.csv"]
    assert zipfile.ZipFile(folder / "train_eval_metrics.zip").namelist() == logs


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


def test_nothing_of_the_authors_machine_is_published(tmp_path, monkeypatch):
    """users U4, safety H6: every byte of every file, of zip entries and of pickles."""
    home = tmp_path / "alice_q7x"
    for name in ("HOME", "USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, str(home) if name == "HOME" else "alice_q7x")
    for function in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(function, lambda: "host_q7x")
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium", monitor_dir=home / "run")
    model = ANO("MlpPolicy", VecNormalize(env), policy_kwargs={"net_arch": [8], "activation_fn": torch.nn.ReLU}, **SMALL)
    model.set_logger(configure(str(home / "run"), ["csv"]))
    model.learn(256)
    model.logger.close()
    model.tensorboard_log = str(home / "tensorboard")
    env.close()
    (home / "run" / "CartPole-v1").mkdir()
    (home / "run" / "CartPole-v1" / "args.yml").write_text(f"tensorboard_log: {home}\n")
    options = {"n_eval_episodes": 1, "video_length": 3, "verbose": 0, "include_optimizer": True}
    folder = package(model, tmp_path / "agent", "somebody/agent", run=home / "run", **options)
    assert model.tensorboard_log == str(home / "tensorboard"), "the author's model was changed"
    searched = [part for path in folder.iterdir() for part in contents(path.name, path.read_bytes())]
    assert {"ano-CartPole-v1.zip!data:policy_class", "vec_normalize.pkl"} <= {name for name, _ in searched}
    private = [b"q7x", str(tmp_path).encode(), str(Path(__file__).parents[2]).encode(), str(Path.cwd()).encode()]
    assert not [name for name, data in searched if any(text in data for text in private)]


@pytest.mark.filterwarnings("ignore:stored by name only:UserWarning")
def test_code_that_is_published_is_named(tmp_path):
    """safety H6: functions of the main script are pickled with the globals that they use."""
    names = {"__name__": "__main__"}
    exec("KEY = 3e-4\ndef schedule(progress): return KEY * progress", names)
    model = small(learning_rate=names["schedule"], policy_kwargs={"activation_fn": torch.nn.ReLU})
    with pytest.warns(UserWarning, match="^ano-CartPole-v1.zip holds the code of __main__:schedule, the path of its file"):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)


def test_without_pictures_the_push_goes_on_unless_a_video_was_asked_for(tmp_path, capsys):
    model = small()
    blind = Monitor(gym.make("CartPole-v1"))
    folder = package(model, tmp_path / "agent", "somebody/agent", blind, n_eval_episodes=1, verbose=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no video: the environment does not render: its render_mode is None")
    assert "<video" not in (folder / "README.md").read_text()
    with pytest.raises(RenderError):
        package(model, tmp_path / "other", "somebody/agent", blind, n_eval_episodes=1, video=True, verbose=0)
    assert {path.name for path in tmp_path.iterdir()} == {"agent"}


def test_an_agent_that_comes_back_as_another_is_not_packed(tmp_path, monkeypatch):
    model, other = small(), small()
    with torch.no_grad():
        other.policy.action_net.bias += torch.tensor([50.0, -50.0])
        model.policy.action_net.bias -= torch.tensor([50.0, -50.0])
    monkeypatch.setattr(packaging, "load_safe", lambda *args, **options: other)
    with pytest.raises(ValueError, match="does not act as before once it is loaded from its safe format"):
        package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not list(tmp_path.iterdir())


def test_a_run_in_which_no_episode_has_ended_has_no_curve(tmp_path, cartpole):
    run = tmp_path / "run"
    make_vec_env("CartPole-v1", 1, backend="gymnasium", monitor_dir=run).close()
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", run=run, **QUICK)
    assert list(run.glob("*monitor.csv"))
    assert not (folder / "learning_curve.png").exists()
    assert "learning_curve.png" not in (folder / "README.md").read_text()


def test_only_its_own_folders_are_replaced(cartpole, tmp_path):
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    package(cartpole, folder, "somebody/renamed", **QUICK)
    assert "somebody/renamed" in (folder / "README.md").read_text()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        package(cartpole, folder, "somebody/agent", **QUICK)
    with pytest.raises(ValueError, match="run=.* is no folder"):
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
    assert found["policy_kwargs"] == {"activation_fn": "torch.nn.modules.activation:ReLU"}
    assert found["shaping"] == "ano"
    assert not {"env", "device", "verbose", "seed"} & set(found)
    assert hyperparameters(pendulum)["normalize"]["clip_obs"] == 5.0
    assert yaml.safe_load(yaml.safe_dump(found)) == json.loads(json.dumps(found)) == found
