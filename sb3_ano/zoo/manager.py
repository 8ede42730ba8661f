"""The zoo's experiments with this package's algorithms, hyperparameter files, backends and checkpoints, and ``--resume``.

A run with checkpoints has a record, ``run.json`` next to its hyperparameters: ``arguments``, the command line; ``seed``, which
the zoo draws if none is given; ``checkpoint_freq``; and whether it has ``finished``.
"""

import argparse
import contextlib
import copy
import functools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import rl_zoo3.train
import yaml
from rl_zoo3.exp_manager import EnvironmentName, ExperimentManager
from stable_baselines3.common import vec_env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_ano._io import read_json, write_json
from sb3_ano._registry import ALGORITHMS
from sb3_ano._secrets import hide
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.envs import VecNormalize
from sb3_ano.envs.make import prepare_env
from sb3_ano.zoo.backends import Backend, register_backends, take_backend
from sb3_ano.zoo.fixes import replace
from sb3_ano.zoo.hyperparameters import check_hyperparameters, hyperparameter_file
from sb3_ano.zoo.parsing import Options
from sb3_ano.zoo.search import Search, no_empty_directories
from sb3_ano.zoo.search_spaces import register_search_spaces

# What the zoo puts after the name of the environment to name a run: a number and, with -uuid, a UUID.
_NUMBER = r"_(\d+)(_[0-9a-f-]{36})?"
# These options say which run is meant, or how its progress is shown. All others belong to the run.
_WHICH, _SHOWN = {"algo", "env", "log_folder", "resume", "checkpoint_freq"}, {"progress", "verbose"}


