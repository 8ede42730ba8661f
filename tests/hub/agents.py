"""Make, change and compare agents for the tests of the Hub; define custom parts as users do."""

import contextlib
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
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
        put(content, place, value)
    write_document(folder, content)


def put(content, place, value):
    *parents, last = [int(key) if key.isdigit() else key for key in (place.split("/") if isinstance(place, str) else place)]
    for parent in parents:
        content = content[parent]
    if value is MISSING:
        del content[last]
    else:
        content[last] = value


def stack(observations):
    """Batch observations, of a Dict space as of any other."""
    if isinstance(observations[0], dict):
        return {key: np.stack([each[key] for each in observations]) for key in observations[0]}
    return np.stack(observations)


def acts_like(loaded, model, n=200):
    """Tell whether two agents take the same actions, sampled ones included."""
    observations = stack([model.observation_space.sample() for _ in range(n)])
    actions = []
    for agent in (model, loaded):
        torch.manual_seed(0)
        if agent.use_sde:
            agent.policy.reset_noise()
        actions.append([agent.predict(observations, deterministic=deterministic)[0] for deterministic in (True, False)])
    return all(np.array_equal(one, other) for one, other in zip(*actions, strict=True))


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
