"""The zoo's experiments with this package's algorithms, hyperparameter files, backends and checkpoints."""

import argparse
import contextlib
import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rl_zoo3.train
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common import vec_env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._io import write_json
from sb3_ano._registry import ALGORITHMS
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import VecNormalize
from sb3_ano.envs.make import prepare_env
from sb3_ano.zoo.backends import Backend, register_backends, take_backend
from sb3_ano.zoo.hyperparameters import check_hyperparameters, check_names, hyperparameter_file
from sb3_ano.zoo.resume import kept_monitor_files, record_of
from sb3_ano.zoo.search import SearchMixin
from sb3_ano.zoo.search_spaces import register_search_spaces


class Manager(SearchMixin):
    """Run an experiment of the zoo.

    :param args: options of ``train``
    :param algo: zoo name of the algorithm
    :param positional: further arguments of the zoo's manager
    :param config: hyperparameter file; None takes the file that comes with the algorithm
    :param arguments: command line of ``train``, which is recorded
    :param checkpoint_freq: environment steps between checkpoints; negative for none, None for a checkpoint per minute
    :param resumed: directory of the run to resume, or None
    :param options: keyword arguments of the zoo's manager
    """

    # The zoo sets them in its constructor.
    custom_hyperparams: dict[str, Any] | None
    vec_env_class: Any

    def __init__(
        self,
        args: argparse.Namespace,
        algo: str,
        *positional: Any,
        config: str | None = None,
        arguments: Sequence[str] = (),
        checkpoint_freq: int | None = -1,
        resumed: Path | None = None,
        **options: Any,
    ) -> None:
        # The zoo looks for the files of all algorithms in its own package.
        if config is None and algo in ALGORITHMS:
            config = str(hyperparameter_file(algo))
        super().__init__(args, algo, *positional, config=config, **options)
        self.backend: Backend | None = None
        self.checkpoint_freq = checkpoint_freq
        self.resumed = resumed
        if resumed is not None:
            self.save_path, self.params_path = str(resumed), str(record_of(resumed).parent)
        self.record = {"arguments": list(arguments), "seed": self.seed, "checkpoint_freq": checkpoint_freq, "finished": False}

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        """Set up the experiment; a run that cannot start leaves no directory, which ``enjoy`` would take for a run."""
        directory = Path(self.save_path)
        is_new = not directory.exists()
        # Without a checkpoint the run restarts, and so do its files.
        resumes = self.resumed is not None and newest_checkpoint(self.checkpoints, lambda line: None) is not None
        with no_empty_directories(directory.parent, directory.parent.parent):
            try:
                with kept_monitor_files(self) if resumes else contextlib.nullcontext():
                    result = super().setup_experiment()
            except Exception:
                if is_new:
                    shutil.rmtree(directory, ignore_errors=True)
                raise
        if result is not None and isinstance(result[0], OnPolicyAlgorithm) and (self.checkpoint_freq or 1) > 0:
            write_json(record_of(directory), self.record)
            self.callbacks.append(
                TrainingCheckpoints(
                    self.checkpoints, self.checkpoint_freq, resume=self.resumed is not None, verbose=self.verbose
                )
            )
        return result

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return Path(self.save_path) / "checkpoints"

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read and check hyperparameters; a resumed run has those that it was started with.

        :raises ValueError: if a key is unknown or a value is invalid
        """
        if self.resumed is not None:
            print(f"Resuming {self.resumed}")
            # The directory is the user's own. The zoo writes Python objects into it.
            saved = dict(yaml.unsafe_load(Path(self.params_path, "config.yml").read_text()))
            return copy.deepcopy(saved), saved
        if self.storage and self.study_name and self.trial_id == 0:  # which the zoo takes for no trial
            trial = self.load_trial(self.storage, self.study_name, 0)
            self.custom_hyperparams = {**trial, **(self.custom_hyperparams or {})}
        typed = self.custom_hyperparams or {}
        algorithm = rl_zoo3.ALGOS[self.algo]
        if self.algo not in ALGORITHMS:
            check_names(typed, algorithm)
            return super().read_hyperparameters()
        try:
            hyperparameters, saved = super().read_hyperparameters()
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            raise ValueError(f"{self.config} is no YAML mapping from environments to hyperparameters: {error}") from error
        check_hyperparameters(hyperparameters, algorithm, self.config, typed)
        return hyperparameters, saved

    def _preprocess_hyperparams(
        self, hyperparams: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable | None, list[BaseCallback], Callable | None]:
        self.backend = take_backend(hyperparams, self.env_name.gym_id)
        return super()._preprocess_hyperparams(hyperparams)

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        """Create the environments with the backend of the experiment.

        :param n_envs: number of environments
        :param eval_env: whether they are for evaluation
        :param no_log: whether to write no monitor files
        """
        prepare_env(self.env_name.gym_id)
        backend, vec_env_class = self.backend, self.vec_env_class
        if backend is None:
            return super().create_envs(n_envs, eval_env, no_log)

        def make(env_fns: list[Any], **vec_env_kwargs: Any) -> VecEnv:
            return backend.make(
                len(env_fns),
                seed=self.seed,
                env_kwargs=self.eval_env_kwargs if eval_env else self.env_kwargs,
                monitor_dir=None if eval_env or no_log else self.save_path,
                wrapper_class=self.env_wrapper,
                vec_env_cls=vec_env_class,
                vec_env_kwargs=vec_env_kwargs,
                monitor_kwargs=self.monitor_kwargs,
            )

        # The zoo makes environments with this class. What it wraps around them, such as VecNormalize, stays the zoo's.
        self.vec_env_class = make
        try:
            return super().create_envs(n_envs, eval_env, no_log)
        finally:
            self.vec_env_class = vec_env_class

    def _maybe_normalize(self, env: VecEnv, eval_env: bool) -> VecEnv:
        env = super()._maybe_normalize(env, eval_env)
        if type(env) is vec_env.VecNormalize and self.algo in ALGORITHMS:
            env.__class__ = VecNormalize  # which has the same attributes, and computes the same in less time
        return env

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        if self.resumed is not None:
            return  # the files are there, with the command that started the run
        # The zoo would write the steps of the file, whatever -n is, and its benchmark reports them.
        if int(saved_hyperparams["n_timesteps"]) != self.n_timesteps:
            saved_hyperparams["n_timesteps"] = self.n_timesteps
        super()._save_config(saved_hyperparams)

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        """Save the model, and remove the checkpoints of a finished run.

        :param model: trained model
        """
        super().save_trained_model(model)
        if not record_of(Path(self.save_path)).exists():
            return
        if model.num_timesteps < self.n_timesteps:
            print(f"The training ended after {model.num_timesteps} of {self.n_timesteps} steps; --resume continues it")
            return
        write_json(record_of(Path(self.save_path)), {**self.record, "finished": True})
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def manager_for(args: argparse.Namespace, algo: str, *positional: Any, **options: Any) -> ExperimentManager:
    """Return our manager for the algorithms of this package, and the zoo's own for others.

    :param args: options of ``train``
    :param algo: zoo name of the algorithm
    :param positional: further arguments of the zoo's manager
    :param options: keyword arguments of the zoo's manager
    """
    manager = Manager if algo in ALGORITHMS else ExperimentManager
    return manager(args, algo, *positional, **options)


def register_algorithms() -> None:
    """Add our algorithms to the zoo; a second call changes nothing.

    All modules of the zoo share one dictionary of algorithms, which is changed in place. ``train`` makes its manager in one
    place.
    """
    rl_zoo3.ALGOS.update({name: entry.algorithm for name, entry in ALGORITHMS.items()})
    if not hasattr(rl_zoo3.train, "ExperimentManager"):
        warnings.warn("this version of rl-zoo3 has no train.ExperimentManager: give hyperparameters with -conf", stacklevel=3)
    rl_zoo3.train.ExperimentManager = manager_for
    register_backends()
    register_search_spaces()


@contextlib.contextmanager
def no_empty_directories(directory: Path, *parents: Path) -> Iterator[None]:
    """Remove the directories that a failed block made and left empty.

    :param directory: directory in which the block makes others
    :param parents: parents of the directory that the block may make, innermost first
    """
    kept = {*directory.glob("*"), *(path for path in (directory, *parents) if path.exists())}
    try:
        yield
    except BaseException:
        for path in (*directory.glob("*"), directory, *parents):
            if path not in kept:
                with contextlib.suppress(OSError):  # not empty, or never made
                    path.rmdir()
        raise
