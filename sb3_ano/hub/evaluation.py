"""The environment that an agent was trained in, and the agent's evaluation in it."""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import (
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecNormalize,
    unwrap_vec_normalize,
)

from sb3_ano._system import now
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.checkpoints.native import random_state, set_random_state
from sb3_ano.envs import make_vec_env
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.envs.batched import BatchedVecEnv
from sb3_ano.envs.evaluation import evaluate_policy
from sb3_ano.hub.documents import Document, one_line, shown
from sb3_ano.hub.recipe import is_plain, without_machine, without_paths
from sb3_ano.hub.safe_format import load_normalization, load_safe

# Wrappers that leave the task as it is, or that gymnasium, SB3 and the zoo add themselves. The limits of time are compared by
# max_episode_steps, and images that VecTransposeImage turns by the spaces.
_NEUTRAL = {"Monitor", "OrderEnforcing", "PassiveEnvChecker", "PatchedTimeLimit", "RecordEpisodeStatistics", "RecordVideo"}
_NEUTRAL |= {"TimeLimit", "VecCheckNan", "VecMonitor", "VecTransposeImage", "VecVideoRecorder", "_LearnersGame"}


@dataclasses.dataclass(frozen=True)
class Task:
    """Describe the environment that an agent was trained in.

    :param env_id: id, as ``make_vec_env`` takes it
    :param env_kwargs: settings of the task, as ``make_vec_env`` takes them
    :param backend: backend of the environment that ``make`` returns
    :param additions: wrappers and settings of the agent's environment that ``make`` does not reproduce
    :param settings: settings of the training's environments, in the keys of the zoo's hyperparameter files
    :param packages: packages that register the environment, if the author's run tells them
    """

    env_id: str
    env_kwargs: Document
    backend: str = "gymnasium"
    additions: tuple[str, ...] = ()
    settings: Document = dataclasses.field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """Names of files of this machine that the settings of the task name."""
        found: set[str] = set()
        without_paths(self.env_kwargs, found)
        return sorted(found)

    @property
    def published_kwargs(self) -> Document:
        """Settings of the task, with files by name instead of by their place on this machine."""
        published: Document = without_paths(self.env_kwargs, set())
        return published

    def make(self, seed: int = 0) -> VecEnv:
        """Make one environment, which renders if gymnasium has the task and can render it."""
        # First with rendering, for the video
        for settings in ({**self.env_kwargs, "render_mode": "rgb_array"}, self.env_kwargs):
            with contextlib.suppress(ValueError, TypeError), warnings.catch_warnings():
                # Of an environment that takes any mode and renders none; there is no video then.
                warnings.filterwarnings("ignore", ".*render_mode='rgb_array' that is not in the possible render_modes")
                return make_vec_env(self.env_id, 1, backend="gymnasium", seed=seed, env_kwargs=settings)

        # A task that gymnasium does not have
        return make_vec_env(self.env_id, 1, seed=seed, env_kwargs=self.env_kwargs)


