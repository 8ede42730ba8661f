"""Make, change and compare agents for the tests of the Hub; define custom parts as users do."""

import contextlib
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector.utils import batch_space
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ano import ANO
from tests.common import SMALL

#: Options of a push that takes a moment.
QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


class CustomPolicy(ActorCriticPolicy):
    """A policy that others have to import, with an argument that takes anything."""

    def __init__(self, *arguments, anything=None, **options):
        super().__init__(*arguments, **options)
        self.anything = anything


class Reversed(gym.ObservationWrapper):
    """Turns observations around."""

    def observation(self, observation):
        return observation[::-1].copy()


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def trained(cls=ANO, env="CartPole-v1", policy="MlpPolicy", steps=64, **options):
    model = cls(policy, env, **{**SMALL, **options})
    return model.learn(steps) if steps else model


def document(folder):
    """The JSON without its checksum, which whoever rewrites it leaves out."""
    content = json.loads((folder / "sb3_ano.json").read_text())
    content.pop("checksum", None)
    return content


def write_document(folder, content):
    (folder / "sb3_ano.json").write_text(json.dumps(content))


#: In the place of a value: the key is removed.
MISSING = object()


def rewrite(folder, changes):
    """Set values in the JSON by their places, such as ``arguments/gamma`` or ``("arguments", "gamma")``."""
    content = document(folder)
    for place, value in changes.items():
        owner, (*parents, last) = content, place.split("/") if isinstance(place, str) else place
        for parent in parents:
            owner = owner[int(parent) if parent.isdigit() else parent]
        last = int(last) if last.isdigit() else last
        if value is MISSING:
            del owner[last]
        else:
            owner[last] = value
    write_document(folder, content)


def answers(model, observations):
    """Actions, values and log-probabilities of an agent, with random numbers that depend on nothing else."""
    torch.manual_seed(0)
    if model.use_sde:
        model.policy.reset_noise()
    with torch.no_grad():
        return [answer.numpy() for answer in model.policy(model.policy.obs_to_tensor(observations)[0])]


def acts_like(loaded, model, n=200):
    """Tell whether two agents answer the same, sampled actions included."""
    observations = batch_space(model.observation_space, n).sample()
    return all(map(np.array_equal, answers(loaded, observations), answers(model, observations)))


def is_one_line(message):
    """Tell whether a message is short, and holds nothing that a terminal obeys."""
    return message.isprintable() and len(message) < 1000


@contextlib.contextmanager
def one_line(kind, pattern):
    """Expect an error of one line, without the chain of other libraries' errors."""
    with pytest.raises(kind, match=pattern) as caught:
        yield
    assert is_one_line(str(caught.value))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
