"""``train --accelerate``: SB3's PPO and sb3-contrib's RecurrentPPO in less time, whose runs look like ordinary ones."""

import signal
from pathlib import Path

import numpy as np
import pytest
import rl_zoo3
import yaml
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO

from sb3_ano._io import write_json
from sb3_ano.fast import accelerate
from sb3_ano.zoo import manager
from tests.common import parameters
from tests.zoo.conftest import rejected

SHORT = "-n 256 --eval-freq 128 --eval-episodes 2 --seed 1 --device cpu -params n_envs:2 n_steps:32 batch_size:32"
# The zoo's settings for environments without an entry name a policy that RecurrentPPO does not have.
RECURRENT = '"policy:\'MlpLstmPolicy\'" policy_kwargs:"dict(lstm_hidden_size=8, net_arch=[8])"'
KINDS = [("ppo", PPO, ""), pytest.param("ppo_lstm", RecurrentPPO, RECURRENT, marks=pytest.mark.slow)]


@pytest.fixture
def accelerated(monkeypatch):
    """The classes of the models that are accelerated, before it."""
    models = []

    def recorded(model):
        models.append(type(model))
        return accelerate(model)

    monkeypatch.setattr(manager, "accelerate", recorded)
    return models


@pytest.mark.parametrize(("algo", "algorithm", "params"), KINDS)
def test_an_accelerated_run_is_an_ordinary_one_for_all_commands(algo, algorithm, params, zoo, accelerated):
    env = "CartPole-v1"
    which = f"--algo {algo} --env {env}"
    for option in ("", "--accelerate"):
        output = zoo(f"train {which} {SHORT} {params} {option}").output
        assert f"rl_zoo3/hyperparams/{algo}.yml" in output
        assert len(accelerated) == (option != "")
    assert accelerated[0] is algorithm

    files = []
    loaded = []
    configs = []
    for number in (1, 2):
        run = Path("logs", algo, f"{env}_{number}")
        files.append(sorted(str(path.relative_to(run)) for path in run.rglob("*")))
        loaded.append(algorithm.load(run / f"{env}.zip"))
        configs.append((run / env / "config.yml").read_text())
    assert files[0] == files[1]
    assert configs[0] == configs[1]
    args = yaml.unsafe_load((run / env / "args.yml").read_text())
    assert (args["algo"], args["accelerate"]) == (algo, True)
    np.testing.assert_allclose(parameters(loaded[0]), parameters(loaded[1]), rtol=0, atol=1e-4)
    assert "Mean reward" in zoo(f"enjoy {which} --no-render -n 300").output
    assert "Loading pretrained agent" in zoo(f"train {which} --accelerate {SHORT} {params} -i {run}/{env}.zip").output
    assert len(accelerated) == 2


@pytest.mark.parametrize("option", ["", "--accelerate"])
def test_a_resumed_run_is_accelerated_as_it_was_or_as_the_user_wants(option, zoo, accelerated):
    which = "--algo ppo --env CartPole-v1"
    arguments = f"{which} {SHORT}".split()
    if not option:
        arguments.append("--accelerate")
    run = Path("logs/ppo/CartPole-v1_1/CartPole-v1")
    write_json(run / "run.json", {"arguments": arguments, "seed": 1, "checkpoint_freq": None, "finished": False})
    parts = {"policy": "MlpPolicy", "n_timesteps": 256, "n_envs": 2, "n_steps": 32, "batch_size": 32}
    (run / "config.yml").write_text(yaml.dump(parts))
    assert "Resuming logs/ppo/CartPole-v1_1" in zoo(f"train {which} --resume {option}").output
    assert len(accelerated) == 1
    assert (run.parent / "CartPole-v1.zip").is_file()


@pytest.mark.slow
def test_a_killed_accelerated_run_resumes_as_if_it_had_not_been(run_until, tmp_path):
    command = f"train --algo ppo --accelerate --checkpoint-freq 64 {SHORT.replace('-n 256', '-n 512')}"
    whole = run_until(command, tmp_path / "whole", None)
    killed = run_until(command, tmp_path / "killed", "logs/*/*/checkpoints/checkpoint_256_steps.zip")
    resumed = run_until("train --algo ppo --resume", tmp_path / "killed", None)
    assert (whole.status, killed.status, resumed.status) == (0, -signal.SIGKILL, 0), resumed.output
    assert "TrainingCheckpoints: resumes from" in resumed.output
    agents = [PPO.load(tmp_path / name / "logs/ppo/CartPole-v1_1/CartPole-v1.zip") for name in ("whole", "killed")]
    np.testing.assert_array_equal(*map(parameters, agents))


@pytest.mark.slow
@pytest.mark.usefixtures("small_rollouts")
def test_trials_of_a_search_are_accelerated(zoo, accelerated):
    zoo(
        "train --algo ppo --accelerate -optimize --n-trials 2 --n-evaluations 1 --no-optim-plots --seed 1 -n 256 "
        "--eval-episodes 1 --device cpu --sampler random"
    )
    assert len(accelerated) == 2
    assert set(accelerated) == {PPO}
    assert rl_zoo3.ALGOS["ppo"] is PPO


def test_algorithms_of_this_package_take_the_option_and_accelerate_themselves(zoo, accelerated):
    zoo(f"train --algo ano {SHORT} --accelerate")
    assert accelerated == []


@pytest.mark.parametrize("algo", ["a2c", "sac", "trpo"])
def test_other_algorithms_cannot_be_accelerated(algo, zoo):
    line = rejected(f"train --algo {algo} --accelerate")
    assert f"--accelerate cannot accelerate {algo}; allowed are ppo and ppo_lstm; spo, papo, ano" in line
    assert list(Path().iterdir()) == []
