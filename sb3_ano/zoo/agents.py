"""Trained agents of a directory: which one a command means, and how it is loaded, shown and recorded."""

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import rl_zoo3.utils
import torch
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv, VecVideoRecorder
from tqdm import tqdm

from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.zoo.backends import make_agents_envs
from sb3_ano.zoo.hyperparameters import Hyperparameters
from sb3_ano.zoo.settings import check_settings

# What acting does not need, and files of other versions of Python hold in a form that cannot be read.
_NOT_FOR_ACTING = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
# Rewards, ends and infos of all environments.
_Step: TypeAlias = tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]


class Agent(NamedTuple):
    """A loaded agent.

    :param model: algorithm
    :param env: environments to act in
    :param name: name of the agent in the names of videos
    :param file: file of the model
    :param run: directory of the run
    :param hyperparams: hyperparameters of the training in the zoo's format
    :param env_kwargs: settings of the task
    :param is_deterministic: whether to take the mode of the policy instead of a sample
    """

    model: BaseAlgorithm
    env: VecEnv
    name: str
    file: Path
    run: Path
    hyperparams: Hyperparameters
    env_kwargs: Hyperparameters
    is_deterministic: bool


def run_of(values: argparse.Namespace) -> Path:
    """Return the directory that an agent is taken from, whether it exists or not.

    :param values: options of a command, whose ``exp_id`` is 0 for the newest run and negative for no run
    """
    directory = Path(values.folder, values.algo)
    number = values.exp_id or newest_run(directory, values.env)
    if number > 0:
        return directory / f"{values.env}_{number}"
    # Agents without a run are next to each other.
    return directory


def newest_run(directory: Path, name: str) -> int:
    """Return the number of the newest run with a final agent, or else with any agent; 0 if there is no run.

    A run without an agent was stopped early, or is still training.

    :param directory: directory of an algorithm's runs
    :param name: directory name of the environment
    """
    newest: int = rl_zoo3.utils.get_latest_run_id(str(directory), name)

    # First a final agent, which has the environment's name
    for pattern in (f"{name}.zip", "*.zip"):
        for number in range(newest, 0, -1):
            if any((directory / f"{name}_{number}").glob(pattern)):
                return number
    return newest


def load_agent(
    values: argparse.Namespace, *, render_mode: str | None, for_acting: bool = True, monitor_dir: str | None = None
) -> Agent:
    """Load the agent that the options of a command name, and make its environments.

    :param values: options of ``enjoy``, ``record_video`` or ``push_to_hub``
    :param render_mode: gymnasium's render mode; None does not render
    :param for_acting: whether the model only acts; otherwise it has its environments, schedules and the training's seed, too
    :param monitor_dir: directory for monitor files; None writes none
    :raises ValueError: if there is no such agent, or its settings would run code
    """
    # The zoo would take the newest run, with or without an agent.
    number = values.exp_id or newest_run(Path(values.folder, values.algo), values.env)
    which = (values.load_best, values.load_checkpoint, values.load_last_checkpoint)
    name, file, run = rl_zoo3.utils.get_model_path(number, values.folder, values.algo, values.env, *which)
    print(f"Loading {file}")

    if getattr(values, "num_threads", 0) > 0:
        torch.set_num_threads(values.num_threads)
    set_random_seed(values.seed)

    # The zoo reads both files with YAML's unsafe loader.
    settings = Path(run, values.env)
    for checked in ("config.yml", "args.yml"):
        check_settings(settings / checked)
    hyperparams, stats_path = rl_zoo3.utils.get_saved_hyperparams(str(settings), test_mode=True)

    # Those of the file, of the training's command line, and of this one.
    env_kwargs = dict(hyperparams.get("env_kwargs") or {})
    if (settings / "args.yml").is_file():
        typed = yaml.unsafe_load((settings / "args.yml").read_text())
        env_kwargs.update(typed["env_kwargs"] or {})
    env_kwargs.update(values.env_kwargs or {})

    # The mode is no setting of the task, and is not published.
    shown = dict(env_kwargs)
    if render_mode is not None:
        shown.setdefault("render_mode", render_mode)
    env = make_agents_envs(
        values.env.gym_id,
        values.n_envs,
        hyperparams,
        env_kwargs=shown,
        stats_path=stats_path,
        seed=values.seed,
        monitor_dir=monitor_dir,
    )

    algorithm = rl_zoo3.ALGOS[values.algo]
    options: Hyperparameters = {"device": getattr(values, "device", "auto")}
    if issubclass(algorithm, OffPolicyAlgorithm):
        # The memory of a training is not needed, and not all settings of a buffer go together with a small one.
        options.update(buffer_size=1, optimize_memory_usage=False)
    if for_acting:
        options.update(seed=values.seed, custom_objects=_NOT_FOR_ACTING)
    # Such a buffer needs the environment, also where nothing is trained.
    if not for_acting or "HerReplayBuffer" in str(hyperparams.get("replay_buffer_class")):
        options["env"] = env

    # Processes of environments would stay.
    try:
        model = algorithm.load(file, **options)
    except BaseException:
        env.close()
        raise

    # As in the zoo, agents of these games sample: deterministic ones repeat themselves.
    samples = ExperimentManager.is_atari(values.env.gym_id) or ExperimentManager.is_minigrid(values.env.gym_id)
    is_deterministic = not values.stochastic and (values.deterministic or not samples)
    return Agent(model, env, name, Path(file), Path(run), hyperparams, env_kwargs, is_deterministic)


