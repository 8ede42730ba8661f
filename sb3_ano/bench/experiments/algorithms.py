"""The algorithms of the experiments by their labels, and their arguments."""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_ano.algorithms import ANO, PAPO, SPO
from sb3_ano.extras import missing_extra
from sb3_ano.shaping import resolve

try:
    from sb3_contrib import TRPO
except ImportError as error:
    raise missing_extra("bench", error.name or "sb3-contrib") from error

Value = int | float | bool | str | None

NAMES = ("ppo", "trpo", "spo", "papo", "ano")
_CLASSES: dict[str, type[OnPolicyAlgorithm]] = {"ppo": PPO, "trpo": TRPO, "spo": SPO, "papo": PAPO, "ano": ANO}
#: What a run's name always tells: learning rate, and the size of the trust region in the algorithm's own terms.
_SETTINGS = {
    "ppo": ("clip_range", "learning_rate"),
    "trpo": ("learning_rate", "target_kl"),
    "spo": ("clip_range", "learning_rate"),
    "papo": ("clip_range", "learning_rate", "omega"),
    "ano": ("clip_range", "learning_rate"),
}
# Names of the papers that stand for arguments. PAPO's omega is both of its weights, as in the paper's search.
_SYNONYMS = {"trpo": {"delta": "target_kl"}}
_SEVERAL = {"papo": {"omega": ("omega1", "omega2")}}
#: What a suite tells about environments and policy, beside the arguments of the algorithm.
ENVIRONMENT_KEYS = frozenset({"policy", "n_envs", "normalize"})
# What a run sets itself.
_RESERVED = frozenset(
    {"self", "policy", "env", "seed", "device", "verbose", "tensorboard_log", "shaping", "_init_setup_model"}
)
_SCHEDULED = "lin_"


@dataclass(frozen=True)
class Algorithm:
    """One of the algorithms that are compared.

    :param label: ``"ppo"``, ``"trpo"``, ``"spo"``, ``"papo"``, ``"ano"`` or ``"ano:shaping=NAME"``
    :param name: the label without a shaping function
    :param shaping: name of ANO's shaping function, or None
    """

    label: str
    name: str
    shaping: str | None = None

    @property
    def constructor(self) -> type[OnPolicyAlgorithm]:
        """The class."""
        return _CLASSES[self.name]

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the hyperparameters that tell its runs apart."""
        return _SETTINGS[self.name]

    def canonical(self, name: str) -> str:
        """The hyperparameter that ``name`` stands for: TRPO's ``delta`` is ``target_kl``."""
        return _SYNONYMS.get(self.name, {}).get(name, name)

    @property
    def hyperparameters(self) -> frozenset[str]:
        """All hyperparameters that it takes, those of the environments included."""
        own = set(inspect.signature(self.constructor.__init__).parameters) - _RESERVED
        return frozenset(own | set(_SEVERAL.get(self.name, ())) | ENVIRONMENT_KEYS)

    def default(self, name: str) -> Any:
        """The constructor's default of a hyperparameter."""
        argument = _SEVERAL.get(self.name, {}).get(name, (name,))[0]
        return inspect.signature(self.constructor.__init__).parameters[argument].default

    def arguments(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor, without those of the environments.

        :param hyperparameters: of a run
        """
        several = _SEVERAL.get(self.name, {})
        found: dict[str, Any] = {}
        for name, value in hyperparameters.items():
            if name not in ENVIRONMENT_KEYS:
                found |= dict.fromkeys(several.get(name, (name,)), value)
        if self.shaping is not None:
            found["shaping"] = self.shaping
        return found


def algorithm(label: str) -> Algorithm:
    """The algorithm with a label.

    :param label: one of ``NAMES``, or ``"ano:shaping=NAME"``
    :raises ValueError: if there is none
    """
    name, separator, rest = label.partition(":")
    if not separator and name in _CLASSES:
        return Algorithm(label, name)
    key, _, shaping = rest.partition("=")
    if name == "ano" and key == "shaping" and shaping:
        resolve(shaping)
        return Algorithm(label, name, shaping)
    near = difflib.get_close_matches(label, NAMES, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown algorithm {label!r}{hint} (algorithms are {', '.join(NAMES)}, ano:shaping=NAME)")


def number(value: Any) -> float | None:
    """The number in a setting, where ``"lin_3e-4"`` counts from 3e-4 down to 0; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.removeprefix(_SCHEDULED)) if isinstance(value, str) else value
    except ValueError:
        return None


def is_linear(value: Any) -> bool:
    """Whether a setting is a linear schedule, such as ``"lin_3e-4"``."""
    return isinstance(value, str) and value.startswith(_SCHEDULED) and number(value) is not None


def replaced(value: Any, new: Value) -> Any:
    """``new`` in the place of ``value``, whose schedule it keeps: 1e-3 for ``"lin_3e-4"`` is ``"lin_0.001"``."""
    if is_linear(value) and isinstance(new, int | float) and not isinstance(new, bool):
        return f"{_SCHEDULED}{new!r}"
    return new
