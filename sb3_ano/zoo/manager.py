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
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pprint import pprint
from typing import Any

import optuna
import rl_zoo3.train
import yaml
from rl_zoo3.exp_manager import EnvironmentName, ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER, convert_onpolicy_params, sample_ppo_params
from stable_baselines3.common import vec_env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_ano._io import no_empty_directories, read_json, write_file, write_json
from sb3_ano._registry import ALGORITHMS
from sb3_ano._secrets import hide
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.checkpoints.files import remove_checkpoints
from sb3_ano.envs import VecNormalize
from sb3_ano.envs.make import prepare_env
from sb3_ano.fast import accelerate
from sb3_ano.zoo.backends import Backend, take_backend
from sb3_ano.zoo.hyperparameters import (
    SCHEDULES,
    Hyperparameters,
    find_entry,
    hyperparameter_file,
    read_file,
    read_hyperparameters,
    resolve_names,
)
from sb3_ano.zoo.parsing import Options

# What the zoo puts after the name of the environment to name a run: a number and, with -uuid, a UUID.
_NUMBER = r"_(\d+)(_[0-9a-f-]{36})?"
# These options say which run is meant, or how its progress is shown. All others belong to the run.
# An accelerated training has the same numbers.
_WHICH = {"algo", "env", "log_folder", "resume", "checkpoint_freq"}
_SHOWN = {"progress", "verbose", "accelerate"}


