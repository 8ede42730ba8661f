"""An environment of the user's own package in every command, and packages that strangers name."""

import re
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from huggingface_sb3 import EnvironmentName

from sb3_ano import ANO
from sb3_ano.zoo import cli, hub_commands
from sb3_ano.zoo.packages import read_packages
from tests.hub.hub_server import USER, running_hub
from tests.zoo.conftest import rejected, run

MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor


class Cart(CartPoleEnv):
    def __init__(self, render_mode=None, pays=1.0):
        super().__init__(render_mode=render_mode)
        self.pays = pays

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.pays, *rest


class Policy(ActorCriticPolicy):
    pass


class Extractor(FlattenExtractor):
    pass


class Callback(BaseCallback):
    def _on_step(self):
        return True


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


gym.register("OwnCart-v3", "own_carts:Cart", max_episode_steps=8)
gym.register("own/Cart-v0", "own_carts:Cart", max_episode_steps=8)
"""
IDS = ("OwnCart-v3", "own/Cart-v0")
SHORT = "-n 64 --eval-freq 32 --eval-episodes 2 --seed 1 -params n_envs:1 n_steps:32 batch_size:32"


def forget() -> None:
    """Leave this process as a new one would be, in which nothing has imported the package."""
    sys.modules.pop("own_carts", None)
    for env_id in IDS:
        gym.registry.pop(env_id, None)


@pytest.fixture
def package(zoo, tmp_path, monkeypatch):
    """A module that is on the path, and not imported."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "own_carts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "path")
    forget()
    yield "own_carts"
    forget()


def train(env_id: str, options: str = "") -> str:
    output = run(f"train --algo ano --env {env_id} --gym-packages own_carts {SHORT} {options}").output
    forget()
    return output


@pytest.mark.parametrize("env_id", [pytest.param(IDS[0], marks=pytest.mark.slow), IDS[1]])
def test_every_command_finds_the_environment_of_a_run(env_id, package):
    name = env_id.replace("/", "-")
    train(env_id, "\"env_kwargs:{'pays': 3.0}\"")
    which = f"--algo ano --env {env_id}"
    video = f"video/final-model-ano-{name}-step-0-to-step-8.mp4"
    commands = {
        f"enjoy {which} --no-render -n 16": "Mean reward: 24.00 +/- 0.00",
        f"record_video {which} -n 8 -o video": video,
        "benchmark --log-dir logs --benchmark-dir b --no-hub -n 16": "mean return 24.00 +/- 0.00",
        f"plot_train -a ano -e {env_id} -f logs -w 1 --figure curve.png": "curve.png",
        f"all_plots -a ano -e {env_id} -f logs --figure evaluations.png": "evaluations.png",
    }
    for command, text in commands.items():
        printed = run(command).output
        forget()
        assert text in printed or Path(text).is_file(), printed
    assert f"|ano|{env_id}|24.0|0.0|" in Path("benchmark.md").read_text()
    assert "our Hugging" not in Path("benchmark.md").read_text()

    further = run(f"train {which} -i logs/ano/{name}_1/{name}.zip {SHORT}").output
    assert "Loading pretrained agent" in further
    runs = Path("logs/ano").glob(f"{name}_*/{name}/args.yml")
    assert [yaml.unsafe_load(file.read_text())["gym_packages"] for file in runs] == 2 * [[package]]


@pytest.mark.slow
def test_the_videos_of_a_training_are_recorded_in_processes_that_know_the_package(package):
    train("OwnCart-v3")
    run("record_training --algo ano --env OwnCart-v3 -n 8")
    assert Path("logs/ano/OwnCart-v3_1/videos/training.mp4").stat().st_size > 1000


def test_an_agent_is_pushed_and_comes_back_with_the_users_packages(package, tmp_path, monkeypatch):
    train("OwnCart-v3")
    with running_hub() as hub:
        hub.connect(monkeypatch, tmp_path / "hf")
        run(f"push_to_hub --algo ano --env OwnCart-v3 -f logs -orga {USER} --no-render")
        forget()
        load = f"load_from_hub --algo ano --env OwnCart-v3 -f loaded -orga {USER}"
        assert "--env OwnCart-v3 is not registered (the package of an environment is given as --gym-packages" in rejected(load)
        run(f"{load} --gym-packages own_carts")
    forget()
    assert "Mean reward: 8.00" in run("enjoy --algo ano --env OwnCart-v3 -f loaded --no-render -n 16").output


def test_gymnasiums_form_with_the_module_is_understood(package):
    run(f"train --algo ano --env own_carts:OwnCart-v3 {SHORT}")
    forget()
    assert "Mean reward: 8.00" in run("enjoy --algo ano --env OwnCart-v3 --no-render -n 16").output


FILE = """\
OwnCart-v3:
  policy: own_carts.Policy
  n_timesteps: 64
  n_steps: 32
  batch_size: 32
  env_wrapper: own_carts.Doubled
  callback: own_carts.Callback
"""
PYTHON_FILE = """\
import own_carts
hyperparams = {"OwnCart-v3": dict(
    policy="MlpPolicy", n_timesteps=64, n_steps=32, batch_size=32,
    policy_kwargs=dict(features_extractor_class=own_carts.Extractor), env_wrapper=own_carts.Doubled,
)}
"""


@pytest.mark.parametrize(("name", "content"), [("own.yml", FILE), ("own.py", PYTHON_FILE)])
def test_classes_of_a_package_that_the_user_names_are_used(name, content, package):
    """They need the option, because a run could name any class of any module that is installed."""
    Path(name).write_text(content)
    train("OwnCart-v3", f"-conf {name}")
    enjoy = "enjoy --algo ano --env OwnCart-v3 --no-render -n 16"
    errors = rejected(enjoy)
    assert "(if own_carts is a module of yours, use --gym-packages own_carts)" in errors
    forget()
    assert "Mean reward: 16.00" in run(f"{enjoy} --gym-packages own_carts").output
    policy = ANO.load("logs/ano/OwnCart-v3_1/OwnCart-v3.zip").policy
    assert "own_carts" in (type(policy).__module__, type(policy.features_extractor).__module__)


