"""Model cards: what the Hub reads, and what a stranger runs."""

import json
import zipfile

import gymnasium as gym
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import packaging
from sb3_ano.hub.card import Agent, model_card
from sb3_ano.hub.evaluation import Evaluation, Task
from sb3_ano.hub.hyperparameters import hyperparameters
from sb3_ano.hub.packaging import package
from sb3_ano.hub.snippet import install_line
from sb3_ano.hub.video import RenderError
from sb3_ano.shaping import SHAPINGS
from tests.common import SMALL, pseudo_huber
from tests.hub.own_parts import FirstTwo, OwnPolicy

EVALUATION = Evaluation([9.0, 11.0, 13.0], [9, 11, 13], True, 4)
QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


def card_of(model, **options) -> ModelCard:
    agent = Agent(model, "somebody/agent", Task("CartPole-v1", {}), EVALUATION, False, False, **options)
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
    assert "pickles: loading it runs whatever code its\nauthor put in" in text


@pytest.mark.parametrize(("name", "value"), [("ano", 1.0), ("spo", 0.5), ("ppo", 1.0), ("identity", 1.0)])
def test_formulas_are_those_of_the_shapes(name, value):
    """The formula on the card, read as Python, against the function."""
    sympy = pytest.importorskip("sympy")
    text = card_of(small(shaping=name)).text
    formula = text.split("where\n\n$$h(x) = ")[1].split("$$")[0]
    x = sympy.Symbol("x")
    if name == "ano":
        expression, definition = formula.split(r", \qquad \phi(z) = ")
        assert expression == r"\frac{45}{32 \ln 2}\big(\phi(-1) - \phi(x - 1)\big)"
        assert definition == r"\ln(1 + 2^{-2z}) + \frac{4}{1 + 2^{-z}}"
        phi = lambda z: sympy.log(1 + 2 ** (-2 * z)) + 4 / (1 + 2**-z)  # noqa: E731
        h = sympy.Rational(45, 32) / sympy.log(2) * (phi(sympy.Integer(-1)) - phi(x - 1))
    else:
        h = {"x - \\frac{x^2}{2}": x - x**2 / 2, "\\min(x, 1)": sympy.Min(x, 1), "x": x}[formula]
    for point in (-3.0, -0.5, 0.25, 1.0, 4.0):
        found = SHAPINGS[name](torch.tensor(point, dtype=torch.float64)).item()
        assert float(h.subs(x, sympy.Float(point, 30))) == pytest.approx(found, abs=1e-12)


def test_every_algorithm_states_its_surrogate():
    assert "Shape `spo`" in card_of(small(SPO)).text
    assert r"\omega_1" in card_of(small(PAPO)).text
    pair = card_of(small(shaping=("ano", "spo"))).text
    assert r"For \\(A \ge 0\\), `ano`" in pair
    assert r"For \\(A < 0\\), `spo`" in pair
    assert "`tests.common:pseudo_huber`" in card_of(small(shaping=pseudo_huber)).text


@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("CartPole-v1", "pip install 'sb3-ano[hub]'"),
        ("HalfCheetah-v5", "pip install 'sb3-ano[hub,mujoco]'"),
        ("PongNoFrameskip-v4", "pip install 'sb3-ano[hub,atari]'"),
        ("LunarLander-v3", "pip install 'sb3-ano[hub,zoo]'"),
    ],
)
def test_the_install_line_brings_the_environment(env_id, line):
    assert install_line(Task(env_id, {})) == line


def run_snippet(folder, monkeypatch) -> tuple[str, dict]:
    """Run a card's Python with the agent taken from the folder instead of the Hub."""
    from sb3_ano.hub.safe_format import load_safe

    code = ModelCard.load(folder / "README.md").text.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(
        "sb3_ano.hub.pull.load_from_hub", lambda repo_id, env=None, **options: load_safe(folder, env, **options)
    )
    names: dict = {}
    exec(code, names)
    return code, names


@pytest.mark.filterwarnings("ignore:stored by name only|shaping=.* is stored by name only:UserWarning")
@pytest.mark.parametrize(
    ("options", "imports"),
    [
        ({"shaping": pseudo_huber}, "from tests.common import pseudo_huber"),
        ({"shaping": ("ano", pseudo_huber)}, "from tests.common import pseudo_huber"),
        ({"shaping": "tests.common:pseudo_huber"}, "from tests.common import pseudo_huber"),
        ({"policy": OwnPolicy}, "from tests.hub.own_parts import OwnPolicy"),
        ({"learning_rate": lambda progress: 1e-3 * progress}, "import evaluate_policy"),
    ],
)
def test_the_snippet_imports_what_is_the_authors_own(options, imports, tmp_path, monkeypatch, capsys):
    folder = package(small(**options), tmp_path / "agent", "somebody/agent", **QUICK)
    code, names = run_snippet(folder, monkeypatch)
    assert imports in code
    mean = json.loads((folder / "results.json").read_text())["mean_reward"]
    assert capsys.readouterr().out.startswith(f"{mean:.2f}")
    assert isinstance(names["model"].policy, options.get("policy", ActorCriticPolicy))


@pytest.mark.filterwarnings("ignore:.*(stored by name only|cannot be imported|goes on with another one):UserWarning")
def test_a_shape_without_a_name_does_not_matter_for_acting(tmp_path, monkeypatch):
    model = small(shaping=lambda x: x - x * x)
    folder = package(model, tmp_path / "agent", "somebody/agent", **QUICK)
    code, names = run_snippet(folder, monkeypatch)
    assert 'shaping="ano"' in code
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


def test_the_training_curve_and_the_zoos_files_come_from_the_run(tmp_path):
    run = tmp_path / "run"
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium", monitor_dir=run)
    model = ANO("MlpPolicy", env, **SMALL).learn(256)
    env.close()
    (run / "CartPole-v1").mkdir()
    (run / "CartPole-v1" / "config.yml").write_text("policy: MlpPolicy\nnormalize: false\n")
    folder = package(model, tmp_path / "agent", "somebody/agent", run=run, **QUICK)
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "![Returns of the training episodes](./learning_curve.png)" in (folder / "README.md").read_text()
    assert (folder / "config.yml").read_text() == "policy: MlpPolicy\nnormalize: false\n"
    assert zipfile.ZipFile(folder / "train_eval_metrics.zip").namelist() == ["0.monitor.csv", "1.monitor.csv"]


def test_without_pictures_the_push_goes_on_unless_a_video_was_asked_for(tmp_path, capsys):
    model = small()
    blind = Monitor(gym.make("CartPole-v1"))
    folder = package(model, tmp_path / "agent", "somebody/agent", blind, n_eval_episodes=1, verbose=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no video: the environment gives no pictures: its render_mode is None")
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
