"""Use the surrogate in a PyTorch loop without Stable-Baselines3: ``python examples/surrogate.py OUT.png``."""

import torch
from common import plot

from sb3_ano.shaping import surrogate

MEANS = torch.linspace(-1.0, 1.0, 10)  # of the rewards of ten slot machines


def train(shape: str) -> list[tuple[int, float]]:
    """Train a softmax policy, and return its largest ratio after each update."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    largest = []
    for update in range(60):
        old = logits.log_softmax(0).detach()
        actions = torch.multinomial(old.exp(), 256, replacement=True, generator=generator)
        rewards = MEANS[actions] + torch.randn(256, generator=generator)
        advantages = (rewards - rewards.mean()) / rewards.std()
        for _ in range(10):
            log_ratio = (logits.log_softmax(0) - old)[actions]
            loss = -surrogate(log_ratio, advantages, shape, eps_low=0.2, eps_high=0.2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        largest.append((update, (logits.log_softmax(0) - old).exp().max().item()))
    return largest


if __name__ == "__main__":
    curves = {shape: train(shape) for shape in ("ano", "ppo", "spo")}
    plot(curves, "Ten slot machines, radius 0.2", "largest ratio after an update", "update")
