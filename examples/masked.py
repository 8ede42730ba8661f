"""Train with masks of invalid actions: ``python examples/masked.py OUT.png``."""

from common import Returns, plot
from sb3_contrib.common.envs import InvalidActionEnvDiscrete

from sb3_ano import MaskableANO
from sb3_ano.envs import make_vec_env

if __name__ == "__main__":
    curves = {}
    for use_masking in (True, False):
        env = make_vec_env(lambda: InvalidActionEnvDiscrete(dim=80, n_invalid_actions=60), n_envs=4, seed=0)
        model = MaskableANO("MlpPolicy", env, n_steps=64, learning_rate=1e-3, gamma=0.4, seed=0)
        returns = Returns()
        model.learn(12_000, callback=returns, use_masking=use_masking)
        curves["with masks" if use_masking else "without"] = returns.points
    plot(curves, "InvalidActionEnvDiscrete, 60 of 80 actions invalid", "return of the last 100 episodes")
