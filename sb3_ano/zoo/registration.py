"""Make the RL Zoo know this package's algorithms and their hyperparameters."""

import functools
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sb3_ano.algorithms import ANO, PAPO, SPO, ShapedPolicyAlgorithm
from sb3_ano.extras import missing_extra
from sb3_ano.zoo.backends import register_backends
from sb3_ano.zoo.folders import no_empty_folders
from sb3_ano.zoo.hyperparameters import check_file, check_hyperparameters, hyperparameter_file
from sb3_ano.zoo.repairs import LIBRARY, apply_needed
from sb3_ano.zoo.search import SearchMixin
from sb3_ano.zoo.search_spaces import register_search_spaces

try:
    import rl_zoo3
    import rl_zoo3.train
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

ALGORITHMS: dict[str, type[ShapedPolicyAlgorithm]] = {"ano": ANO, "spo": SPO, "papo": PAPO}


def register_algorithms() -> None:
    """Add our algorithms to the zoo's, before one of its commands parses its arguments, and repair what is broken in it.

    The zoo keeps one dictionary of algorithms that all of its modules share, hence the change in place.
    """
    rl_zoo3.ALGOS.update(ALGORITHMS)
    if not hasattr(ExperimentManager.read_hyperparameters, "__wrapped__"):
        ExperimentManager.read_hyperparameters = _read_own_hyperparameters(ExperimentManager.read_hyperparameters)
        ExperimentManager.setup_experiment = _leave_no_empty_run(ExperimentManager.setup_experiment)
        ExperimentManager._save_config = _save_trained_steps(ExperimentManager._save_config)
    register_backends()
    register_search_spaces()
    rl_zoo3.train.ExperimentManager = SearchMixin
    apply_needed(LIBRARY)


def _read_own_hyperparameters(read: Any) -> Any:
    """The zoo looks for ``ano.yml`` inside its own package; point it to ours unless a file was asked for."""

    @functools.wraps(read)
    def read_hyperparameters(self: ExperimentManager) -> tuple[dict[str, Any], "OrderedDict[str, Any]"]:
        algorithm = ALGORITHMS.get(self.algo)
        if algorithm is None:
            return read(self)
        if Path(self.config) == Path(rl_zoo3.__file__).parent / "hyperparams" / f"{self.algo}.yml":
            self.config = str(hyperparameter_file(self.algo))
        check_file(self.config)
        hyperparameters, saved = read(self)
        check_hyperparameters(hyperparameters, algorithm, self.config, self.custom_hyperparams or ())
        return hyperparameters, saved

    return read_hyperparameters


def _save_trained_steps(save: Any) -> Any:
    """The zoo writes the steps of the hyperparameter file into ``config.yml``, whatever -n was, and benchmark reports them."""

    @functools.wraps(save)
    def _save_config(self: ExperimentManager, saved_hyperparams: dict[str, Any]) -> None:
        if int(saved_hyperparams["n_timesteps"]) != self.n_timesteps:
            saved_hyperparams["n_timesteps"] = self.n_timesteps
        save(self, saved_hyperparams)

    return _save_config


def _leave_no_empty_run(setup: Any) -> Any:
    """A run that could not start leaves a folder without a model, which the zoo's enjoy would pick as the latest."""

    @functools.wraps(setup)
    def setup_experiment(self: ExperimentManager) -> Any:
        run = Path(self.save_path)
        existed = run.exists()
        with no_empty_folders(run.parent, run.parent.parent):
            try:
                return setup(self)
            except Exception:
                if not existed:
                    shutil.rmtree(run, ignore_errors=True)
                raise

    return setup_experiment
