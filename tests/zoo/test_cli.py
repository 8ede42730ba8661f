"""The zoo's command line, run as a user runs it: another process, another folder."""

import contextvars
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import rl_zoo3
import yaml

from sb3_ano.zoo import cli
from sb3_ano.zoo.commands import COMMANDS, OWN
from sb3_ano.zoo.registration import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
ZOO_RUNNER = [str(ROOT / "zoo_runner.py")]
MODULE = ["-m", "sb3_ano.zoo"]


def run(entry: list[str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *entry, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("algo", "entry"), [("ano", MODULE), *(pytest.param(algo, ZOO_RUNNER, marks=pytest.mark.slow) for algo in ("spo", "papo"))]
)
def test_an_agent_is_trained_and_enjoyed_from_any_folder(algo, entry, tmp_path):
    options = ["--algo", algo, "--env", "CartPole-v1"]
    few = ["-n", "512", "--eval-freq", "256", "--eval-episodes", "1", "--seed", "1"]
    trained = run(entry, "train", *options, *few, "-params", "clip_range:0.3", "n_envs:2", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert f"hyperparams/{algo}.yml" in trained.stdout
    folder = tmp_path / "logs" / algo / "CartPole-v1_1"
    assert {"CartPole-v1.zip", "best_model.zip", "0.monitor.csv", "evaluations.npz"} <= {
        path.name for path in folder.iterdir()
    }
    saved = yaml.unsafe_load((folder / "CartPole-v1" / "config.yml").read_text())
    assert dict(saved)["clip_range"] == 0.3

    enjoyed = run(entry, "enjoy", *options, "-f", "logs", "--no-render", "-n", "300", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr
    assert "Mean reward:" in enjoyed.stdout

    resumed = run(entry, "train", *options, *few, "-i", f"{folder}/CartPole-v1.zip", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "Loading pretrained agent" in resumed.stdout


def test_bare_options_mean_train(tmp_path):
    trained = run(
        MODULE, "--algo", "ano", "--env", "Pendulum-v1", "-n", "64", "--eval-freq", "-1", "-params", "n_steps:16", cwd=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "logs" / "ano" / "Pendulum-v1_1" / "Pendulum-v1.zip").is_file()


@pytest.mark.slow
def test_mujoco_trains_with_normalisation(tmp_path):
    options = ["--algo", "ano", "--env", "Hopper-v5", "-n", "256", "--eval-freq", "64", "--eval-episodes", "1"]
    trained = run(ZOO_RUNNER, "train", *options, "-params", "n_envs:2", "n_steps:64", "batch_size:32", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "logs" / "ano" / "Hopper-v5_1" / "Hopper-v5" / "vecnormalize.pkl").is_file()
    assert (tmp_path / "logs" / "ano" / "Hopper-v5_1" / "best_model.zip").is_file()
    enjoyed = run(ZOO_RUNNER, "enjoy", "--algo", "ano", "--env", "Hopper-v5", "--no-render", "-n", "50", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr


@pytest.mark.slow
def test_sb3s_own_algorithms_still_work(tmp_path):
    options = ["--algo", "trpo", "--env", "CartPole-v1", "-n", "256", "--eval-freq", "-1", "-params", "n_steps:64"]
    trained = run(MODULE, "train", *options, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    enjoyed = run(MODULE, "enjoy", *options[:4], "--no-render", "-n", "60", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr
    assert "Loading logs/trpo/CartPole-v1_1/CartPole-v1.zip" in enjoyed.stdout


@pytest.mark.parametrize("module", ["rl_zoo3.load_from_hub", "rl_zoo3.enjoy"])
def test_what_the_zoo_downloads_needs_trust(module, monkeypatch):
    from sb3_ano.zoo.downloads import guarded_downloads

    downloads = []
    user = importlib.import_module(module)
    for one in ("rl_zoo3.load_from_hub", "rl_zoo3.enjoy"):
        monkeypatch.setattr(f"{one}.download_from_hub", lambda **options: downloads.append(options))
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    with guarded_downloads(), pytest.raises(ValueError, match="use --trust-remote-code"):
        user.download_from_hub(algo="ppo")
    assert not downloads
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")  # as a child of a command inherits it
    with guarded_downloads():
        user.download_from_hub(algo="ppo")
    assert downloads == [{"algo": "ppo"}]


def test_registering_makes_the_zoos_own_functions_know_the_algorithms(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import sys\nfrom sb3_ano.zoo import register\nregister()\nregister()\n"
        "from rl_zoo3.train import train\n"
        "sys.argv = 'train --algo spo --env CartPole-v1 -n 64 --eval-freq -1 -params n_steps:16 batch_size:16'.split()\n"
        "train()\n"
    )
    finished = run([str(script)], cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "hyperparams/spo.yml" in finished.stdout


def test_a_custom_file_and_a_custom_shape_are_used(tmp_path):
    (tmp_path / "my_shapes.py").write_text("import torch\ndef mine(x):\n    return 1 + x - torch.sqrt(1 + x * x)\n")
    (tmp_path / "my.yml").write_text(
        "CartPole-v1:\n  policy: MlpPolicy\n  n_timesteps: 64\n  n_steps: 32\n  batch_size: 32\n"
        "  shaping: 'my_shapes:mine'\n  clip_range: lin_0.2\n  clip_range_high: lin_0.3\n"
    )
    trained = run(
        MODULE, "train", "--algo", "ano", "--env", "CartPole-v1", "-conf", "my.yml", "--eval-freq", "-1", cwd=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    enjoyed = run(
        MODULE, "enjoy", "--algo", "ano", "--env", "CartPole-v1", "-f", "logs", "--no-render", "-n", "60", cwd=tmp_path
    )
    assert enjoyed.returncode == 0, enjoyed.stderr


# The zoo leaves the environments of a run that could not start to the end of the process.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "--algo", "ano"], "unknown command 'trian', did you mean 'train'?"),
        (["--algo", "ano", "--env", "CartPol-v1"], "CartPol-v1 not found in gym registry, you maybe meant CartPole-v1?"),
        (
            ["--algo", "ano", "--env", "CartPole-v1", "-params", "clip_rang:0.2"],
            "-params: unknown key 'clip_rang' for ANO, did you mean",
        ),
        (["--algo", "anno", "--env", "CartPole-v1"], "argument --algo: invalid choice: 'anno' (choose from"),
        (["enjoy", "--nonsense"], "unrecognized arguments: --nonsense ('enjoy --help' shows the options)"),
        (["--algo", "ano", "--env", "CartPole-v1", "-params", "shaping:'anno'"], "shaping='anno' is unknown; allowed are"),
        (["--algo", "ano", "--env", "CartPole-v1", "-conf", "nowhere.yml"], "No such file or directory: 'nowhere.yml'"),
        (["--algo", "ano", "--env", "CartPole-v1", "-params", "n_envs:0"], "n_envs=0 is not allowed"),
        (["--algo", "ano", "-params", "shaping:spo"], "text needs quotes of its own: \"shaping:'spo'\""),
        (["--algo", "ano", "-params", "clip_range=0.3"], "clip_range=0.3 is not of the form KEY:VALUE"),
        (["--algo", "ano", "--env", "CartPole-v1", "-params", "shaping:lambda x: x"], "allowed are names, such as"),
        (
            ["--algo", "ano", "--env", "CartPole-v1", "--checkpoint-freq", "often"],
            "--checkpoint-freq: invalid int value: 'often'",
        ),
        (["plot_train", "-a", "ano", "-e", "x", "-f", ".", "--figure", "a.txt"], "allowed are files that end in ."),
        (["plot_train", "-a", "ano", "-e", "x", "-f", ".", "--figure", "no/a.png"], "is in no folder that exists"),
        (["load_from_hub", "--algo", "ppo", "--env", "CartPole-v1", "-f", "x"], "runs any code that its author put in"),
        (["enjoy", "--algo", "ppo", "--env", "CartPole-v1", "--no-render"], "runs any code that its author put in"),
        (["benchmark", "--log-dir", "nothing", "--no-hub"], "No such file or directory: 'nothing'"),
        (["enjoy", "--algo", "ano", "--env", "CartPole-v1", "-f", "nothing"], "folder was not found"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zoo_runner.py"])
    monkeypatch.setattr(subprocess, "call", subprocess.call)  # which a command may replace
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    # In a context of its own, a training that fails leaves no plans for the next.
    assert contextvars.copy_context().run(cli.main, arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True]
    assert message in lines[0]
    assert not (tmp_path / "logs").exists(), "a run that could not start leaves nothing"


@pytest.mark.slow
def test_a_file_of_the_zoo_itself_is_used_when_it_is_asked_for(tmp_path):
    zoos = str(Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml")
    options = ["--algo", "ano", "--env", "CartPole-v1", "-n", "64", "--eval-freq", "-1", "-conf", zoos]
    trained = run(MODULE, "train", *options, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert f"Loading hyperparameters from: {zoos}" in trained.stdout


def test_missing_atari_is_one_line_that_names_the_extra(tmp_path):
    code = "import sys; sys.modules['ale_py'] = None\nfrom sb3_ano.zoo.cli import main\n"
    finished = run(["-c", code + "sys.exit(main(['--algo', 'ano', '--env', 'PongNoFrameskip-v4']))"], cwd=tmp_path)
    assert finished.returncode == 2
    assert finished.stderr.strip() == "error: ale-py is not installed; install it with: pip install 'sb3-ano[atari]'"


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=str)
def test_help_lists_the_commands(arguments, tmp_path):
    finished = run(ZOO_RUNNER, *arguments, cwd=tmp_path)
    assert finished.returncode == 0
    assert all(f"\n  {command} " in finished.stdout for command in COMMANDS)


# What the zoo itself says of each, and what this package adds.
HELP = {
    "train": ("--n-timesteps", "--resume"),
    "enjoy": ("--reward-log", "--trust-remote-code"),
    "record_video": ("--load-checkpoint", "--trust-remote-code"),
    "record_training": ("--gif", "--trust-remote-code"),
    "benchmark": ("--benchmark-dir", "--trust-remote-code"),
    "plot_train": ("--episode-window", "--figure"),
    "all_plots": ("--print-n-trials", "--figure"),
    "plot_from_file": ("--rliable", "--figure"),
    "push_to_hub": ("--organization", "--trust-remote-code"),
    "load_from_hub": ("--force", "--trust-remote-code"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_a_command_has_the_zoos_options_and_ours(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zoo_runner.py"])
    assert cli.main([command, "--help"]) == 0
    zoos, ours = capsys.readouterr().out.split("added by sb3_ano:")
    assert HELP[command][0] in zoos
    assert HELP[command][1] in ours
    assert "papo" in zoos or "{a2c" not in zoos, "commands with a choice of algorithms know ours"


def test_a_missing_rl_zoo_is_one_line_that_names_the_extra(tmp_path):
    code = "import sys; sys.modules['rl_zoo3'] = None\nfrom sb3_ano.zoo.cli import main\nsys.exit(main(['train']))"
    finished = run(["-c", code], cwd=tmp_path)
    assert finished.returncode == 2
    assert finished.stderr.strip() == "error: rl_zoo3 is not installed; install it with: pip install 'sb3-ano[zoo]'"


def test_the_command_line_and_the_registration_name_the_same_algorithms():
    # The command line keeps names of its own, because the registration imports the zoo.
    assert set(OWN) == set(ALGORITHMS)
    assert {algorithm.__name__.lower() for algorithm in ALGORITHMS.values()} == set(ALGORITHMS)
