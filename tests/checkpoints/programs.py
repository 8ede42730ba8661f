"""Programs that are interrupted, for the tests of checkpoints."""

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.envs import make_vec_env

TOTAL = 320
EVERY = 64
SHORT = {"n_steps": 32, "seed": 3, "device": "cpu"}
PPO_SHORT = {**SHORT, "batch_size": 32, "n_epochs": 2}
ANO_SHORT = {**PPO_SHORT, "torch_compile": False}


class Interrupted(BaseException):
    """Caught by nobody, like a signal."""


class Interrupt(BaseCallback):
    """End the process, as far as the training is concerned, in the middle of a rollout."""

    at: int  # of the class, because attributes would be restored

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.at:
            raise Interrupted
        return True


def interrupt(at: int) -> Interrupt:
    return type("Interrupt", (Interrupt,), {"at": at})()


def cart_pole(n_envs: int = 1, seed: int = 3) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, backend="gymnasium", seed=seed)
