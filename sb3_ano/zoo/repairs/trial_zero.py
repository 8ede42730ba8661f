"""``--trial-id 0`` is taken for no trial id at all, so that the first trial of a study cannot be trained."""

import contextlib
import functools
import io
import tempfile
import types
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra

try:
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error


def is_needed() -> bool:
    """Whether reading the hyperparameters of trial 0 does not ask for the trial."""
    asked = []

    def load_trial(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {}

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = Path(folder) / "probe.yml"
        config.write_text("probe: {}\n")
        experiment = types.SimpleNamespace(
            algo="probe",
            config=str(config),
            env_name=types.SimpleNamespace(gym_id="probe"),
            env_kwargs={},
            custom_hyperparams=None,
            storage="storage",
            study_name="study",
            trial_id=0,
            load_trial=load_trial,
            _is_atari=False,
        )
        ExperimentManager.read_hyperparameters(experiment)
    return not asked


def apply() -> None:
    """Put the trial's hyperparameters where the ones of the command line stand, which the zoo reads after the file's."""
    read = ExperimentManager.read_hyperparameters

    @functools.wraps(read)
    def read_hyperparameters(self: ExperimentManager) -> Any:
        if self.storage and self.study_name and self.trial_id == 0:
            print("Loading from Optuna study...")
            trial = self.load_trial(self.storage, self.study_name, 0)
            self.custom_hyperparams = trial | (self.custom_hyperparams or {})
        return read(self)

    ExperimentManager.read_hyperparameters = read_hyperparameters
