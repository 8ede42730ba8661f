"""What the tests of the safe format do with agents."""

import json

import numpy as np
import torch
from gymnasium import spaces

from sb3_ano import ANO
from tests.common import SMALL


def trained(cls=ANO, env="CartPole-v1", policy="MlpPolicy", steps=64, **options):
    return cls(policy, env, **SMALL, **options).learn(steps)


def document(folder):
    return json.loads((folder / "sb3_ano.json").read_text())


def rewrite(folder, change):
    content = document(folder)
    content.pop("checksum", None)
    change(content)
    (folder / "sb3_ano.json").write_text(json.dumps(content))


def acts_like(loaded, model):
    samples = [model.observation_space.sample() for _ in range(200)]
    if isinstance(model.observation_space, spaces.Dict):
        observations = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    else:
        observations = np.stack(samples)
    actions = []
    for each in (model, loaded):
        torch.manual_seed(0)
        if each.use_sde:
            each.policy.reset_noise()
        actions.append([each.predict(observations, deterministic=deterministic)[0] for deterministic in (True, False)])
    return all(np.array_equal(one, other) for one, other in zip(*actions, strict=True))
