"""CartPole and a pendulum swing-up in PyTorch alone: any number of copies, on any device.

Both are patterns for an environment of one's own: ``begin`` starts all episodes, ``advance`` steps all environments and
begins the next episode of those that ended. Nothing in them waits for the device.
"""

import math

import numpy as np
import torch
from gymnasium import spaces

from sb3_ano.envs import TensorVecEnv
from sb3_ano.envs.tensor import TensorStep


class _Batch(TensorVecEnv):
    """Common parts: random numbers on the device, time limit, and the restart of environments that ended.

    :param num_envs: number of environments
    :param device: device of all tensors
    :param max_steps: steps after which an episode is truncated
    """

    def __init__(
        self, num_envs: int, observations: spaces.Box, actions: spaces.Space, device: torch.device | str, max_steps: int
    ) -> None:
        super().__init__(num_envs, observations, actions, device)
        self.max_steps = max_steps
        self.generator = torch.Generator(self.device)
        self.generator.seed()

    def begin(self, seed: int | None) -> torch.Tensor:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self.start()
        self.age = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        return self.observe(self.state)

    def finish(self, state: torch.Tensor, rewards: torch.Tensor, terminated: torch.Tensor) -> TensorStep:
        """Truncate old episodes, begin the next ones, and return the step."""
        self.age += 1
        truncated = self.age >= self.max_steps
        ended = terminated | truncated

        # A new state is drawn for every environment: to draw some, the host would have to know which.
        self.state = torch.where(ended[:, None], self.start(), state)
        self.age.masked_fill_(ended, 0)
        return TensorStep(self.observe(self.state), rewards, terminated, truncated, self.observe(state))

    def start(self) -> torch.Tensor:
        """Draw first states, ``(n_envs, n)``."""
        raise NotImplementedError

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """Return the observations of states."""
        raise NotImplementedError

    def uniform(self, columns: int, bound: float) -> torch.Tensor:
        """Draw numbers between ``-bound`` and ``bound``."""
        numbers = torch.rand(self.num_envs, columns, generator=self.generator, device=self.device)
        return (2.0 * numbers - 1.0) * bound


class TensorCartPole(_Batch):
    """Gymnasium's CartPole-v1: keep a pole upright by pushing a cart to the left or right."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", max_steps: int = 500) -> None:
        observations = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        super().__init__(num_envs, observations, spaces.Discrete(2), device, max_steps)

    def start(self) -> torch.Tensor:
        return self.uniform(4, 0.05)

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def advance(self, actions: torch.Tensor) -> TensorStep:
        x, x_speed, angle, speed = self.state.unbind(dim=1)
        force = 20.0 * actions - 10.0

        # Masses of cart and pole 1.0 and 0.1, half of the pole's length 0.5, and steps of 0.02 s, as in gymnasium.
        cosine = torch.cos(angle)
        sine = torch.sin(angle)
        pushed = (force + 0.05 * speed.square() * sine) / 1.1
        acceleration = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cosine.square() / 1.1))
        x_acceleration = pushed - 0.05 * acceleration * cosine / 1.1
        x = x + 0.02 * x_speed
        x_speed = x_speed + 0.02 * x_acceleration
        angle = angle + 0.02 * speed
        speed = speed + 0.02 * acceleration

        terminated = (x.abs() > 2.4) | (angle.abs() > 12.0 * math.pi / 180.0)
        return self.finish(torch.stack([x, x_speed, angle, speed], dim=1), torch.ones_like(x), terminated)


class TensorPendulum(_Batch):
    """Gymnasium's Pendulum-v1: swing a pendulum up, and hold it there."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", max_steps: int = 200) -> None:
        bound = np.array([1.0, 1.0, 8.0], dtype=np.float32)
        super().__init__(num_envs, spaces.Box(-bound, bound), spaces.Box(-2.0, 2.0, (1,), np.float32), device, max_steps)
        self._bounds = torch.tensor([math.pi, 1.0], device=self.device)

    def start(self) -> torch.Tensor:
        return self.uniform(2, 1.0) * self._bounds

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        angle, speed = state.unbind(dim=1)
        return torch.stack([torch.cos(angle), torch.sin(angle), speed], dim=1)

    def advance(self, actions: torch.Tensor) -> TensorStep:
        angle, speed = self.state.unbind(dim=1)
        torque = actions.flatten().clamp(-2.0, 2.0)
        normalized = torch.remainder(angle + math.pi, 2.0 * math.pi) - math.pi
        costs = normalized.square() + 0.1 * speed.square() + 0.001 * torque.square()

        # Mass, length and gravity 1, 1 and 10, and steps of 0.05 s, as in gymnasium.
        speed = (speed + 0.05 * (15.0 * torch.sin(angle) + 3.0 * torque)).clamp(-8.0, 8.0)
        angle = angle + 0.05 * speed
        terminated = torch.zeros_like(speed, dtype=torch.bool)
        return self.finish(torch.stack([angle, speed], dim=1), -costs, terminated)


if __name__ == "__main__":
    from sb3_ano import ANO

    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = TensorPendulum(1024, device)
    model = ANO(
        "MlpPolicy", env, n_steps=32, batch_size=8192, n_epochs=5, learning_rate=1e-3, gamma=0.95, device=device, verbose=1
    )
    model.learn(1_000_000)
