"""Normalize, interrupt a training, and resume it: ``python examples/normalize_and_resume.py OUT.png``."""

import tempfile

import torch
from common import Returns, plot
from stable_baselines3.common.callbacks import CallbackList, StopTrainingOnMaxEpisodes

from sb3_ano import ANO
from sb3_ano.checkpoints import TrainingCheckpoints
from sb3_ano.envs import VecNormalize, make_vec_env

STEPS = 40_000


def build() -> ANO:
    """Model and environments, the same at each start of the program."""
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=4), gamma=0.9)
    return ANO("MlpPolicy", env, n_steps=256, gamma=0.9, learning_rate=1e-3, seed=0)


if __name__ == "__main__":
    whole, first, second = Returns(), Returns(), Returns()
    expected = build().learn(STEPS, callback=whole)
    with tempfile.TemporaryDirectory() as directory:
        # The first training is stopped after 80 episodes, 20 per environment; the second one resumes from its last checkpoint.
        stop = StopTrainingOnMaxEpisodes(20)
        build().learn(STEPS, callback=CallbackList([TrainingCheckpoints(directory, every=4096), first, stop]))
        resumed = build()
        resumed.learn(STEPS, callback=[TrainingCheckpoints(directory, every=4096, resume=True), second])
    pairs = zip(expected.policy.parameters(), resumed.policy.parameters(), strict=True)
    print("Equal to the bit:", all(torch.equal(one, other) for one, other in pairs))
    rest = second.points[len(first.points) - 1 :]  # the callback has its points of the first training back, too
    curves = {"uninterrupted": whole.points, "interrupted": first.points, "resumed": rest}
    plot(curves, "Pendulum-v1, normalized", "return of the last 100 episodes", widths=(6, 2, 2))
