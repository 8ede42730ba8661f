"""Learning what needs masks or memory."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from sb3_contrib.common.envs import InvalidActionEnvDiscrete, InvalidActionEnvMultiDiscrete
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_with_masks
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, MaskableANO, RecurrentANO, RecurrentMaskableANO


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:batch_size=.* does not divide")
@pytest.mark.parametrize(
    ("cls", "policy", "env", "options"),
    [
        # sb3-contrib's test: without training the return is 7, without masks 43.
        (MaskableANO, "MlpPolicy", InvalidActionEnvDiscrete(dim=70, n_invalid_actions=55), {}),
        (MaskableANO, "MlpPolicy", InvalidActionEnvMultiDiscrete(dims=[10, 7], n_invalid_actions=12), {}),
        (
            RecurrentMaskableANO,
            "MlpLstmPolicy",
            InvalidActionEnvDiscrete(dim=20, n_invalid_actions=10),
            {"n_steps": 512, "learning_rate": 3e-3, "policy_kwargs": {"lstm_hidden_size": 32}},
        ),
    ],
    ids=["Discrete", "MultiDiscrete", "LSTM"],
)
def test_masks_make_a_large_action_space_learnable(cls, policy, env, options):
    model = cls(policy, env, gamma=0.4, seed=32, **options).learn(3000)
    mean, _ = evaluate_with_masks(model, env, n_eval_episodes=10, warn=False)
    print(f"{cls.__name__}, {env.action_space}: {mean:.1f} of 100")
    assert mean > 90


def without_velocities(env: gym.Env) -> gym.Env:
    """Show CartPole's position and angle."""
    return TransformObservation(env, lambda observation: observation[[0, 2]], spaces.Box(-5.0, 5.0, (2,), np.float32))


@pytest.mark.slow
def test_lstm_policies_learn_what_needs_memory():
    settings = {
        **{"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gae_lambda": 0.9, "gamma": 0.98, "device": "cpu"},
        "learning_rate": LinearSchedule(2e-3, 0.0, 1.0),
    }
    lstm = {"policy_kwargs": {"lstm_hidden_size": 32, "net_arch": [32]}}

    def returns(cls, policy, **options) -> list[float]:
        results = []
        for seed in range(3):
            env = make_vec_env("CartPole-v1", 8, seed=seed, wrapper_class=without_velocities)
            model = cls(policy, env, seed=seed, **settings, **options).learn(200_000)
            results.append(evaluate_policy(model, env, 20, warn=False)[0])
            print(f"{cls.__name__} {options}, seed {seed}: {results[-1]:.0f}", flush=True)
        return sorted(results)

    recurrent, memoryless = returns(RecurrentANO, "MlpLstmPolicy", **lstm), returns(ANO, "MlpPolicy")
    # To compare with: RecurrentPPO to rounding, as test_contrib.py shows, in a fraction of its time.
    returns(RecurrentANO, "MlpLstmPolicy", shaping="ppo", **lstm)
    assert recurrent[1] > 300.0
    assert memoryless[-1] < 150.0
