"""Upstream fault: a search makes the folder of a training run, which nothing is ever saved to.

The zoo's ``enjoy`` takes the latest run, and finds no agent in it.
"""

import functools
import tempfile
from typing import Any

from sb3_ano.extras import missing_extra

try:
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_PROBED = "probed"


def is_needed() -> bool:
    """Whether a search makes the folder of its run: a manager is set up of which nothing else is real."""
    probe = _Probe()
    probe.setup_experiment()
    return probe.made_folder


def apply() -> None:
    """Let a search set itself up in a temporary folder."""
    setup = ExperimentManager.setup_experiment

    @functools.wraps(setup)
    def setup_experiment(self: ExperimentManager) -> Any:
        if not self.optimize_hyperparameters:
            return setup(self)
        with tempfile.TemporaryDirectory() as folder:
            self.save_path = folder
            self.params_path = f"{folder}/{self.env_name}"
            return setup(self)

    ExperimentManager.setup_experiment = setup_experiment


class _Probe(ExperimentManager):
    """A search without hyperparameters and environments."""

    def __init__(self) -> None:
        self.made_folder = False
        self.optimize_hyperparameters = True
        self.continue_training = False
        self.algo, self.env_name, self.n_envs = "ppo", "probe", 1
        self.env_kwargs: dict[str, Any] = {}
        self.eval_env_kwargs: dict[str, Any] = {}
        self.save_path = self.params_path = _PROBED

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> tuple[dict[str, Any], None, list[Any], None]:
        return hyperparams, None, [], None

    def _preprocess_action_noise(self, hyperparams: dict[str, Any], *_: Any) -> dict[str, Any]:
        return hyperparams

    def create_log_folder(self) -> None:
        self.made_folder = self.save_path == _PROBED

    def create_callbacks(self) -> None: ...

    def create_envs(self, *_: Any, **__: Any) -> "_Probe":
        return self

    def close(self) -> None: ...
