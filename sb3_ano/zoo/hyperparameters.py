"""The zoo-format hyperparameter files that come with the package."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import BACKENDS
from sb3_ano.extras import missing_extra

try:
    import yaml
except ImportError as error:
    raise missing_extra("zoo", "pyyaml") from error

# What the RL Zoo reads itself; everything else goes to the constructor of the algorithm.
_ZOO_KEYS = frozenset(
    {
        "backend",
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


def check_file(file: str) -> None:
    """Complain of a YAML file that is not in the zoo's format: a mapping from environments to mappings.

    :raises ValueError: naming the file and what is wrong in it
    """
    if not file.endswith((".yml", ".yaml")):
        return
    try:
        content = yaml.safe_load(Path(file).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no mapping from environments to hyperparameters")
    for env_id, settings in content.items():
        if not isinstance(settings, dict):
            raise ValueError(f"{file}: {env_id} holds {settings!r}, not a mapping of hyperparameters")


def check_hyperparameters(
    settings: Mapping[str, Any], algorithm: type[ShapedPolicyAlgorithm], file: str, typed: Collection[str] = ()
) -> None:
    """Complain of a key that neither the zoo nor the algorithm knows, and of values that the zoo would stumble over.

    :param settings: hyperparameters of one environment
    :param file: where they come from, for the message
    :param typed: keys that come from the command line instead
    :raises ValueError: naming the key, the value and what is allowed
    """

    def source(key: str) -> str:
        return "-params" if key in typed else file

    allowed = (set(inspect.signature(algorithm.__init__).parameters) - _RESERVED) | _ZOO_KEYS
    unknown = sorted(set(settings) - allowed)
    if unknown:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(sorted(allowed))}"
        raise ValueError(f"{source(unknown[0])}: unknown key {', '.join(map(repr, unknown))} for {algorithm.__name__}{hint}")
    for key in ("policy", "n_timesteps"):
        if key not in settings:
            raise ValueError(f"{file}: the key {key!r} is missing; the zoo needs it for every environment")
    names = settings.get("shaping", "ano")
    if not all(isinstance(name, str) for name in (names if isinstance(names, list | tuple) else [names])):
        raise ValueError(
            f"{source('shaping')}: shaping={names!r} is not allowed; allowed are names, such as 'spo' or 'module:function'"
        )
    n_envs = settings.get("n_envs", 1)
    if not isinstance(n_envs, int) or n_envs < 1:
        raise ValueError(f"{source('n_envs')}: n_envs={n_envs!r} is not allowed; allowed are whole numbers from 1")
    backend = settings.get("backend", BACKENDS[0])
    if backend not in BACKENDS:
        raise ValueError(f"{source('backend')}: backend={backend!r} is not allowed; allowed are {', '.join(BACKENDS)}")