class Manager(ExperimentManager):
    """Run an experiment of the zoo with checkpoints and backends, whatever its algorithm.

    :param args: arguments of the zoo's manager
    :param record: ``arguments`` and ``checkpoint_freq``, the environment steps between checkpoints or None for a checkpoint
        per minute; without a record there are no checkpoints
    :param resumed: directory of the run to resume, or None
    :param options: keyword arguments of the zoo's manager
    """

    custom_hyperparams: dict[str, Any] | None  # set by the zoo's constructor

    def __init__(self, *args: Any, record: dict[str, Any] | None = None, resumed: Path | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        # The zoo has read its options, and stores them as they are.
        settings: dict[str, Any] = self.args.__dict__
        settings.update(hide(settings))
        self.backend: Backend | None = None
        self.record = {**record, "seed": self.seed, "finished": False} if record else {}
        self.resumed = resumed
        self.continues = False
        if resumed is not None:
            self.save_path, self.params_path = str(resumed), str(record_of(resumed).parent)

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        """Set up the experiment; a run that cannot start leaves no directory, which ``enjoy`` would take for a run."""
        with (
            no_empty_directories(Path(self.save_path).parent),
            contextlib.ExitStack() as new,
            contextlib.ExitStack() as stack,
        ):
            if self.resumed is None:
                self._make_directory()
                new.callback(shutil.rmtree, self.save_path, ignore_errors=True)
            self.checkpoints = Path(self.save_path) / "checkpoints"
            # Without a checkpoint the run restarts, and so do its files.
            self.continues = self.resumed is not None and newest_checkpoint(self.checkpoints, lambda line: None) is not None
            for writer in (Monitor, ResultsWriter) if self.continues else ():
                # The first one passes its own default on to the second one, which pools of environments use alone.
                replace(stack, writer, "__init__", functools.partialmethod(writer.__init__, override_existing=False))
            result = super().setup_experiment()
            if result is not None:
                self.check_model(result[0])
            new.pop_all()  # the directory stays
        if result is not None and self.record and isinstance(result[0], OnPolicyAlgorithm):
            every, resume = self.record["checkpoint_freq"], self.resumed is not None
            self.callbacks.append(TrainingCheckpoints(self.checkpoints, every, resume=resume, verbose=self.verbose))
            write_json(record_of(Path(self.save_path)), self.record)
        return result

    def _make_directory(self) -> None:
        """Make the directory of a new run, with the next number if a training that starts at the same moment has made it."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.save_path)
                break
            self.save_path = re.sub(f"{_NUMBER}$", lambda match: f"_{int(match[1]) + 1}{match[2] or ''}", self.save_path)
        self.params_path = f"{self.save_path}/{self.env_name}"

    def check_model(self, model: BaseAlgorithm) -> None:
        """Raise ValueError for a model that this manager cannot train."""

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read hyperparameters; a resumed run has those that it was started with.

        :raises ValueError: if a key of ``-params`` is unknown or a value is invalid
        """
        if self.resumed is not None:
            print(f"Resuming {self.resumed}")
            # The directory is the user's own. The zoo writes Python objects into it.
            saved = dict(yaml.unsafe_load(Path(self.params_path, "config.yml").read_text()))
            return copy.deepcopy(saved), saved
        typed = self.custom_hyperparams or {}
        check_hyperparameters(typed, rl_zoo3.ALGOS[self.algo])
        if self.storage and self.study_name and self.trial_id == 0:  # which the zoo takes for no trial
            self.custom_hyperparams = {**self.load_trial(self.storage, self.study_name, 0), **typed}
        return super().read_hyperparameters()

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        self.backend = take_backend(hyperparams, self.env_name.gym_id)
        result = super()._preprocess_hyperparams(hyperparams)
        if self._eval_env_kwargs_args is None:  # the zoo looks for them on the command line only
            self.eval_env_kwargs = self.env_kwargs
        if self.continues and self.vec_env_class is vec_env.SubprocVecEnv:  # in whose processes nothing is replaced
            self.monitor_kwargs.update(override_existing=False)
        return result

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> vec_env.VecEnv:
        """Create the environments with the backend of the experiment.

        :param n_envs: number of environments
        :param eval_env: whether they are for evaluation
        :param no_log: whether to write no monitor files
        """
        prepare_env(self.env_name.gym_id)
        run = copy.copy(self)  # the zoo makes the environments of any class that it finds there
        if self.backend is not None:
            make_class = functools.partial(
                self.backend.vec_env_class,
                seed=self.seed,
                env_kwargs=self.eval_env_kwargs if eval_env else self.env_kwargs,
                monitor_dir=None if eval_env or no_log else self.save_path,
                wrapper_class=self.env_wrapper,
                vec_env_cls=self.vec_env_class,
            )
            # The zoo sets monitor_kwargs of goal environments meanwhile.
            run.vec_env_class = lambda *fns, **options: make_class(monitor_kwargs=run.monitor_kwargs)(*fns, **options)
        return super(Manager, run).create_envs(n_envs, eval_env, no_log)

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        if self.resumed is None:  # otherwise the files are there, with the command that started the run
            # The zoo would write the steps of the file, whatever -n is, and its benchmark reports them.
            saved_hyperparams["n_timesteps"] = self.n_timesteps
            with contextlib.ExitStack() as stack:
                # The zoo stores the command line.
                replace(stack, sys, "argv", hide(sys.argv))
                replace(stack, sys, "orig_argv", hide(sys.orig_argv))
                super()._save_config(hide(saved_hyperparams))

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        """Save the model, and remove the checkpoints of a finished run.

        :param model: trained model
        """
        super().save_trained_model(model)
        record = record_of(Path(self.save_path))
        if record.exists() and model.num_timesteps < self.n_timesteps:
            print(f"The training ended after {model.num_timesteps} of {self.n_timesteps} steps; --resume continues it")
        elif record.exists():
            write_json(record, {**self.record, "finished": True})
            shutil.rmtree(self.checkpoints, ignore_errors=True)


class OwnManager(Search, Manager):
    """Run an experiment with an algorithm of this package: with our search, checks of hyperparameters, and VecNormalize."""

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read and check hyperparameters.

        :raises ValueError: if a key is unknown or missing, or a value is invalid
        """
        hyperparameters, saved = super().read_hyperparameters()
        check_hyperparameters(hyperparameters, rl_zoo3.ALGOS[self.algo], self.config, required=("policy", "n_timesteps"))
        return hyperparameters, saved

    def _maybe_normalize(self, env: vec_env.VecEnv, eval_env: bool) -> vec_env.VecEnv:
        env = super()._maybe_normalize(env, eval_env)
        if type(env) is vec_env.VecNormalize:
            env.__class__ = VecNormalize  # which has the same attributes, and computes the same in less time
        return env


def make_manager(
    args: Any, algo: str, *positional: Any, own: Any = OwnManager, others: Any = ExperimentManager, **options: Any
) -> Any:
    """Return our manager for the algorithms of this package, and another one for all others.

    :param args: options of ``train``
    :param algo: zoo name of the algorithm
    :param positional: further arguments of the zoo's manager
    :param own: class of the manager for the algorithms of this package
    :param others: class of the manager for other algorithms, by default the zoo's own
    :param options: keyword arguments of the manager
    """
    if algo not in ALGORITHMS:
        return others(args, algo, *positional, **options)
    # The zoo looks for the files of all algorithms in its own package.
    options["config"] = options.get("config") or str(hyperparameter_file(algo))
    return own(args, algo, *positional, **options)


def register_algorithms() -> None:
    """Add our algorithms to the zoo; a second call changes nothing.

    All modules of the zoo share one dictionary of algorithms, which is changed in place. ``train`` makes its manager in one
    place.
    """
    rl_zoo3.ALGOS.update({name: entry.algorithm for name, entry in ALGORITHMS.items()})
    rl_zoo3.train.ExperimentManager = make_manager
    register_backends()
    register_search_spaces()


def record_of(run: Path) -> Path:
    """Return the file with the record of a run.

    :param run: directory of the run, such as ``logs/ano/CartPole-v1_1``
    """
    return run / re.sub(f"{_NUMBER}$", "", run.name) / "run.json"


def plan_training(options: Options) -> dict[str, Any]:
    """Plan the checkpoints of a training, and with ``--resume`` give it the options of the newest run.

    :param options: options of ``train``
    :return: arguments of :class:`Manager`: ``record`` and ``resumed``
    :raises ValueError: if the newest run cannot be resumed with these options
    :raises SystemExit: if the newest run has finished
    """
    resume, freq = options.take("resume"), options.take("checkpoint_freq")
    if freq is not None and not issubclass(rl_zoo3.ALGOS[options.values.algo], OnPolicyAlgorithm):
        raise ValueError(f"--checkpoint-freq needs an on-policy algorithm; {options.values.algo} is none")
    run = _newest_run(options.values) if resume else None
    if run is None:
        return {"record": {"arguments": options.arguments, "checkpoint_freq": freq} if freq is None or freq > 0 else None}
    record = read_json(record_of(run))
    started = {**vars(options.parse(record["arguments"])), "seed": record["seed"]}
    given = {name: value for name, value in options.given().items() if name not in _WHICH}
    free = _SHOWN | ({"cluster", "env_runners"} if started.get("cluster") is not None else set())  # another cluster may do
    for name, value in given.items():
        if name not in free and hide(value) != hide(started[name]):  # it would be another run
            kept = f"is not what {run} was started with ({' '.join(record['arguments'])}); a resumed run keeps its options"
            further = "-i, without --cluster if observations are normalized" if started.get("cluster") is not None else "-i"
            raise ValueError(
                f"--{name.replace('_', '-')} {value} {kept}; to train its agent further, start a new run with {further}"
            )
    if record["finished"]:
        print(f"{run} has finished: there is nothing to resume")
        raise SystemExit(0)
    vars(options.values).update({name: value for name, value in {**started, **given}.items() if name not in _WHICH})
    return {"record": {**record, "checkpoint_freq": record["checkpoint_freq"] if freq is None else freq}, "resumed": run}


def _newest_run(values: argparse.Namespace) -> Path | None:
    """Return the directory of the run that was started last, or print why there is none to resume."""
    if values.optimize_hyperparameters:
        raise ValueError("--resume continues a training; a search continues with its --storage and --study-name")
    if not issubclass(rl_zoo3.ALGOS[values.algo], OnPolicyAlgorithm):
        raise ValueError(f"--resume needs an on-policy algorithm; {values.algo} is none")
    directory, name = Path(values.log_folder) / values.algo, EnvironmentName(values.env)
    numbered = {path: re.fullmatch(rf"{re.escape(name)}{_NUMBER}", path.name) for path in directory.glob(f"{name}_*")}
    # The command line is written once, at the start; runs with -uuid all have the number 1.
    started = {path: record_of(path).with_name("command.txt") for path in numbered}
    times = {path: file.stat().st_mtime if file.exists() else 0.0 for path, file in started.items()}
    runs = [(int(match[1]), times[path], path) for path, match in numbered.items() if match and path.is_dir()]
    if runs and record_of(newest := max(runs)[-1]).exists():
        return newest
    print(f"{directory} holds no run of {values.env}, or the newest one has no checkpoints: a new run starts")
    return None