def task_of(
    model: BaseAlgorithm,
    env: gym.Env | VecEnv | None = None,
    env_id: str | None = None,
    env_kwargs: Document | None = None,
) -> Task:
    """Determine what an agent was trained in, and whether an id is enough to make that environment.

    :param model: agent
    :param env: environments, or None for the model's own
    :param env_id: id, if the environment does not know it
    :param env_kwargs: settings of the task; None takes those that the environment was made with
    :raises TypeError: if the settings cannot be written as JSON
    :raises ValueError: if there is no environment or no id, or if no environments are given and the id makes another
        task than the model's environment
    """
    venv = model.get_env()
    if env is not None:
        venv = model._wrap_env(env)
    if venv is None:
        raise ValueError("env=None is not allowed for a model without an environment; pass the environment as env=")

    # The user's word comes first.
    known_id, settings = _made_from(venv)
    env_id = env_id or known_id
    if env_id is None and isinstance(venv.unwrapped, SubprocVecEnv):
        raise ValueError(
            "env=None is not allowed for a model whose environments are in a SubprocVecEnv, which cannot be inspected; pass "
            "env=gym.make(id, render_mode='rgb_array')"
        )
    if env_id is None or not re.fullmatch(r"[\w:./-]+", env_id):  # it goes into Markdown, YAML and Python
        raise ValueError(
            f"env_id={env_id!r} is not allowed; allowed are the ids by which others can make the environment, of letters, "
            "digits and any of _ : . / -; register it with gymnasium, or pass env= and env_id="
        )

    kwargs = dict(settings)
    if env_kwargs is not None:
        kwargs = dict(env_kwargs)
    # The config.yml is about the training, even if the evaluation has another environment.
    task = Task(env_id, kwargs, settings=_environment_settings(model.get_env() or venv))
    _require_plain(task.env_kwargs)

    backend = task.backend
    try:
        with contextlib.closing(task.make()) as made:
            additions = _differences(venv, made, task)
            backend = getattr(made.unwrapped, "backend", backend)
    except Exception as error:  # constructors raise errors of any class for the arguments of another class
        # The card shows it if there is an env, and messages may hold paths.
        reason = type(error).__name__
        if env is None:
            reason = one_line(error)
        additions = [f"what its id does not make ({reason})"]

    additions = [without_machine(part) for part in additions]
    if additions and env is None:
        reason = "the score would be that of another task; build that environment and pass it as env="
        if isinstance(venv.unwrapped, SubprocVecEnv):
            reason = "it is in a SubprocVecEnv, which cannot be inspected; build that environment and pass it as "
            reason += f"env=gym.make({env_id!r}, render_mode='rgb_array')"
        # With env=, the score is that of an environment which the card describes.
        raise ValueError(
            f"env={env_id!r} is not what the model was trained in, because the model's environment has "
            f"{', '.join(additions)}: {reason}"
        )
    return dataclasses.replace(task, backend=backend, additions=tuple(additions))


def _require_plain(env_kwargs: Document) -> None:
    """Check that settings can be written down.

    :raises TypeError: if one is no plain value
    """
    for name, value in env_kwargs.items():
        if not is_plain(value):
            allowed = "numbers, texts, and lists and dictionaries of those"
            raise TypeError(
                f"env_kwargs[{name!r}]={shown(value)} cannot be published; allowed are {allowed}; pass env=, and env_kwargs= "
                "without it"
            )


def _made_from(venv: VecEnv) -> tuple[str | None, Document]:
    """Return the id and the settings that an environment was made from; no id if it does not know them."""
    env_id, settings = getattr(venv.unwrapped, "made_from", (None, {}))
    if env_id is None:
        spec = _spec(venv)
        if spec is not None:
            env_id = spec.id
            settings = spec.kwargs

    defaults = {}
    if env_id in gym.registry:
        defaults = gym.registry[env_id].kwargs
    changed = {}
    for name, value in settings.items():
        # As text, because arrays have no single answer to whether they are equal.
        if name != "render_mode" and repr(defaults.get(name, ...)) != repr(value):
            changed[name] = value
    return env_id, changed


def _environment_settings(venv: VecEnv) -> Document:
    """Describe how environments are built as far as the keys of the zoo's hyperparameter files have words for it."""
    env_id, _ = getattr(venv.unwrapped, "made_from", (None, {}))
    backend = getattr(venv.unwrapped, "backend", "gymnasium")
    is_game = env_id is not None and atari_protocol(env_id) is not None
    settings: Document = {}
    is_python = backend in ("gymnasium", "process")
    if is_game or backend != "gymnasium":
        # "auto" also works without EnvPool.
        settings["backend"] = backend if is_python else "auto"
    if is_game or not is_python:
        return settings

    # The zoo stacks frames around everything else.
    while isinstance(venv, VecEnvWrapper) and type(venv).__name__ in _NEUTRAL:
        venv = venv.venv
    if isinstance(venv, VecFrameStack):
        settings["frame_stack"] = venv.stacked_obs.n_stack

    spec = _spec(venv)
    if spec is not None and spec.id in gym.registry:
        limit = spec.max_episode_steps
        if limit != gym.registry[spec.id].max_episode_steps:
            # gymnasium takes -1 for no limit.
            settings["env_kwargs"] = {"max_episode_steps": limit or -1}
    return settings


