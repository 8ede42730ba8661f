"""``train --cluster``: runs on clusters of several nodes, that lose nodes, are interrupted, and resumed."""

import json
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano import ANO
from tests.zoo.conftest import rejected, run, start_command

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
EXPECTED = "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:batch_size=.* does not divide"
pytestmark = pytest.mark.filterwarnings(*EXPECTED)
CARTPOLE, RUN = "--algo ano --env CartPole-v1 --eval-freq -1", Path("logs/ano/CartPole-v1_1")


@pytest.fixture
def cluster():
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    yield cluster
    cluster.shutdown()


def start(directory, options):
    directory.mkdir(exist_ok=True)
    return start_command(f"train {CARTPOLE} {options}", directory)


def finish(process):
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    return output


def wait_for_checkpoint(directory, process):
    while not (directory / RUN / "checkpoints" / "rllib").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)


def episodes(directory):
    return pd.read_csv(directory / RUN / "cluster.monitor.csv", skiprows=1)[["r", "l"]]


def mean_return(directory):
    agent = ANO.load(directory / RUN / "CartPole-v1.zip", env="CartPole-v1")
    return agent.num_timesteps, evaluate_policy(agent, agent.get_env(), n_eval_episodes=20)[0]


@pytest.mark.slow
def test_cartpole_is_solved_on_three_nodes_also_if_one_is_lost(cluster, tmp_path):
    returns = []
    for seed in range(5):
        directory = tmp_path / str(seed)
        options = f"--cluster {cluster.address} --env-runners 2 --learners 2 -n 120000 --checkpoint-freq 4000 --seed {seed}"
        process = start(directory, options)
        if seed == 0:
            wait_for_checkpoint(directory, process)
            cluster.remove_node(cluster.nodes[0], allow_graceful=False)
            cluster.add_node(num_cpus=1)
        output = finish(process)
        steps, mean = mean_return(directory)
        assert 120_000 <= steps < 121_000, output
        # The log has every step of the agent once, except for episodes that had not ended.
        assert 0.9 * steps < episodes(directory)["l"].sum() <= steps
        assert not (directory / RUN / "checkpoints").exists()
        returns.append(mean)
    assert sum(mean >= 450.0 for mean in returns) >= 4, returns


@pytest.mark.slow
def test_interrupted_trainings_are_saved_and_resumed(tmp_path, request):
    process = start(tmp_path, "--cluster --env-runners 1 -n 30000 --checkpoint-freq 2000")
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGINT)
    assert "--resume continues it" in finish(process)
    steps, _ = mean_return(tmp_path)
    assert 2000 <= steps < 30_000
    before = episodes(tmp_path)
    process = start(tmp_path, "--resume")
    time.sleep(20)
    process.kill()  # between checkpoints or not
    process.wait()
    another = request.getfixturevalue("cluster").address
    output = finish(start(tmp_path, f"--resume --cluster {another} --env-runners 2"))
    assert "Resuming" in output
    assert mean_return(tmp_path)[0] >= 30_000
    after = episodes(tmp_path)
    pd.testing.assert_frame_equal(after[: len(before)], before)
    assert 0.9 * 30_000 < after["l"].sum() <= 30_500
    run(f"plot_train -a ano -e CartPole-v1 -f {tmp_path}/logs --figure {tmp_path}/x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


SLOW = """
import gymnasium as gym, time

class Slow(gym.Wrapper):
    def step(self, action):
        time.sleep(4.2)
        return self.env.step(action)

gym.register("Slow-v0", lambda **options: Slow(gym.make("CartPole-v1", **options)))
"""


@pytest.mark.slow
def test_slow_environments_of_another_package_train_separate_networks_without_a_limit_of_the_gradient(tmp_path, monkeypatch):
    """A rollout takes longer than RLlib waits by default, and the minibatch is larger than the rollout."""
    (tmp_path / "slow_envs.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = "--algo ano --env Slow-v0 --gym-packages slow_envs --eval-freq -1 --cluster --env-runners 1 -n 16"
    settings = "-params n_steps:16 n_envs:1 batch_size:64 max_grad_norm:float('inf')"
    finish(start_command(f"train {options} {settings}", tmp_path))
    networks = ANO.load(tmp_path / "logs/ano/Slow-v0_1/Slow-v0.zip").policy.mlp_extractor
    biases = [layer.bias.detach() for network in (networks.policy_net, networks.value_net) for layer in network[::2]]
    assert all(bias.isfinite().all() and bias.abs().min() > 0 for bias in biases), "biases start at 0"
    assert all((actor != critic).any() for actor, critic in zip(biases[:2], biases[2:], strict=True))


def test_a_loss_before_the_first_checkpoint_starts_again(zoo, monkeypatch):
    def train(self, *_, resume):
        losses.append(resume)
        raise ray.exceptions.RayActorError

    losses = []
    monkeypatch.setattr("sb3_ano.zoo.cluster.ClusterManager._train", train)
    finished = run(f"train {CARTPOLE} --cluster --env-runners 1 -n 64", status=2)
    assert losses == [False] + 9 * [True]
    assert "starting again without one" in finished.output
    assert "error: the cluster lost processes 10 times" in finished.errors


class Bytes(gym.ObservationWrapper):
    """Observe bytes, which RLlib's networks do not take."""

    observation_space = gym.spaces.Box(0, 255, (4,), np.uint8)

    def observation(self, observation):
        return np.zeros(4, np.uint8)


class Broken(gym.Wrapper):
    """Fails when it is used."""

    def step(self, action):
        raise ValueError("the sensor is broken")


INVALID = [
    ("--cluster ray://h:1", "--cluster ray://h:1 is not allowed"),
    ("--cluster 127.0.0.1:1", "no Ray cluster was found"),
    ("--cluster --env-runners -1", "--env-runners and --learners are integers from 0, and need --cluster"),
    ("--algo papo --cluster", "--cluster trains ano only"),
    ("--cluster -params \"policy_kwargs:{'net_arch': {'pi': [8], 'vf': [4]}}\"", "cannot express net_arch"),
    ("--cluster --env Pendulum-v1", "cannot express use_sde"),
    ("--cluster --env FrozenLake-v1", "cannot express observation space Discrete(16)"),
    ("--cluster -params \"env_wrapper:'tests.zoo.test_cluster.Bytes'\"", "cannot express observation space Box(0, 255"),
    ("--cluster -params \"env_wrapper:'tests.zoo.test_cluster.Broken'\"", "error: the sensor is broken"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_invalid_options_are_one_line(options, message, zoo):
    assert message in rejected(f"train {CARTPOLE} {options}")
    assert not ray.is_initialized()
    assert "cannot express" not in message or not Path("logs").exists(), "a run that cannot start leaves nothing"


def test_statistics_of_another_agent_are_not_lost(zoo):
    run(f"train {CARTPOLE} -n 64 -params n_envs:1 normalize:True")
    again = "-i logs/ano/CartPole-v1_1/CartPole-v1.zip --cluster -params normalize:True"
    message = "cannot express -i with normalized observations; train further without --cluster"
    assert message in rejected(f"train {CARTPOLE} {again}")
    # What --resume advises for a run on a cluster, and this message, work.
    record = Path("logs/ano/CartPole-v1_1/CartPole-v1/run.json")
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "arguments": [*content["arguments"], "--cluster"]}))
    advice = "start a new run with -i, without --cluster if observations are normalized"
    assert advice in rejected(f"train {CARTPOLE} -n 128 --cluster --resume")
    run(f"train {CARTPOLE} -n 64 {again.replace('--cluster', '')}")
