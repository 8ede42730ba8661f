"""Log to TensorBoard, and read the log: ``python examples/tensorboard_log.py OUT.png``."""

import tempfile

from common import plot
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env

if __name__ == "__main__":
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        for shape in ("ano", "ppo", "spo"):
            model = ANO("MlpPolicy", make_vec_env("Pendulum-v1", n_envs=4), n_steps=256, gamma=0.9, shaping=shape, seed=0)
            model.set_logger(configure(f"{directory}/{shape}", ["tensorboard"]))  # tensorboard --logdir DIRECTORY
            model.learn(30_000)
            log = EventAccumulator(f"{directory}/{shape}").Reload()
            curves[shape] = [(event.step, event.value) for event in log.Scalars("train/ratio_max")]
    plot(curves, "Pendulum-v1: the trust region, by shape", "largest ratio of an update")
