"""The shipped hyperparameters learn what they are for."""

import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano._registry import ALGORITHMS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algo", ["ano", "spo"])
@pytest.mark.parametrize(
    ("env_id", "steps", "episodes", "least"), [("CartPole-v1", 60_000, 100, 475), ("Pendulum-v1", 100_000, 20, -250)]
)
def test_classic_control_is_learned(env_id, steps, episodes, least, algo, seed, zoo, tmp_path):
    zoo(f"train --algo {algo} --env {env_id} -n {steps} --seed {seed} --eval-freq -1 --verbose 0")
    model = ALGORITHMS[algo].algorithm.load(tmp_path / "logs" / algo / f"{env_id}_1" / f"{env_id}.zip")
    mean, _ = evaluate_policy(model, make_vec_env(env_id, seed=1000 + seed), n_eval_episodes=episodes, deterministic=True)
    assert mean >= least
