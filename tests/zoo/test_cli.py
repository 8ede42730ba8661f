"""The zoo's command line, what ``register`` does to the zoo, and every command of the table in docs/zoo.md.

The commands run for every algorithm with nothing installed but what this package declares.
"""

import os
import re
import subprocess
import sys
import venv
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread
from stable_baselines3.common.monitor import load_results

import sb3_ano.cli
from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo import cli
from sb3_ano.zoo.parsing import PLOTS
from tests.common import ROOT, python
from tests.envs.backends import needs_envpool
from tests.hub.hub_server import running_hub
from tests.zoo.conftest import rejected

# The zoo leaves the environments of a run that could not start to the end of the process.
LEFT_OPEN = "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
pytestmark = pytest.mark.filterwarnings(*LEFT_OPEN)
ANO, CHEETAH = "--algo ano --env CartPole-v1", "--algo ano --env HalfCheetah-v4"


# Enjoy without options finds what train has left without options.
@pytest.mark.parametrize(("algo", "which"), [("ano", ANO), ("ppo", "")])
def test_an_agent_is_trained_enjoyed_and_trained_further(algo, which, zoo):
    few = "-n 512 --eval-freq 256 --eval-episodes 1 --seed 1"
    trained = zoo(f"train {which} {few} -params gamma:0.9 n_envs:2 n_steps:64 batch_size:64 \"backend:'gymnasium'\"")
    assert f"hyperparams/{algo}.yml" in trained.output
    run = Path("logs", algo, "CartPole-v1_1")
    assert {"CartPole-v1.zip", "best_model.zip", "0.monitor.csv", "evaluations.npz"} <= {path.name for path in run.iterdir()}
    config, args = (yaml.unsafe_load((run / "CartPole-v1" / f"{name}.yml").read_text()) for name in ("config", "args"))
    assert (config["gamma"], config["n_timesteps"]) == (0.9, 512)  # the file's are more
    assert not {"resume", "checkpoint_freq"} & set(args)
    enjoyed = zoo(f"enjoy {which} --no-render -n 300").output
    assert re.search(rf"(?s)Loading {run}/CartPole-v1.zip.*Mean reward:", enjoyed)
    assert "Loading pretrained agent" in zoo(f"--algo {algo} {few} -i {run}/CartPole-v1.zip").output, "options alone: train"


def test_a_custom_file_and_a_custom_shape_are_used(zoo, monkeypatch):
    small = "policy: MlpPolicy, n_timesteps: 64, n_steps: 32, batch_size: 32, clip_range: lin_0.2, clip_range_high: lin_0.3"
    Path("my.yml").write_text(f"CartPole-v1: {{{small}, shaping: 'tests.common:pseudo_huber'}}")
    zoo(f"train {ANO} -conf my.yml --eval-freq -1 --checkpoint-freq 0")
    assert sb3_ano.ANO.load("logs/ano/CartPole-v1_1/CartPole-v1.zip").shaping == "tests.common:pseudo_huber"
    assert not [path for path in Path("logs").rglob("*") if path.name in ("run.json", "checkpoints")]
    for display in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(display, raising=False)
    assert "There is no display" in zoo(f"enjoy {ANO} -f logs -n 60").output


def test_returns_of_several_environments_are_printed_or_why_there_are_none(zoo):
    zoo("train --algo ano --env Pendulum-v1 -n 64 --eval-freq -1 -params n_envs:1 n_steps:64 batch_size:64")
    enjoy = "enjoy --algo ano --env Pendulum-v1 --no-render --seed 3"
    output = zoo(f"{enjoy} --n-envs 2 -n 410 --reward-log log").output
    returns = load_results("log")["r"]
    assert f"4 Episodes\nMean reward: {returns.mean():.2f} +/- {returns.std(ddof=0):.2f}\n" in output
    assert output.endswith("Mean episode length: 200.00 +/- 0.00\n")
    for options in ("-n 199", "--n-envs 2 -n 199"):
        assert zoo(f"{enjoy} {options}").output.endswith(
            "No episode has ended within 199 steps of each environment; use a larger -n\n"
        )
    assert zoo(f"{enjoy} -n 410").output.count("Mean reward") == 1
    assert "Mean reward" not in zoo(f"{enjoy} --n-envs 2 -n 210 --verbose 0").output


