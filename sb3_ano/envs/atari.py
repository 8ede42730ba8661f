"""The meaning of Atari ids, and the protocol that all backends follow."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# Probability of sticky actions by the form of an id, as in gymnasium. The last form is EnvPool's.
_PLAIN = r"(\w+)-v5"
_STICKY = {r"ALE/(\w+)-v5": 0.25, r"(\w+)NoFrameskip-v0": 0.25, r"(\w+)NoFrameskip-v4": 0.0, _PLAIN: 0.0}
# What the emulators' libraries call the protocol's settings. Their limits of steps count differently.
_OTHER_NAMES = {
    "max_episode_steps": "max_frames",
    "max_num_frames_per_episode": "max_frames",
    "frameskip": "frame_skip",
    "img_height": "screen_size",
    "img_width": "screen_size",
    "stack_num": "frame_stack",
    "reward_clip": "clip_reward",
    "reward_clipping": "clip_reward",
}
# The least values of the numbers, which the emulators' libraries do not all check.
_LEAST = {"noop_max": 0, "frame_skip": 1, "frame_stack": 1, "screen_size": 1, "max_frames": 1}


@dataclasses.dataclass(frozen=True)
class AtariProtocol:
    """Settings of an Atari game that are the same for all backends.

    :param game: name of the game as in ids, for example ``SpaceInvaders``
    :param repeat_action_probability: probability with which the emulator repeats the last action (sticky actions)
    :param episodic_life: whether a lost life ends the learner's episode; the game continues
    :param clip_reward: whether rewards are clipped to their sign
    :param noop_max: maximum number of no-op frames at the start of a game
    :param frame_skip: number of frames per action
    :param frame_stack: number of stacked observations, newest last
    :param screen_size: height and width of an observation in pixels
    :param full_action_space: whether to use all 18 actions instead of those that the game knows
    :param max_frames: number of frames after which a game is truncated
    :raises ValueError: if a number is out of range
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
        for name, least in _LEAST.items():
            require_integer(name, getattr(self, name), least)

        # Also NaN is out of range.
        probability = self.repeat_action_probability
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"repeat_action_probability={probability!r} is not allowed; allowed are numbers from 0 to 1")

    @property
    def observation_space(self) -> spaces.Box:
        """The space of grayscale images, channels first: ``(frame_stack, screen_size, screen_size)``, uint8."""
        # SB3's CNN takes these bounds and this type for pixels, and divides them by 255.
        shape = (self.frame_stack, self.screen_size, self.screen_size)
        return spaces.Box(0, 255, shape, np.uint8)

    @property
    def emulator_settings(self) -> dict[str, float]:
        """The settings that EnvPool and ale-py call by the same names."""
        return {
            "repeat_action_probability": self.repeat_action_probability,
            "full_action_space": self.full_action_space,
            "noop_max": self.noop_max,
            "stack_num": self.frame_stack,
            "img_height": self.screen_size,
            "img_width": self.screen_size,
        }

    def changed(self, env_kwargs: Mapping[str, object]) -> tuple["AtariProtocol", dict[str, object]]:
        """Return this protocol with the settings in ``env_kwargs``, and the settings that are not part of a protocol.

        :raises TypeError: if a setting of the protocol has another library's name
        """
        # Another library's limit counts steps instead of frames, so that it is no synonym.
        for name in _OTHER_NAMES.keys() & env_kwargs.keys():
            raise TypeError(f"env_kwargs has {name!r}, which {self.game} does not know; its name is {_OTHER_NAMES[name]!r}")

        names = {field.name for field in dataclasses.fields(self)} - {"game"}
        settings: dict[str, Any] = {}
        others = {}
        for name, value in env_kwargs.items():
            if name in names:
                settings[name] = value
            else:
                others[name] = value

        # A new protocol, which checks the numbers.
        return dataclasses.replace(self, **settings), others


def atari_protocol(env_id: str) -> AtariProtocol | None:
    """Return the protocol that an id stands for, or None; whether the game exists is not checked.

    ``NAME-v5`` and ``NAMENoFrameskip-v4`` have no sticky actions, ``ALE/NAME-v5`` and ``NAMENoFrameskip-v0`` have them, as in
    gymnasium. ``NAME-v5`` is EnvPool's form; an id of this form that is registered in gymnasium is not an Atari game.
    """
    for form, probability in _STICKY.items():
        match = re.fullmatch(form, env_id)
        # Other tasks have such ids, too, for example Hopper-v5.
        is_gymnasiums = form == _PLAIN and env_id in gym.registry
        if match and not is_gymnasiums:
            return AtariProtocol(match[1], probability)

    return None


def require_integer(name: str, value: object, least: int = 1) -> None:
    """Reject a value that is not an integer of at least ``least``.

    :raises ValueError: naming the argument, the value and what is allowed
    """
    # bool is an int.
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < least:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is not allowed; allowed are integers from {least}")