def _spec(venv: VecEnv) -> EnvSpec | None:
    """Return what gymnasium knows of an environment; None for one that does not tell.

    A worker of SubprocVecEnv is not asked: it dies if it has to send what cannot be pickled, such as a wrapper's lambda.
    """
    if isinstance(venv.unwrapped, SubprocVecEnv):
        return None
    # Environments of other libraries have none.
    try:
        spec: EnvSpec | None = venv.get_attr("spec", [0])[0]
    except AttributeError:
        return None
    return spec


def _differences(venv: VecEnv, made: VecEnv, task: Task) -> list[str]:
    """List what an environment has and that of its task has not, or else what it lacks."""
    found = _wrappers(venv)
    expected: list[str] = []
    if not isinstance(venv.unwrapped, BatchedVecEnv):
        found += _settings(venv)
        expected = _wrappers(made) + _settings(made)
    elif _made_from(venv) != (task.env_id, task.env_kwargs):  # a batch follows the same protocol without wrappers
        found.append(f"task={_made_from(venv)}")

    added = [part for part in found if part not in expected]
    if added:
        return added

    removed = [f"no {part}" for part in expected if part not in found]
    if removed:
        return removed

    if found != expected:
        return [f"another order of {', '.join(found)}"]
    return []


def _wrappers(venv: VecEnv) -> list[str]:
    """List the wrappers of SB3's that change the task, outermost first."""
    names: list[str] = []
    while isinstance(venv, VecEnvWrapper):
        name = type(venv).__name__
        # The outermost VecNormalize is not part of the task: its statistics are the agent's.
        is_of_agent = isinstance(venv, VecNormalize) and not (names and venv.norm_obs)
        if name not in _NEUTRAL and not is_of_agent:
            names.append(name)
        venv = venv.venv
    return names


def _settings(venv: VecEnv) -> list[str]:
    """List the wrappers of gymnasium's that change the task, outermost first, and its settings."""
    spec = _spec(venv)
    if spec is None:
        return ["settings that cannot be read"]

    names = []
    for wrapper in reversed(spec.additional_wrappers):
        if wrapper.name in _NEUTRAL:
            continue
        name = wrapper.name
        if wrapper.kwargs:
            name += shown(wrapper.kwargs)
        names.append(name)

    # The class, because two environments can have the same id.
    settings = {"class": spec.entry_point, "max_episode_steps": spec.max_episode_steps, **spec.kwargs}
    for name in sorted(settings.keys() - {"render_mode"}):
        names.append(f"{name}={settings[name]}")
    return names


@contextlib.contextmanager
def loaded_agent(
    model: ShapedPolicyAlgorithm, objects: Document, folder: Path, env: gym.Env | VecEnv | None, task: Task, seed: int
) -> Iterator[ShapedPolicyAlgorithm]:
    """Load an agent from its safe format as a reader would, with environments to evaluate it in.

    The process-wide random generators, which loading seeds, are left as they were.

    :param model: agent
    :param objects: its parts that are not built in, by dotted name
    :param folder: directory that ``save_safe`` wrote
    :param env: environments to use, which are left normalized as they were; None makes one, and closes it
    :param task: environment to make
    :param seed: seed of the environment that is made
    :raises ValueError: if observations or actions are not those of the agent, or are normalized in another place
    """
    # load_safe limits the size of a stranger's rollout; this one is the author's.
    supplied = {"n_steps": model.n_steps, **objects}
    shaping = getattr(model, "shaping", None)
    generators = random_state()
    source = env
    if source is None:
        source = task.make(seed)
    venv = model._wrap_env(source)

    # For now with the agent's statistics; without a VecNormalize, load_safe adds one.
    normalized = unwrap_vec_normalize(venv)
    attributes: Document = {}
    if normalized is not None:
        attributes = dict(vars(normalized))
    try:
        if normalized is not None:
            stored = vars(load_normalization(folder, normalized.venv))
            vars(normalized).update(stored, training=False, norm_reward=False)
        yield load_safe(folder, venv, device=model.device, shaping=shaping, custom_objects=supplied)
    finally:
        if normalized is not None:
            normalized.__dict__ = attributes
        # What the author passed stays open.
        if env is None:
            source.close()
        set_random_state(generators)


def evaluate(model: ShapedPolicyAlgorithm, n_episodes: int = 10, *, deterministic: bool = True, seed: int = 0) -> Document:
    """Run whole episodes in the agent's environments; see :func:`~sb3_ano.envs.evaluation.evaluate_policy`.

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