def enjoy(values: argparse.Namespace) -> None:
    """Show an agent, and print the returns of its episodes.

    :param values: options of the zoo's ``enjoy``
    """
    render_mode: str | None = "human"
    if values.no_render:
        render_mode = None
    agent = load_agent(values, render_mode=render_mode, monitor_dir=values.reward_log or None)
    # In Atari games, a lost life looks like an end, and rewards are clipped. Monitor reports whole games.
    is_atari = ExperimentManager.is_atari(values.env.gym_id)
    returns = _Returns(values.n_envs, only_monitored=is_atari, prints=values.verbose > 0 and values.n_envs == 1)

    steps: Iterable[_Step] = _steps(agent.model, agent.env, values.n_timesteps, agent.is_deterministic)
    if values.progress:
        steps = tqdm(steps, total=values.n_timesteps)
    # After Ctrl-C, the returns so far are printed.
    with contextlib.closing(agent.env), contextlib.suppress(KeyboardInterrupt):
        for rewards, dones, infos in steps:
            if not values.no_render:
                agent.env.render("human")
            returns.add(rewards, dones, infos)

    if values.verbose > 0:
        returns.print_summary(values.n_timesteps)


def record_video(values: argparse.Namespace) -> None:
    """Record an agent.

    :param values: options of the zoo's ``record_video``
    """
    agent = load_agent(values, render_mode="rgb_array")
    env = VecVideoRecorder(
        agent.env,
        values.output_folder or str(agent.run / "videos"),
        record_video_trigger=lambda step: step == 0,
        video_length=values.n_timesteps,
        name_prefix=agent.name,
    )
    with contextlib.closing(env), contextlib.suppress(KeyboardInterrupt):
        for _ in _steps(agent.model, env, values.n_timesteps, agent.is_deterministic):
            pass


def _steps(model: BaseAlgorithm, env: VecEnv, length: int, is_deterministic: bool) -> Iterator[_Step]:
    """Let a model act, and yield the rewards, ends and infos of each step."""
    actor = with_masks(model, env)
    observations: Any = env.reset()
    states = None
    starts = np.ones(env.num_envs, dtype=bool)

    for _ in range(length):
        actions, states = actor.predict(observations, states, starts, is_deterministic)
        observations, rewards, starts, infos = env.step(actions)
        yield rewards, starts, infos


class _Returns:
    """Keep the returns and lengths of all episodes of several environments.

    :param n_envs: number of environments
    :param only_monitored: count only episodes that end for the monitor, too, with the monitor's returns
    :param prints: whether to print each episode
    """

    def __init__(self, n_envs: int, *, only_monitored: bool, prints: bool) -> None:
        self.only_monitored = only_monitored
        self.prints = prints
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.successes: list[bool] = []
        self._running_returns = np.zeros(n_envs)
        self._running_lengths = np.zeros(n_envs, dtype=int)

    def add(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Add a step of all environments."""
        self._running_returns += rewards
        self._running_lengths += 1

        for index in np.flatnonzero(dones):
            info = infos[index]
            monitored = info.get("episode")
            # Wrappers outside of the monitor may change rewards, and are part of the task.
            if not self.only_monitored:
                self._end(self._running_returns[index], self._running_lengths[index])
            elif monitored is not None:
                self._end(monitored["r"], monitored["l"])

            # Of tasks with goals
            if info.get("is_success") is not None:
                self.successes.append(bool(info["is_success"]))
            self._running_returns[index] = 0.0
            self._running_lengths[index] = 0

    def _end(self, total: float, length: int) -> None:
        # NumPy's numbers would print as such.
        self.returns.append(float(total))
        self.lengths.append(int(length))
        if self.prints:
            print(f"Episode Reward: {total:.2f}")
            print("Episode Length", length)

    def print_summary(self, n_timesteps: int) -> None:
        """Print the mean return and length in the zoo's words, or that no episode has ended.

        :param n_timesteps: steps of each environment
        """
        if not self.returns:
            print(f"No episode has ended within {n_timesteps} steps of each environment; use a larger -n")
            return
        if self.successes:
            print(f"Success rate: {100 * np.mean(self.successes):.2f}%")
        print(f"{len(self.returns)} Episodes")
        print(f"Mean reward: {np.mean(self.returns):.2f} +/- {np.std(self.returns):.2f}")
        print(f"Mean episode length: {np.mean(self.lengths):.2f} +/- {np.std(self.lengths):.2f}")
