"""Name the environment, the observation or the parameter that NaN or Inf came from."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from sb3_ano.fast.act import NotFiniteError, Observations


def statistics_of(env: VecEnv) -> dict[str, object]:
    """Copy what VecNormalize has learned; empty without VecNormalize."""
    normalize = unwrap_vec_normalize(env)
    if normalize is None:
        return {}

    # Without norm_obs, there is no obs_rms.
    attributes = vars(normalize)
    learned = {}
    for name in attributes.keys() & {"obs_rms", "ret_rms", "returns"}:
        learned[name] = copy.deepcopy(attributes[name])
    return learned


class FiniteCheck:
    """Check a rollout for NaN and Inf at each step, before they reach the policy, and name the environment.

    VecNormalize spreads NaN over the statistics of all environments. The check looks at what VecNormalize received, and puts
    back the statistics of the beginning of the rollout.

    :param model: algorithm with ``check_finite``, ``num_timesteps``, and the observations that the rollout starts with
    :param env: training environment
    :param statistics: attributes of VecNormalize to put back; None takes the present ones
    :raises ValueError: if the first observation is NaN or Inf; the methods raise it for later observations and rewards
    """

    def __init__(
        self,
        model: Any,
        env: VecEnv,
        statistics: dict[str, object] | None = None,
    ) -> None:
        self._model = model
        self._n_envs = env.num_envs
        self._enabled = model.check_finite
        self._normalize = unwrap_vec_normalize(env)
        if statistics is None:
            statistics = statistics_of(env)
        self._statistics = statistics
        if not self._enabled:
            return

        # VecNormalize keeps what it received from its first step or reset on.
        if self._normalize is not None and hasattr(self._normalize, "old_obs"):
            self._reject("observation", self._normalize.old_obs)
        self._reject("observation", model._last_obs, for_policy=True)

    def step(self, actions: np.ndarray, observations: Observations, rewards: np.ndarray) -> None:
        """Check what the environments have just returned.

        :param actions: actions of the policy, which may be the reason
        """
        if not self._enabled:
            return

        # What VecNormalize received comes first, because it may turn NaN of one environment into NaN of all.
        if self._normalize is not None:
            self._require("observation", self._normalize.old_obs, actions)
            self._require("reward", self._normalize.old_reward, actions)

        # The exact check only if the quick one fails: a sum of squares may overflow although all numbers are finite.
        if not _has_finite_squares(observations):
            # NaN that a policy returns comes back from most environments, and is not theirs.
            self._reject_actions(actions)
            self._reject("observation", observations, for_policy=True)
        self._require("reward", rewards, actions)

    def explain(self, error: Exception) -> None:
        """Raise an error that names the reason, if the policy has failed because of NaN or Inf.

        :param error: error of the policy
        :raises ValueError: with the parameter or the observation
        """
        # Other errors are the policy's own.
        message = str(error)
        if not isinstance(error, NotFiniteError) and not any(part in message for part in _ERRORS_OF_DISTRIBUTIONS):
            return

        policy = self._model.policy
        failed = f"the policy returned NaN or Inf at {self._place()}"

        # First the parameters, because NaN in them makes every output NaN, whatever was observed.
        largest: tuple[float, str] = (0.0, "")
        for name, parameter in policy.named_parameters():
            size = 0.0
            if parameter.numel() > 0:
                size = parameter.detach().abs().max().item()
            if not math.isfinite(size):
                raise ValueError(f"{failed}; look at its parameters: policy.{name} has NaN or Inf") from error
            largest = max(largest, (size, name))

        for name, part in _parts("observation", self._model._last_obs):
            sizes = np.abs(np.asarray(part, dtype=np.float64))
            # NaN counts as largest.
            environment, *index = np.unravel_index(np.where(np.isnan(sizes), np.inf, sizes).argmax(), sizes.shape)
            value = np.asarray(part)[(environment, *index)]
            # Not abs(value) > _LARGE, which is False for NaN.
            if not abs(value) <= _LARGE:
                raise ValueError(
                    f"{failed}, because environment {environment} returned {value:.12g} in its {_indexed(name, index)}; "
                    "scale or clip observations, for instance with VecNormalize"
                ) from error

        # All numbers are finite: their products were not.
        size, name = largest
        raise ValueError(f"{failed}; look at its parameters: the largest is {size:.6g} in policy.{name}") from error

    def _require(self, what: str, values: Observations, actions: np.ndarray) -> None:
        if not _has_finite_squares(values):
            self._reject_actions(actions)
            self._reject(what, values)

    def _reject_actions(self, actions: np.ndarray) -> None:
        # The environments got these actions, and what they return then is not their fault.
        finite = np.isfinite(actions)
        if not finite.all():
            environment = int(np.argwhere(~finite)[0][0])
            raise ValueError(
                f"the policy returned NaN or Inf at {self._place()} for environment {environment}; look at its parameters"
            )

    def ends(self, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Check the last observations of episodes."""
        if not self._enabled:
            return

        # They never reach _last_obs, but the values of truncated episodes are bootstrapped from them.
        for index in np.flatnonzero(dones):
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                self._reject("terminal observation", terminal, int(index), for_policy=True)

    def _place(self) -> str:
        return f"step {self._model.num_timesteps // self._n_envs} of the training"

    def _reject(
        self,
        what: str,
        values: Observations,
        environment: int | None = None,
        for_policy: bool = False,
    ) -> None:
        """Raise if values are not finite.

        :param what: name of the values
        :param values: values with the environments along the first axis, or those of one environment
        :param environment: number of that environment
        :param for_policy: whether the policy reads them, in float32
        """
        for name, part in _parts(what, values):
            valid = np.isfinite(part)
            # A finite float64 may be Inf in the policy's float32.
            if for_policy and np.asarray(part).dtype == np.float64:
                valid &= np.abs(part) <= _MAX_FLOAT32
            if valid.all():
                continue

            where = tuple(np.argwhere(~valid)[0])
            value = np.asarray(part)[where]

            reason = ""
            if np.isfinite(value):
                reason = f", which is Inf in the policy's float32, whose largest number is {_MAX_FLOAT32:.2g}"

            # Was it finite before VecNormalize? Its statistics have seen it, and are put back.
            if self._normalize is not None:
                raw = None
                received = getattr(self._normalize, "old_obs", None)
                if what == "observation" and received is not None:
                    raw = dict(_parts(what, received)).get(name)
                if raw is not None and np.isfinite(raw[where]):
                    reason = f", of which VecNormalize made {value}"
                    value = raw[where]
                vars(self._normalize).update(self._statistics)

            # The environment is the first index of a batch.
            number: int | None = environment
            index: Sequence[int] = where
            if environment is None:
                number, *index = where
            raise ValueError(
                f"environment {number} returned {value:.12g} in its {_indexed(name, index)} at {self._place()}{reason} "
                "(environments count from 0, steps for each environment); observations and rewards must be finite, or "
                "check_finite=False leaves them to the policy"
            )


_MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Observations from which on a network may overflow.
_LARGE = 1e6
# Parts of the messages with which PyTorch's distributions reject NaN and Inf.
_ERRORS_OF_DISTRIBUTIONS = (
    "Expected parameter",
    "Expected p_in",
    "probability tensor contains",
    "invalid multinomial distribution",
)


def _parts(what: str, values: Observations) -> list[tuple[str, np.ndarray]]:
    """Return arrays with their names; those of a dictionary have their key in it."""
    if isinstance(values, dict):
        return [(f"{what} {key!r}", part) for key, part in values.items()]
    return [(what, values)]


def _indexed(name: str, index: Sequence[Any]) -> str:
    """Return the name of one number of an array, such as ``observation[1, 2]``."""
    # Discrete observations and rewards are single numbers.
    if len(index) == 0:
        return name
    return f"{name}[{', '.join(map(str, index))}]"


def _has_finite_squares(values: Observations) -> bool:
    """Tell in one pass that values are finite; False if one is not, or if their sum of squares overflows."""
    if isinstance(values, dict):
        return all(map(_has_finite_squares, values.values()))
    # NaN and Inf spread through the product, which takes one call. Integers and bytes have neither.
    values = np.asarray(values)
    return values.dtype.kind != "f" or math.isfinite(np.vdot(values, values))
