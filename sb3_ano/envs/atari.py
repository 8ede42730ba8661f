"""What an Atari id means, and the protocol under which all backends play it."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# The first alternative means what gymnasium means by it, sticky actions; so does version 0 of the second.
_NAMESPACED = re.compile(r"ALE/(?P<game>\w+)-v5")
_NO_FRAMESKIP = re.compile(r"(?P<game>\w+)NoFrameskip-v(?P<version>[04])")
_PLAIN = re.compile(r"(?P<game>\w+)-v5")
_STICKY = 0.25


@dataclasses.dataclass(frozen=True)
class AtariProtocol:
    """How a game is played and shown; the same on every backend.

    :param game: its name as in ids, for example ``SpaceInvaders``
    :param repeat_action_probability: probability with which the emulator repeats the last action (sticky actions)
    :param episodic_life: end the learner's episode at each lost life; the game goes on
    :param clip_reward: reward the learner with the sign of the score's change
    :param noop_max: a game starts with up to so many frames without action
    :param frame_skip: frames an action lasts
    :param frame_stack: observations that are stacked, newest last
    :param screen_size: height and width of an observation, in pixels
    :param full_action_space: all 18 actions, instead of those that the game knows
    :param max_frames: frames after which a game is truncated
    :raises ValueError: for a number that is not allowed; the emulators' libraries do not check them all
    """

    game: str
    repeat_action_probability: float = 0.0
    episodic_life: bool = True
    clip_reward: bool = True
    noop_max: int = 30
    frame_skip: int = 4
    frame_stack: int = 4
    screen_size: int = 84
    full_action_space: bool = False
    max_frames: int = 108_000

    def __post_init__(self) -> None:
        for name, least in {"noop_max": 0, "frame_skip": 1, "frame_stack": 1, "screen_size": 1, "max_frames": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}={value!r} is not allowed; allowed are whole numbers from {least}")
        if not 0.0 <= self.repeat_action_probability <= 1.0:
            raise ValueError(
                f"repeat_action_probability={self.repeat_action_probability!r} is not allowed; allowed are numbers from 0 to 1"
            )

    @property
    def observation_space(self) -> spaces.Box:
        """Grey pictures, channels first: ``(frame_stack, screen_size, screen_size)``, uint8."""
        return spaces.Box(0, 255, (self.frame_stack, self.screen_size, self.screen_size), np.uint8)

    def changed(self, env_kwargs: Mapping[str, Any]) -> tuple["AtariProtocol", dict[str, Any]]:
        """This protocol with the settings in ``env_kwargs``, and what of them is no setting of a protocol."""
        own = {field.name for field in dataclasses.fields(self)} - {"game"}
        settings = {key: value for key, value in env_kwargs.items() if key in own}
        return dataclasses.replace(self, **settings), {key: env_kwargs[key] for key in env_kwargs if key not in own}


def atari_protocol(env_id: str) -> AtariProtocol | None:
    """The protocol that an id names, without a look whether there is such a game; None if it names none.

    ``NAME-v5`` and ``NAMENoFrameskip-v4`` play without sticky actions, ``ALE/NAME-v5`` and ``NAMENoFrameskip-v0`` with, as
    gymnasium's ids say. ``NAME-v5`` is EnvPool's form; where gymnasium knows such an id, it is no Atari game.
    """
    if match := _NAMESPACED.fullmatch(env_id):
        return AtariProtocol(match["game"], _STICKY)
    if match := _NO_FRAMESKIP.fullmatch(env_id):
        return AtariProtocol(match["game"], _STICKY if match["version"] == "0" else 0.0)
    if (match := _PLAIN.fullmatch(env_id)) and env_id not in gym.registry:
        return AtariProtocol(match["game"])
    return None