def test_trainings_that_start_together_have_a_directory_each(zoo, monkeypatch):
    monkeypatch.setattr("rl_zoo3.exp_manager.get_latest_run_id", lambda *_: 0)  # neither sees the other
    line = f"train {ANO} -n 64 --eval-freq -1 -params n_envs:1 n_steps:64 batch_size:64"
    zoo(f"{line} --seed 1")
    zoo(f"{line} --seed 2")
    rejected(f"{line} \"policy_kwargs:dict(net_arch='x')\"")
    runs = [Path("logs/ano/CartPole-v1_1"), Path("logs/ano/CartPole-v1_2")]
    assert sorted(Path("logs/ano").iterdir()) == runs
    for seed, run in enumerate(runs, start=1):
        assert {"CartPole-v1.zip", "0.monitor.csv"} <= {path.name for path in run.iterdir()}
        assert yaml.unsafe_load((run / "CartPole-v1" / "args.yml").read_text())["seed"] == seed


BAD_INPUT = [
    ("--algo ano -params xyzzy:1", "-params: unknown key 'xyzzy' for ANO; allowed are"),
    ("--algo ppo -params nsteps:8", "-params: unknown key 'nsteps' for PPO, did you mean 'n_steps'?\n"),
    ("--algo spo -params \"shaping:'ano'\"", "unknown key 'shaping' for SPO"),
    ("enjoy --nonsense", "unrecognized arguments: --nonsense ('python -m sb3_ano.zoo enjoy --help' shows the options)"),
    ("--algo ano -params \"shaping:'anno'\"", "shaping='anno' is unknown; allowed are"),
    ("--algo ano -params shaping:spo", "name 'spo' is not defined: options KEY:VALUE take Python values, such as"),
    ("--algo ano -params \"learning_rate:'abc'\"", "learning_rate='abc' is of type str; allowed are a finite number"),
    ("--algo spo -params \"clip_range:'lin_'\"", "clip_range='lin_' is not allowed; allowed are a finite number"),
    ("--algo ano -params clip_range=0.3", "options KEY:VALUE take Python values, such as clip_range:0.3"),
    (f"{CHEETAH} -params \"backend:'envpol'\"", "backend='envpol' is unknown, did you mean 'envpool'?"),
    (f"{CHEETAH} --vec-env subproc -params \"backend:'envpool'\"", "vec_env_cls is not allowed with backend 'envpool'"),
    ("--algo ano -n 512 --device bogus", "bogus"),
    (
        "--algo ano -optimize --storage a.txt",
        "--storage a.txt is not allowed; allowed are URLs such as sqlite:",
    ),
    ("--algo sac --checkpoint-freq 100", "--checkpoint-freq needs an on-policy algorithm; sac is none"),
    ("--algo ano -optimize --n-evaluations 0", "--n-evaluations 0 is not allowed; allowed are positive integers"),
    ("--algo sac --resume", "--resume needs an on-policy algorithm; sac is none"),
    ("--algo ano --resume -optimize", "a search continues with its --storage and --study-name"),
    ("enjoy --algo ppo --env CartPole-v1 --no-render", "`pickle.load` is insecure"),
    (f"enjoy {ANO} -f nothing", "folder was not found"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
@needs_envpool
def test_bad_input_is_one_clear_line(arguments, message, zoo, tmp_path):
    assert message in rejected(arguments)
    assert list(tmp_path.iterdir()) == [], "a run that could not start leaves nothing"


@pytest.mark.parametrize(("package", "extra"), [("ale_py", "atari"), ("rl_zoo3", "zoo")])
def test_a_missing_package_is_one_line_that_names_the_extra(package, extra, tmp_path):
    code = f"import sys; sys.modules['{package}'] = None\nfrom sb3_ano.zoo.cli import main; sys.exit(main(sys.argv[1:]))"
    finished = python("-c", code, "train", "--env", "PongNoFrameskip-v4", cwd=tmp_path)
    assert finished.returncode == 2
    assert re.fullmatch(rf"error: \S+ is not installed; install it with: pip install 'sb3-ano\[{extra}\]'\n", finished.stderr)


ENTRIES = [
    ("python zoo_runner.py", [ROOT / "zoo_runner.py"]),
    ("python -m sb3_ano.zoo", ["-m", "sb3_ano.zoo"]),
    ("sb3-ano", ["-c", "import sys; from sb3_ano.cli import main; sys.exit(main())"]),
    ("sb3-ano", ["-m", "sb3_ano"]),
    ("sb3-ano", ["-m", "sb3_ano.cli"]),
    ("python -m sb3_ano.zoo", ["-m", "sb3_ano.zoo.cli"]),
]


@pytest.mark.parametrize(("program", "entry"), ENTRIES)
def test_help_lists_the_commands_under_a_name_that_can_be_typed(program, entry):
    shown = python(*entry, "--help").stdout
    assert shown.startswith(f"usage: {program} COMMAND")
    listed = re.findall(r"^  (\w+)  ", shown, re.MULTILINE)
    assert listed == [*cli.COMMANDS, *(sb3_ano.cli.GROUPS if program == "sb3-ano" else ())]


def test_the_version_is_that_of_the_distribution(capsys):
    assert sb3_ano.cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sb3-ano {metadata.version('sb3-ano')}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_on_a_command_has_the_zoos_options_and_ours(command, zoo):
    output = " ".join(zoo(f"{command} --help").output.split())
    assert output.startswith(f"usage: python -m sb3_ano.zoo {command} ")
    zoos, ours = output.split("added by sb3_ano:")
    assert ("--resume" if command == "train" else "--figure" if command in PLOTS else "--trust-remote-code") in ours
    assert "papo" in zoos or "{a2c" not in zoos, "commands with a choice of algorithms know ours"


@pytest.mark.slow
def test_help_ends_where_its_reader_ends(tmp_path):
    pipe = '"$0" -m sb3_ano.zoo train --help | "$0" -c "import sys; sys.stdin.readline()"'
    shown = subprocess.run(["bash", "-c", pipe, sys.executable], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert shown.stderr == ""


def test_commands_start_as_fast_as_the_zoos_own():
    code = "import sys, rl_zoo3.train, sb3_ano.zoo.cli as cli; before = set(sys.modules); cli.main(['train', '--help'])"
    loaded = python("-c", f"{code}; print('@', *(set(sys.modules) - before))", check=True).stdout.rpartition("@")[2].split()
    assert "sb3_ano.zoo.commands" in loaded
    assert not {"requests", "pandas", "seaborn", "scipy", "imageio", "safetensors", "ray", "ale_py", "envpool"} & {*loaded}


OWN_SCRIPT = """
import argparse, subprocess
import rl_zoo3.train, rl_zoo3.utils
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from sb3_ano.zoo import register

owners = argparse.ArgumentParser, subprocess, rl_zoo3.train, rl_zoo3.exp_manager, rl_zoo3.utils, ExperimentManager
tables = rl_zoo3.ALGOS, HYPERPARAMS_SAMPLER, *map(vars, owners)
before = list(map(dict, tables))
register()
after = list(map(dict, tables))
register()
assert list(map(dict, tables)) == after
changed = {name for old, new in zip(before, after) for name in {*old, *new} if old.get(name) is not new.get(name)}
assert changed == {"ano", "spo", "papo", "ano_lstm", "ano_mask", "ano_lstm_mask", "ExperimentManager"}
assert type(rl_zoo3.train.ExperimentManager(argparse.Namespace(), "ppo", "CartPole-v1", "logs")) is ExperimentManager
assert rl_zoo3.train.ExperimentManager(argparse.Namespace(), "spo", "CartPole-v1", "logs").config.endswith("ano.yml")
"""


def test_registering_adds_algorithms_and_leaves_those_of_others_alone():
    finished = python("-c", OWN_SCRIPT)
    assert finished.returncode == 0, finished.stderr


# What makes a training short, and the same for all algorithms.
COMMON = "-n 512 --eval-freq 128 --eval-episodes 2 -params batch_size:64"
SHORT = dict.fromkeys(("CartPole-v1", "Hopper-v4"), f"{COMMON} n_envs:2 n_steps:64")
SHORT["BreakoutNoFrameskip-v4"] = f"{COMMON} n_envs:1 n_steps:256"  # an episode of which takes most of the training
# The zoo has no settings for TRPO on Atari.
ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
TRPO_ON_ATARI = f"atari: {{env_wrapper: [{ATARI_WRAPPER}], frame_stack: 4, policy: CnnPolicy, n_timesteps: 1000}}"


def table() -> list[tuple[str, str]]:
    """Commands and what is there afterwards."""
    return re.findall(r"^\| `(.+)` \| (.+) \|$", (ROOT / "docs" / "zoo.md").read_text().partition("## Fixes")[0], re.MULTILINE)


def test_the_documentation_has_every_command():
    commands = [command.split()[0] for command, _ in table()]
    assert commands == [*cli.COMMANDS, "load_from_hub"], "of which the last one is for our algorithms only"


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory):
    """An interpreter with links to this package's source and to what ``pip install 'sb3-ano[EXTRAS]'`` brings.

    All of that is installed in the test environment, or pip fails without an index.
    """
    what = f"sb3-ano[zoo,hub,mujoco,atari] @ file://{ROOT}"
    pip = python("-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", what, check=True)
    directory = tmp_path_factory.mktemp("clean")
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for installed in map(
        metadata.distribution, re.findall("^Requirement already satisfied: ([\\w.-]+)", pip.stdout, re.MULTILINE)
    ):
        for top in {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(installed.locate_file(top))
    (site / "sb3_ano.pth").write_text(f"{ROOT}\n")
    return directory / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("env", SHORT)
@pytest.mark.parametrize("algo", [*(algo for algo in ALGORITHMS if "mask" not in algo), "ppo", "trpo"])
def test_every_command_works_for_every_algorithm(algo, env, clean_python, tmp_path):
    if env == "Hopper-v4" and "CI" not in os.environ and find_library("EGL") is None:
        pytest.skip("MuJoCo does not render here; it needs EGL's library (Debian: libegl1)")
    (tmp_path / "trpo.yml").write_text(TRPO_ON_ATARI)
    short = f"--seed 1 {SHORT[env]} {'-conf trpo.yml' if (algo, env) == ('trpo', 'BreakoutNoFrameskip-v4') else ''}"
    # No display and no ffmpeg, whatever machine this is.
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"PATH": str(tmp_path / "no_programs"), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    with running_hub() as hub:
        options = {"cwd": tmp_path, "env": variables | hub.variables, "capture_output": True, "text": True, "timeout": 600}
        for command, promise in table() if algo in ALGORITHMS else table()[:-1]:
            line, promised = (text.replace("ALGO", algo).replace("ENV", env) for text in (command, promise))
            line = f"{line} {short}" if line.startswith("train") else line
            done = subprocess.run([clean_python, ROOT / "zoo_runner.py", *line.split()], **options)
            said = f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
            assert done.returncode == 0, said
            if "printed" in promised:
                assert "Loading logs/" in done.stdout
            elif promised.startswith("`"):
                assert min([file.stat().st_size for file in tmp_path.glob(promised.strip("`"))], default=0) > 0, said
    assert imread(tmp_path / "curves.png").std() > 0.01, "the plot is empty"
    (row,) = re.findall(rf"^\|{algo}.*$", (tmp_path / "benchmarks" / "benchmark.md").read_text(), re.MULTILINE)
    assert "|0k" in row.replace(" ", ""), "the steps of the training"
    pushed = hub.repositories[f"me/{algo}-{env}"][-1]
    assert {f"{algo}-{env}.zip", "config.yml", "README.md", "replay.mp4"} <= set(pushed)
    assert len(pushed["replay.mp4"]) > 1000