def test_subprocesses_make_the_environment(package):
    train("OwnCart-v3", "--vec-env subproc")
    assert Path("logs/ano/OwnCart-v3_1/OwnCart-v3.zip").is_file()


WRONG = [
    ("train --env OwnCart-v3", "--env OwnCart-v3 is not registered (the package of an environment is given as --gym-packages"),
    ("enjoy --env OwnCart-v3 --no-render", "--env OwnCart-v3 is not registered (the package"),
    ("push_to_hub --env OwnCart-v3 -f logs -orga me", "--env OwnCart-v3 is not registered (the package"),
    ("record_video --env OwnCrt-v3 --gym-packages own_carts", "not by --gym-packages own_carts, did you mean 'OwnCart-v3'?"),
    ("train --env Cartpole-v0", "--env Cartpole-v0 is not registered, did you mean 'CartPole-v1'?"),  # the newest version
    ("train --env HalfCheeta-v5", "did you mean 'HalfCheetah-v5'?"),
    (
        "train --env OwnCart-v3 --gym-packages own_cart",
        "--gym-packages own_cart: there is no module 'own_cart' here; install it",
    ),
    ("train --env OwnCart-v3 --gym-packages own_carts.py", "a module is named as in an import statement, without a path"),
    ("train --env OwnCart-v3 --gym-packages broken", "--gym-packages broken cannot be imported: ZeroDivisionError: division"),
    ("train --env OwnCart-v3 --gym-packages exits", "--gym-packages exits cannot be imported: SystemExit: 0"),
    (
        "train --env OwnCart-v3 --gym-packages needs",
        "--gym-packages needs: there is no module 'nonexistent' here; install it, or",
    ),
]


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_what_is_wrong_with_an_id_or_a_package_is_one_line(command, message, package, tmp_path):
    for name, content in {"broken": "1 / 0", "exits": "raise SystemExit(0)", "needs": "import nonexistent"}.items():
        (tmp_path / "path" / f"{name}.py").write_text(content)
    assert message in rejected(f"{command} --algo ano")
    assert not Path("logs").exists()


# The zoo leaves the environments of an agent that could not be loaded to the end of the process.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_benchmark_with_failures_says_so_and_writes_no_empty_table(package, monkeypatch):
    # In this process, which is faster; the test above starts others.
    monkeypatch.setattr("sb3_ano.zoo.benchmark.start_command", lambda arguments: forget() or cli.main(arguments))
    train("OwnCart-v3")
    train("own/Cart-v0")
    shutil.rmtree(package_path := Path(sys.path[0]))
    benchmark = "benchmark --log-dir logs --benchmark-dir b --no-hub -n 16"
    errors = run(benchmark, status=2).errors
    assert "2 of 2 agents have no returns, as said above: ano on " in errors
    assert errors.count("was trained with --gym-packages own_carts: there is no module 'own_carts' here; install it") == 2
    assert not Path("benchmark.md").exists()
    package_path.mkdir()
    (package_path / "own_carts.py").write_text(MODULE)
    Path("logs/ano/own-Cart-v0_1/own-Cart-v0.zip").write_text("damaged")
    assert "1 of 2 agents have no returns, as said above: ano on own/Cart-v0" in run(benchmark, status=2).errors
    assert re.findall(r"^\|ano\|(.+?)\|", Path("benchmark.md").read_text(), re.MULTILINE) == ["OwnCart-v3"]
    for options, message in {
        "--log-dir nothing": "--log-dir nothing holds no agents",
        "--log-dir logs --benchmark-dir c -n 3": "2 of 2 agents have no returns",
    }.items():
        assert message in run(f"benchmark --no-hub {options}", status=2).errors


@pytest.mark.parametrize(
    "named", ["antigravity", "rl_zoo3.benchmark", "os.path", "../path", "a b", "own_carts;x", 3, {"a": 1}]
)
def test_a_run_names_no_module_that_does_something_when_it_is_imported(named, zoo):
    file = Path("ano/CartPole-v1_1/CartPole-v1/args.yml")
    file.parent.mkdir(parents=True)
    file.write_text(yaml.dump({"env": "CartPole-v1", "gym_packages": [named]}))
    with pytest.raises(ValueError, match="is not a module that registers environments"):
        read_packages(file.parents[1], "CartPole-v1")
    assert not {"antigravity", "rl_zoo3.benchmark"} & set(sys.modules)


def test_the_modules_of_a_run_are_imported_only_for_an_unknown_environment(package):
    run(f"train --algo ano --env CartPole-v1 --gym-packages own_carts {SHORT}")
    forget()
    run("enjoy --algo ano --env CartPole-v1 --no-render -n 16")
    assert package not in sys.modules


@pytest.mark.parametrize("typed", [(), ("own_carts",)])
def test_a_downloaded_run_names_the_users_packages_only(typed, zoo, monkeypatch):
    def download(repo_id, run, algo, name):
        (run / name).mkdir(parents=True)
        (run / name / "args.yml").write_text(yaml.dump({"env": str(name), "gym_packages": ["of_a_stranger"]}))

    monkeypatch.setattr(hub_commands, "download_pickle", download)
    for number in (1, 2):
        hub_commands.load_from_sb3("ppo", EnvironmentName("CartPole-v1"), "f", 0, typed)
        assert read_packages(Path(f"f/ppo/CartPole-v1_{number}"), "CartPole-v1") == list(typed)
