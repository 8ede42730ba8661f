"""A sampler that draws the same for the same trial, whichever process runs it."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from sb3_ano.extras import missing_extra

try:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise missing_extra("zoo", error.name or "optuna") from error


def trial_seed(seed: int, number: int) -> int:
    """A seed of 32 bits for the trial of this number."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


class SeededByTrial(BaseSampler):
    """A fresh sampler for each trial, with a seed of its own.

    One seed for a whole process would draw the same trials again in every process that is started with it, and in a search
    that goes on.

    :param create: makes the sampler of a seed
    :param seed: seed of the search
    """

    def __init__(self, create: Callable[[int], BaseSampler], seed: int) -> None:
        self._create = create
        self._seed = seed
        # Each of several jobs asks for a trial and samples it in its own thread.
        self._of_thread = threading.local()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._of_thread.sampler = self._create(trial_seed(self._seed, trial.number))
        self._of_thread.sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of_thread.sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return self._of_thread.sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of_thread.sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        sampler = getattr(self._of_thread, "sampler", None)
        if sampler is not None:  # None where this process closes another's trial before any of its own
            sampler.after_trial(study, trial, state, values)