class Manager(ExperimentManager):
    """Run an experiment of the zoo with checkpoints and backends, whatever its algorithm.

    :param args: arguments of the zoo's manager
    :param record: ``arguments`` and ``checkpoint_freq``, the environment steps between checkpoints or None for a checkpoint
        per minute; without a record there are no checkpoints
    :param resumed: directory of the run to resume, or None
    :param accelerated: whether to train SB3's PPO and sb3-contrib's RecurrentPPO in less time, with the same numbers; the
        algorithms of this package are always accelerated
    :param options: keyword arguments of the zoo's manager
    """

    custom_hyperparams: Hyperparameters | None  # set by the zoo's constructor
    normalize_kwargs: Hyperparameters
    monitor_kwargs: Hyperparameters

    def __init__(
        self,
        *args: Any,
        record: dict[str, Any] | None = None,
        resumed: Path | None = None,
        accelerated: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        # Those of this package accelerate themselves.
        self._is_accelerated = accelerated and self.algo not in ALGORITHMS

        # The zoo has read its options, and stores them as they are.
        options_as_typed: dict[str, Any] = self.args.__dict__
        options_as_typed.update(hide(options_as_typed))
        self.backend: Backend | None = None
        self.record: dict[str, Any] = {}
        if record:
            self.record = {**record, "seed": self.seed, "finished": False}

        self.resumed = resumed
        self.continues = False
        # Where each hyperparameter comes from, for messages.
        self._sources: dict[str, str] = {}
        if resumed is not None:
            self.save_path = str(resumed)
            self.params_path = str(record_of(resumed).parent)

    def setup_experiment(self) -> tuple[BaseAlgorithm, Hyperparameters] | None:
        """Set up the experiment; a run that cannot start leaves no directory, which ``enjoy`` would take for a run.

        :raises ValueError: if an option of a search is invalid
        """
        if self.optimize_hyperparameters:
            self._check_search()
        with no_empty_directories(Path(self.save_path).parent), contextlib.ExitStack() as new:
            if self.resumed is None:
                self._make_directory()
                new.callback(shutil.rmtree, self.save_path, ignore_errors=True)

            self.checkpoints = Path(self.save_path) / "checkpoints"
            if self.resumed is not None:
                # Without a checkpoint the run restarts, and so do its files.
                self.continues = newest_checkpoint(self.checkpoints, lambda line: None) is not None
            result = self._set_up()
            # A search makes its models later, and its directory goes.
            if result is None:
                return None

            model, saved = result
            model = self.accelerate(model)
            new.pop_all()  # the directory stays

        if self.record and isinstance(model, OnPolicyAlgorithm):
            every = self.record["checkpoint_freq"]
            is_resumed = self.resumed is not None
            self.callbacks.append(TrainingCheckpoints(self.checkpoints, every, resume=is_resumed, verbose=self.verbose))
            write_json(record_of(Path(self.save_path)), self.record)
        return model, saved

    def _check_search(self) -> None:
        """Check the options of a search that the zoo does not check."""
        if self.n_evaluations is not None and self.n_evaluations < 1:
            raise ValueError(f"--n-evaluations {self.n_evaluations} is not allowed; allowed are positive integers")

        is_url = self.storage is None or "://" in self.storage
        if not is_url and not self.storage.endswith(".log"):
            allowed = "allowed are URLs such as sqlite:///study.db, and journals such as study.log"
            raise ValueError(f"--storage {hide(self.storage)} is not allowed; {allowed}")

    def accelerate(self, model: BaseAlgorithm) -> BaseAlgorithm:
        """Accelerate a model if the user wants it.

        :param model: new or loaded model
        :return: the same model
        """
        if not self._is_accelerated:
            return model

        return accelerate(model)

    def _set_up(self) -> tuple[BaseAlgorithm, Hyperparameters] | None:
        """Set up as the zoo does; an error that begins with the name of a hyperparameter says where that comes from."""
        try:
            return super().setup_experiment()
        except (TypeError, ValueError) as error:
            key = re.match(r"\w+", str(error))
            # Other errors say themselves what they are about.
            if key is None or key[0] not in self._sources:
                raise
            raise type(error)(f"{self._sources[key[0]]}: {error}") from error

    def _make_directory(self) -> None:
        """Make the directory of a new run, with the next number if a training that starts at the same moment has made it."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.save_path)
                break

            # The part of a UUID stays.
            self.save_path = re.sub(f"{_NUMBER}$", lambda match: f"_{int(match[1]) + 1}{match[2] or ''}", self.save_path)
        self.params_path = f"{self.save_path}/{self.env_name}"

    def read_hyperparameters(self) -> tuple[Hyperparameters, Hyperparameters]:
        """Read and check hyperparameters; a resumed run has those that it was started with.

        :return: hyperparameters, and a copy of them to save
        :raises ValueError: if the file or the trial cannot be read, or a key or a value is invalid
        """
        if self.resumed is not None:
            print(f"Resuming {self.resumed}")
            # The directory is the user's own. The zoo writes Python objects into it.
            saved = dict(yaml.unsafe_load(Path(self.params_path, "config.yml").read_text()))
            return resolve_names(copy.deepcopy(saved)), saved

        # The zoo's function reads less and checks nothing.
        algorithm = rl_zoo3.ALGOS[self.algo]
        typed = read_hyperparameters(self.custom_hyperparams or {}, algorithm)
        self.custom_hyperparams = typed

        print(f"Loading hyperparameters from: {self.config}")
        entry, found = find_entry(read_file(self.config), self.env_name.gym_id, self._is_atari, self.config)
        if entry == "default":
            print("Using 'default' hyperparameters")
        source = f"{self.config}: {entry}"

        # Each source is checked alone, so that a message names it, without what -params replaces.
        for name in typed:
            found.pop(name, None)
        hyperparameters = read_hyperparameters(found, algorithm, source)
        self._sources = dict.fromkeys(hyperparameters, source) | dict.fromkeys(typed, "-params")
        hyperparameters |= self._read_trial()
        # The command line has the last word.
        hyperparameters |= typed

        if hyperparameters.get("env_kwargs") and self.env_kwargs:
            # Options of the command line replace those of the file, as in the zoo.
            hyperparameters["env_kwargs"] = self.env_kwargs
        for name in ("frame_stack", "env_kwargs", "clip_range_vf"):
            if name in hyperparameters and hyperparameters[name] is None:  # the default, which the zoo cannot read
                del hyperparameters[name]
        read_hyperparameters(hyperparameters, algorithm, source, required=("policy", "n_timesteps"))

        # What is saved and shown are the values as they can be written, in the zoo's order.
        saved = dict(sorted(hyperparameters.items()))
        print("Default hyperparameters for environment (ones being tuned will be overridden):")
        pprint(saved, sort_dicts=False)
        return resolve_names(hyperparameters), OrderedDict(saved)

    def _read_trial(self) -> Hyperparameters:
        """Return the hyperparameters of the trial that the options name: by its number, or the best one of a study."""
        named = (self.storage, self.study_name)
        if self.optimize_hyperparameters or (named == (None, None) and self.trial_id is None):
            return {}
        if self.storage is None or self.study_name is None:
            raise ValueError("the hyperparameters of a trial are loaded with both --storage and --study-name")

        # Optuna would create an empty file.
        file = self.storage.removeprefix("sqlite:///")
        is_file = file != self.storage or file.endswith(".log")
        if is_file and not Path(file).is_file():
            raise ValueError(f"--storage {hide(self.storage)}: there is no file {file}; -optimize makes one")

        which = "the best trial"
        if self.trial_id is not None:
            which = f"--trial-id {self.trial_id}"
        try:
            return self.load_trial(self.storage, self.study_name, self.trial_id)
        except Exception as error:  # each database's driver has errors of its own
            reason = hide(str(error).partition("\n")[0])
            raise ValueError(
                f"{which} of --study-name {self.study_name} in --storage {hide(self.storage)} cannot be loaded: {reason}"
            ) from None

    def objective(self, trial: optuna.Trial) -> float:
        """Train an agent with sampled hyperparameters, and evaluate it.

        :param trial: trial
        :return: mean return of the last evaluation
        :raises optuna.TrialPruned: if the pruner stops the trial, or the training diverges
        """
        try:
            return float(super().objective(trial))
        except ArithmeticError as error:
            # The zoo knows the errors of SB3's algorithms only. A pruned trial tells the sampler that it was bad.
            print(f"trial {trial.number} is pruned: {error}")
            raise optuna.TrialPruned(str(error)) from error

    def hyperparameters_optimization(self) -> None:
        """Search hyperparameters as the zoo does, with accelerated models if the user wants them."""
        algorithm = rl_zoo3.ALGOS[self.algo]

        def make_model(**options: Any) -> BaseAlgorithm:
            return self.accelerate(algorithm(**options))

        # The zoo makes the models of trials by this name.
        rl_zoo3.ALGOS[self.algo] = make_model
        try:
            super().hyperparameters_optimization()
        finally:
            rl_zoo3.ALGOS[self.algo] = algorithm

    def _preprocess_hyperparams(self, hyperparams: Hyperparameters) -> Any:
        # Before the zoo, which does not know the key, and would pass it to the algorithm.
        self.backend = take_backend(hyperparams, self.env_name.gym_id)
        result = super()._preprocess_hyperparams(hyperparams)
        if self._eval_env_kwargs_args is None:  # the zoo looks for them on the command line only
            self.eval_env_kwargs = self.env_kwargs
        return result

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> vec_env.VecEnv:
        """Create the environments with the backend of the experiment.

        :param n_envs: number of environments
        :param eval_env: whether they are for evaluation
        :param no_log: whether to write no monitor files
        """
        env_id = self.env_name.gym_id
        prepare_env(env_id)
        run = copy.copy(self)  # the zoo makes the environments of any class that it finds there
        run.monitor_kwargs = dict(self.monitor_kwargs)

        # The zoo's monitor of tasks with goals; see is_robotics_env.
        if not run.monitor_kwargs and (self.is_panda_gym(env_id) or "parking-v0" in env_id):
            run.monitor_kwargs["info_keywords"] = ("is_success",)
        if self.continues:
            # The episodes before the checkpoint stay in the files.
            run.monitor_kwargs["override_existing"] = False

        if self.backend is not None:
            env_kwargs = self.env_kwargs
            monitor_dir: str | None = self.save_path
            if eval_env:
                env_kwargs = self.eval_env_kwargs
            # The log is that of the training.
            if eval_env or no_log:
                monitor_dir = None
            run.vec_env_class = self.backend.vec_env_class(
                seed=self.seed,
                env_kwargs=env_kwargs,
                monitor_dir=monitor_dir,
                monitor_kwargs=run.monitor_kwargs,
                wrapper_class=self.env_wrapper,
                vec_env_cls=self.vec_env_class,
            )
        return super(Manager, run).create_envs(n_envs, eval_env, no_log)

    @staticmethod
    def is_robotics_env(env_id: str) -> bool:
        """Tell the zoo to leave the arguments of the monitor, which it would replace, as :meth:`create_envs` sets them."""
        return False

    def _save_config(self, saved_hyperparams: Hyperparameters) -> None:
        if self.resumed is not None:  # the files are there, with the command that started the run
            return
        # The zoo would write the steps of the file, whatever -n is, and its benchmark reports them.
        saved_hyperparams["n_timesteps"] = self.n_timesteps
        directory = Path(self.params_path)
        arguments = OrderedDict(sorted(vars(self.args).items()))
        write_file(directory / "config.yml", yaml.dump(hide(saved_hyperparams)))
        write_file(directory / "args.yml", yaml.dump(arguments))
        write_file(directory / "command.txt", " ".join(hide(sys.orig_argv)))
        print(f"Log path: {self.save_path}")

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        """Save the model, and remove the checkpoints of a finished run.

        :param model: trained model
        """
        super().save_trained_model(model)
        record = record_of(Path(self.save_path))
        if record.exists() and model.num_timesteps < self.n_timesteps:
            print(f"The training ended after {model.num_timesteps} of {self.n_timesteps} steps; --resume continues it")
        elif record.exists():
            # First: a checkpoint that is left behind costs only its space.
            write_json(record, {**self.record, "finished": True})
            remove_checkpoints(self.checkpoints)


class OwnManager(Manager):
    """Run an experiment with an algorithm of this package, with its schedules and VecNormalize."""

    @staticmethod
    def _preprocess_schedules(hyperparams: Hyperparameters) -> Hyperparameters:
        # The zoo takes numbers and texts only.
        resolved = {}
        for name in SCHEDULES:
            if callable(hyperparams.get(name)):
                resolved[name] = hyperparams.pop(name)
        return {**ExperimentManager._preprocess_schedules(hyperparams), **resolved}

    def _preprocess_normalization(self, hyperparams: Hyperparameters) -> Hyperparameters:
        normalize = hyperparams.get("normalize")
        given: Hyperparameters = {}
        if isinstance(normalize, dict):
            given = dict(normalize)
        hyperparams = super()._preprocess_normalization(hyperparams)
        # The zoo overwrites a discount factor of the returns by that of the algorithm.
        self.normalize_kwargs.update(given)
        return hyperparams

    def _maybe_normalize(self, env: vec_env.VecEnv, eval_env: bool) -> vec_env.VecEnv:
        env = super()._maybe_normalize(env, eval_env)
        # A user's subclass stays.
        if type(env) is vec_env.VecNormalize:
            env.__class__ = VecNormalize  # which has the same attributes, and computes the same in less time
        return env


def make_manager(args: Any, algo: str, *positional: Any, others: Any = ExperimentManager, **options: Any) -> Any:
    """Return our manager for the algorithms of this package and accelerated ones, and another one for all others.

    :param args: options of ``train``
    :param algo: zoo name of the algorithm
    :param positional: further arguments of the zoo's manager
    :param others: class of the manager for other algorithms, by default the zoo's own
    :param options: keyword arguments of the manager
    """
    if algo in ALGORITHMS:
        # The zoo looks for the files of all algorithms in its own package.
        options["config"] = options.get("config") or str(hyperparameter_file(algo))
    elif not options.get("accelerated"):
        return others(args, algo, *positional, **options)
    return OwnManager(args, algo, *positional, **options)


def register_algorithms() -> None:
    """Add our algorithms to the zoo; a second call changes nothing.

    All modules of the zoo share one dictionary of algorithms, which is changed in place. ``train`` makes its manager in one
    place.
    """
    for name, entry in ALGORITHMS.items():
        rl_zoo3.ALGOS[name] = entry.algorithm
        # Samplers of the user's own stay.
        HYPERPARAMS_SAMPLER.setdefault(name, functools.partial(sample_hyperparameters, name))
        HYPERPARAMS_CONVERTER.setdefault(name, convert_onpolicy_params)
    rl_zoo3.train.ExperimentManager = make_manager


def sample_hyperparameters(
    algo: str, trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Mapping[str, Any]
) -> Hyperparameters:
    """Sample hyperparameters from the zoo's search space of PPO, and the arguments that PPO does not have.

    With the first argument bound, this is a function of the zoo's ``HYPERPARAMS_SAMPLER``.

    :param algo: zoo name of an algorithm of this package
    :param trial: trial that stores the sampled parameters
    :param n_actions: size of the action space
    :param n_envs: number of environments
    :param additional_args: further arguments of the zoo
    :return: sampled hyperparameters
    """
    sampled: Hyperparameters = sample_ppo_params(trial, n_actions, n_envs, additional_args)
    for name, values in ALGORITHMS[algo].search_space.items():
        if isinstance(values, tuple):
            sampled[name] = trial.suggest_float(name, *values, log=True)
        else:
            sampled[name] = trial.suggest_categorical(name, values)
    return sampled


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
    resume = options.take("resume")
    freq = options.take("checkpoint_freq")
    # Checkpoints have no replay buffers.
    if freq is not None and not issubclass(rl_zoo3.ALGOS[options.values.algo], OnPolicyAlgorithm):
        raise ValueError(f"--checkpoint-freq needs an on-policy algorithm; {options.values.algo} is none")

    run = None
    if resume:
        run = _newest_run(options.values)

    # A new run
    if run is None:
        new: dict[str, Any] | None = None
        if freq is None or freq > 0:
            new = {"arguments": options.arguments, "checkpoint_freq": freq}
        return {"record": new, "accelerated": options.values.accelerate}

    record = read_json(record_of(run))
    # The zoo draws a seed if none is given.
    started = {**vars(options.parse(record["arguments"])), "seed": record["seed"]}
    given = options.given()
    free = _WHICH | _SHOWN

    for name, value in given.items():
        if name not in free and hide(value) != hide(started[name]):  # it would be another run
            kept = f"is not what {run} was started with ({' '.join(record['arguments'])}); a resumed run keeps its options"
            raise ValueError(f"--{name.replace('_', '-')} {value} {kept}; to train its agent further, start a new run with -i")
    if record["finished"]:
        print(f"{run} has finished: there is nothing to resume")
        raise SystemExit(0)

    for name, value in {**started, **given}.items():
        if name not in _WHICH:
            setattr(options.values, name, value)
    if freq is not None:
        record["checkpoint_freq"] = freq
    return {"record": record, "resumed": run, "accelerated": options.values.accelerate}


def _newest_run(values: argparse.Namespace) -> Path | None:
    """Return the directory of the run that was started last, or print why there is none to resume."""
    if values.optimize_hyperparameters:
        raise ValueError("--resume continues a training; a search continues with its --storage and --study-name")
    if not issubclass(rl_zoo3.ALGOS[values.algo], OnPolicyAlgorithm):
        raise ValueError(f"--resume needs an on-policy algorithm; {values.algo} is none")
    directory = Path(values.log_folder) / values.algo
    name = EnvironmentName(values.env)

    runs = []
    for path in directory.glob(f"{name}_*"):
        match = re.fullmatch(rf"{re.escape(name)}{_NUMBER}", path.name)
        if match is None or not path.is_dir():
            continue
        # Runs with -uuid all have the number 1. The command line is written once, at the start.
        command = record_of(path).with_name("command.txt")
        start = command.stat().st_mtime if command.exists() else 0.0
        runs.append((int(match[1]), start, path))

    if runs:
        newest = max(runs)[-1]
        if record_of(newest).exists():
            return newest
    print(f"{directory} holds no run of {values.env}, or the newest one has no checkpoints: a new run starts")
    return None
