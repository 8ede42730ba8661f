"""The environment that an agent was trained in, and the agent's evaluation in it."""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize, unwrap_vec_normalize

from sb3_ano._io import now
from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.checkpoints.rng import random_state, set_random_state
from sb3_ano.envs import make_vec_env
from sb3_ano.envs.batched import BatchedVecEnv
from sb3_ano.hub.codec import SCHEDULES, plain
from sb3_ano.hub.documents import one_line, shown
from sb3_ano.hub.safe_format import describe, load_normalization, load_safe

# Wrappers that leave the task as it is. SB3 adds VecTransposeImage itself; the spaces are compared afterwards.
_NEUTRAL = {
    "Monitor",
    "OrderEnforcing",
    "PassiveEnvChecker",
    "RecordEpisodeStatistics",
    "RecordVideo",
    "TimeLimit",  # max_episode_steps is compared instead
    "PatchedTimeLimit",  # rl_zoo3's replacement of TimeLimit
    "VecCheckNan",
    "VecMonitor",
    "VecTransposeImage",
    "VecVideoRecorder",
    "_LearnersGame",
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Describe the environment that an agent was trained in.

    :param env_id: id, as ``make_vec_env`` takes it
    :param env_kwargs: settings of the task, as ``make_vec_env`` takes them
    :param backend: backend of the environment that ``make`` returns
    :param additions: wrappers and settings of the agent's environment that ``make`` does not reproduce
    """

    env_id: str
    env_kwargs: dict[str, Any]
    backend: str = "gymnasium"
    additions: tuple[str, ...] = ()

    def make(self, seed: int = 0) -> VecEnv:
        """Make one environment, which renders if gymnasium has the task and can render it."""
        for settings in ({**self.env_kwargs, "render_mode": "rgb_array"}, self.env_kwargs):
            with contextlib.suppress(ValueError, TypeError):
                return make_vec_env(self.env_id, 1, backend="gymnasium", seed=seed, env_kwargs=settings)
        return make_vec_env(self.env_id, 1, seed=seed, env_kwargs=self.env_kwargs)


def task_of(
    model: BaseAlgorithm,
    env: str | gym.Env | VecEnv | None = None,
    env_id: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
) -> Task:
    """Determine what an agent was trained in, and whether an id is enough to make that environment.

    :param model: agent
    :param env: id, environments, or None for the model's own environment
    :param env_id: id, if the environment does not know it
    :param env_kwargs: settings of the task; None takes those that the environment was made with
    :raises ValueError: if there is no environment or no id, or if no environments are given and the id makes another
        task than the model's environment
    """
    env, env_id = (None, env) if isinstance(env, str) else (env, env_id)
    trained_in = model.get_env()
    source = trained_in if env is None else env
    if source is None and env_id is None:
        raise ValueError("env=None is not allowed for a model without an environment; pass the id of its environment")
    venv = None if source is None else model._wrap_env(source)
    known_id, settings = (None, {}) if venv is None else _made_from(venv)
    env_id = env_id or known_id
    if env_id is None:
        raise ValueError(
            "env has no registered id, by which others could make it; register it with gymnasium, or pass env= and env_id="
        )
    if not re.fullmatch(r"[\w:./-]+", env_id):  # it goes into Markdown, YAML and Python
        raise ValueError(f"env_id={env_id!r} is not allowed; allowed are letters, digits and any of _ : . / -")
    task = Task(env_id, dict(settings if env_kwargs is None else env_kwargs))
    try:
        json.dumps(task.env_kwargs)
    except TypeError as error:
        raise ValueError(f"env_kwargs={task.env_kwargs!r} cannot be written as JSON: {error}; pass env_kwargs=") from None
    if venv is None:
        return task
    backend = task.backend
    try:
        with contextlib.closing(task.make()) as made:
            additions, backend = _differences(venv, made), getattr(made.unwrapped, "backend", backend)
    except Exception as error:  # constructors raise errors of any class for the arguments of another class
        additions = [f"what its id does not make ({one_line(error)})"]
    if additions and env is None:
        raise ValueError(
            f"env={env_id!r} is not what the model was trained in, because the model's environment has "
            f"{', '.join(additions)}: the score would be that of another task; build that environment and pass it as env="
        )
    if trained_in not in (None, source) and (unlike := _differences(venv, trained_in)):
        warnings.warn(f"env is not what the model was trained in: it has {', '.join(unlike)}", stacklevel=3)
    return dataclasses.replace(task, backend=backend, additions=tuple(additions))


def _made_from(venv: VecEnv) -> tuple[str | None, dict[str, Any]]:
    """Return the id and the settings that an environment was made from; no id if it does not know them."""
    env_id, settings = getattr(venv.unwrapped, "made_from", (None, {}))
    if env_id is None and (spec := _spec(venv)) is not None:
        env_id, settings = spec.id, spec.kwargs
    defaults = gym.registry[env_id].kwargs if env_id in gym.registry else {}
    changed = {name: value for name, value in settings.items() if repr(defaults.get(name, ...)) != repr(value)}
    return env_id, {name: value for name, value in changed.items() if name != "render_mode"}


def _spec(venv: VecEnv) -> EnvSpec | None:
    if isinstance(venv.unwrapped, SubprocVecEnv):
        # A worker dies if it has to send what cannot be pickled, such as a wrapper's lambda: look at the names first.
        *names, env_id = venv.env_method("__str__", indices=[0])[0].strip("<>").split("<")
        if wrappers := [name for name in names[:-1] if name not in _NEUTRAL]:
            spec = gym.registry.get(env_id)
            added = tuple(WrapperSpec(name, name, None) for name in reversed(wrappers))
            return spec and dataclasses.replace(spec, additional_wrappers=added)
    try:
        return venv.get_attr("spec", [0])[0]
    except AttributeError:
        return None


def _differences(venv: VecEnv, made: VecEnv) -> list[str]:
    """List what an environment has and another one has not, or else lacks, or else has in another order."""
    found, expected = _description(venv), _description(made)
    added = [part for part in found if part not in expected]
    removed = [f"no {part}" for part in expected if part not in found]
    return added or removed or ([f"another order of {', '.join(found)}"] if found != expected else [])


def _description(venv: VecEnv) -> list[str]:
    """List the wrappers that change the task, outermost first, and its settings."""
    names: list[str] = []
    while isinstance(venv, VecEnvWrapper):
        name = type(venv).__name__
        # The outermost VecNormalize is not part of the task: its statistics are the agent's.
        if name not in _NEUTRAL and (not isinstance(venv, VecNormalize) or (names and venv.norm_obs)):
            stacked = vars(venv).get("stacked_obs")  # of VecFrameStack
            names.append(name if stacked is None else f"{name}(n_stack={stacked.n_stack})")
        venv = venv.venv
    if isinstance(venv, BatchedVecEnv):
        env_id, env_kwargs = _made_from(venv)
        # gymnasium describes the same task in more detail, if it has it.
        twin = Task(env_id or venv.env_id, env_kwargs)
        with contextlib.suppress(ValueError, TypeError), contextlib.closing(twin.make()) as made:
            if not isinstance(made.unwrapped, BatchedVecEnv):
                return names + _description(made)
        return [*names, f"task={twin.env_id} {env_kwargs}"]
    spec = _spec(venv)
    if spec is None:
        return [*names, "no registered id"]
    added = [wrapper for wrapper in reversed(spec.additional_wrappers) if wrapper.name not in _NEUTRAL]
    names += [wrapper.name + (shown(plain(wrapper.kwargs)) if wrapper.kwargs else "") for wrapper in added]
    settings = {"class": spec.entry_point, "max_episode_steps": spec.max_episode_steps, **spec.kwargs}
    return names + [f"{name}={settings[name]}" for name in sorted(settings.keys() - {"render_mode"})]


def custom_objects(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """Return the ``custom_objects`` that ``load_safe`` needs for an agent.

    Schedules are left out, because an agent acts without them.
    """
    objects: dict[str, Any] = {}
    describe(model, objects)
    return {name: value for name, value in objects.items() if name not in SCHEDULES}


@contextlib.contextmanager
def quiet_about_batches() -> Iterator[None]:
    """Ignore minibatches that do not divide a rollout, because an agent with fewer environments than in training only acts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
        yield


@contextlib.contextmanager
def loaded_agent(
    model: ShapedPolicyAlgorithm, folder: Path, env: gym.Env | VecEnv | None, task: Task, seed: int = 0
) -> Iterator[ShapedPolicyAlgorithm]:
    """Load an agent from its safe format as a reader would, with environments to evaluate it in.

    The process-wide random generators, which loading seeds, are left as they were.

    :param model: agent
    :param folder: directory that ``save_safe`` wrote
    :param env: environments to use, which are left normalized as they were; None makes one, and closes it
    :param task: environment to make
    :param seed: seed of the environment that is made
    :raises ValueError: if observations or actions are not those of the agent, or are normalized in another place
    """
    # load_safe limits the size of a stranger's rollout; this one is the author's.
    options: dict[str, Any] = {"custom_objects": {"n_steps": model.n_steps, **custom_objects(model)}, "device": model.device}
    if isinstance(model, ANO):
        options["shaping"] = model.shaping
    generators = random_state()
    source = task.make(seed) if env is None else env
    venv = model._wrap_env(source)
    normalized = unwrap_vec_normalize(venv)
    attributes = {} if normalized is None else dict(vars(normalized))
    try:
        try:
            if normalized is not None:  # for now with the agent's statistics; without a VecNormalize, load_safe adds one
                vars(normalized).update(vars(load_normalization(folder, normalized.venv)))
                normalized.training = normalized.norm_reward = False
            with quiet_about_batches():
                agent = load_safe(folder, venv, **options)
        except ValueError as error:
            raise ValueError(f"env={task.env_id!r} is not what the model was trained in: {error}; pass it as env=") from None
        yield agent
    finally:
        if normalized is not None:
            normalized.__dict__ = attributes
        if env is None:
            source.close()
        set_random_state(generators)


def evaluate(
    model: ShapedPolicyAlgorithm, n_episodes: int = 10, *, deterministic: bool = True, seed: int = 0
) -> dict[str, Any]:
    """Run whole episodes in the agent's environments with SB3's ``evaluate_policy``.

    :param model: agent from :func:`loaded_agent`
    :param n_episodes: number of episodes
    :param deterministic: whether to take the mode of the policy instead of a sample
    :param seed: seed of the environments
    :return: keys of the zoo's ``results.json``, the seed, and return and length of each episode. Returns are sums of the
        environment's own rewards; the standard deviation is that of the episodes
    """
    if n_episodes < 1:
        raise ValueError(f"n_eval_episodes={n_episodes} is not allowed; allowed are positive integers")
    env: Any = model.get_env()
    agent = with_masks(model, env)
    env.seed(seed)
    # Without a Monitor, the rewards are summed up here; they are not normalized.
    episodes: Any = evaluate_policy(agent, env, n_episodes, deterministic, return_episode_rewards=True, warn=False)
    returns, lengths = episodes
    return {
        "mean_reward": float(np.mean(returns)),
        "std_reward": float(np.std(returns)),
        "is_deterministic": deterministic,
        "is_masked": agent is not model,
        "n_eval_episodes": len(returns),
        "eval_datetime": now(),
        "seed": seed,
        "episode_returns": [float(value) for value in returns],
        "episode_lengths": [int(length) for length in lengths],
    }
