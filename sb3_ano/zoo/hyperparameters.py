"""The zoo-format hyperparameter files that come with the package."""

import difflib
import inspect
from collections.abc import Iterable
from pathlib import Path

from sb3_ano.algorithms import ShapedPolicyAlgorithm

# What the RL Zoo reads itself; everything else goes to the constructor of the algorithm.
_ZOO_KEYS = frozenset(
    {
        "callback",
        "env_kwargs",
        "env_wrapper",
        "frame_stack",
        "monitor_kwargs",
        "n_envs",
        "n_timesteps",
        "normalize",
        "vec_env_wrapper",
    }
)
# What the RL Zoo passes to the constructor beside the hyperparameters.
_RESERVED = frozenset({"self", "env", "seed", "verbose", "device", "tensorboard_log", "_init_setup_model"})


def hyperparameter_file(algo: str) -> Path:
    """The hyperparameter file of ``ano``, ``spo`` or ``papo``: inside an installed package, beside it in a source tree.

    :raises FileNotFoundError: if the installation is incomplete
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "hyperparams", package.parent / "hyperparams"):
        file = folder / f"{algo}.yml"
        if file.is_file():
            return file
    raise FileNotFoundError(f"no hyperparams/{algo}.yml comes with this installation of sb3_ano in {package}")


def require_known_keys(keys: Iterable[str], algorithm: type[ShapedPolicyAlgorithm], file: str) -> None:
    """Complain of a key that neither the zoo nor the algorithm knows.

    :param keys: of one environment's hyperparameters
    :param file: where they come from, for the message
    :raises ValueError: naming the unknown keys and those that are allowed
    """
    allowed = (set(inspect.signature(algorithm.__init__).parameters) - _RESERVED) | _ZOO_KEYS
    unknown = sorted(set(keys) - allowed)
    if unknown:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{file}: unknown key {', '.join(map(repr, unknown))} for {algorithm.__name__}{hint} "
            f"Allowed are {', '.join(sorted(allowed))}"
        )
