"""An algorithm is added in three places of a copy of the package, and then every command knows it."""

import shutil
import subprocess
import sys
import time

import pytest

from tests.common import ROOT, variables

MODULE = '''
from sb3_ano.algorithms.base import ShapedPolicyAlgorithm


class Toy(ShapedPolicyAlgorithm):
    """The policy gradient with the ratio, and nothing that bounds it."""

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        return -(log_ratio.exp() * advantages).mean()
'''
SETTINGS = "CartPole-v1: {n_timesteps: 512, policy: MlpPolicy, n_steps: 64, batch_size: 64, n_epochs: 2}\n"
TRAIN = "-m sb3_ano.zoo train --algo toy --env CartPole-v1 --seed 1 --eval-freq -1 --checkpoint-freq 64 --device cpu"
BENCH = "-m sb3_ano.bench run --suite classic --envs CartPole --algos toy --seeds 1 --steps 512 --jobs 1 --out experiments"
COMPARE = """
import torch
from sb3_ano._registry import ALGORITHMS
files = [f"{name}/logs/toy/CartPole-v1_1/CartPole-v1.zip" for name in ("whole", "killed")]
whole, resumed = map(ALGORITHMS["toy"].algorithm.load, files)
assert all(map(torch.equal, whole.policy.parameters(), resumed.policy.parameters()))
assert (type(whole).__module__, whole.num_timesteps, resumed.num_timesteps) == ("sb3_ano.algorithms.toy", 512, 512)
"""


@pytest.mark.slow
def test_an_algorithm_in_three_places_trains_saves_loads_resumes_and_is_benched(tmp_path):
    for name in ("sb3_ano", "hyperparams"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sb3_ano/algorithms/toy.py").write_text(MODULE)  # first place
    with (tmp_path / "sb3_ano/_registry.py").open("a") as registry:  # second place: an import and an entry
        registry.write('\nfrom sb3_ano.algorithms.toy import Toy\nALGORITHMS["toy"] = Entry(Toy)\n')
    (tmp_path / "hyperparams/toy.yml").write_text(SETTINGS)  # third place

    def start(directory: str, options: str, *code: str) -> subprocess.Popen[bytes]:
        (tmp_path / directory).mkdir(exist_ok=True)
        env = variables(PYTHONPATH=str(tmp_path))
        return subprocess.Popen([sys.executable, *options.split(), *code], cwd=tmp_path / directory, env=env)

    with start("killed", TRAIN) as killed:
        while killed.poll() is None and not list(tmp_path.glob("killed/logs/toy/*/checkpoints/checkpoint_256_steps.zip")):
            time.sleep(0.005)
        killed.kill()
    commands = ("whole", TRAIN), ("killed", f"{TRAIN} --resume"), (".", "-c", COMPARE), (".", BENCH)
    assert [start(*command).wait() for command in commands] == [0, 0, 0, 0]
    assert len(list(tmp_path.glob("experiments/runs/CartPole-v1__toy__*__seed0/run.json"))) == 1
