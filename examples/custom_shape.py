"""Train with a custom shape: ``python examples/custom_shape.py OUT.png``."""

import torch
from common import Returns, plot

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.shaping import ShapingLike, check


def bump(x: torch.Tensor) -> torch.Tensor:
    """Follow the advantage, peak at the edge of the region, and let go of outliers."""
    return torch.where(x > 0, x * torch.exp(-x.square() / 2), x)


if __name__ == "__main__":
    print(check(bump))
    shapes: dict[str, ShapingLike] = {"ano": "ano", "ppo": "ppo", "bump": bump}
    curves = {}
    for name, shape in shapes.items():
        env = make_vec_env("CartPole-v1", n_envs=8)
        model = ANO(
            "MlpPolicy",
            env,
            learning_rate=2e-3,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gamma=0.98,
            gae_lambda=0.8,
            seed=0,
            shaping=shape,
        )
        returns = Returns()
        model.learn(40_000, callback=returns)
        curves[name] = returns.points
    plot(curves, "CartPole-v1, one seed", "return of the last 100 episodes")
