"""The environments that an agent is evaluated in, and the evaluation."""

import contextlib
import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import (
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    is_vecenv_wrapped,
    unwrap_vec_normalize,
)

from sb3_ano.envs import make_vec_env
from sb3_ano.envs.batched import BatchedVecEnv
from sb3_ano.hub.documents import one_line, shown
from sb3_ano.hub.hyperparameters import plain

# Wrappers under which a task stays the same. SB3 adds VecTransposeImage itself; the spaces are compared afterwards.
_NEUTRAL = {
    "Monitor",
    "OrderEnforcing",
    "PassiveEnvChecker",
    "RecordEpisodeStatistics",
    "RecordVideo",
    "TimeLimit",  # max_episode_steps is compared instead
    "PatchedTimeLimit",  # rl_zoo3 puts it in its place
    "VecCheckNan",
    "VecMonitor",
    "VecTransposeImage",
    "VecVideoRecorder",
    "_LearnersGame",
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What an agent was trained for.

    :param env_id: the id, as ``make_vec_env`` takes it
    :param env_kwargs: settings of the task, as ``make_vec_env`` takes them
    :param backend: backend of the environment that ``make`` returns
    :param additions: wrappers and settings of the agent's environment that ``make`` does not reproduce
    """

    env_id: str
    env_kwargs: dict[str, Any]
    backend: str = "gymnasium"
    additions: tuple[str, ...] = ()

    def make(self, seed: int = 0) -> VecEnv:
        """Make one environment, which renders where gymnasium has the task and can show it."""
        for settings in ({**self.env_kwargs, "render_mode": "rgb_array"}, self.env_kwargs):
            with contextlib.suppress(ValueError, TypeError):
                return make_vec_env(self.env_id, 1, backend="gymnasium", seed=seed, env_kwargs=settings)
        return make_vec_env(self.env_id, 1, seed=seed, env_kwargs=self.env_kwargs)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Returns of an agent's episodes.

    :param returns: sums of the rewards that the environment gave, not normalised
    :param lengths: steps
    :param deterministic: whether the mode of the policy acted, or a sample
    :param seed: of the environments
    """

    returns: list[float]
    lengths: list[int]
    deterministic: bool
    seed: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation over the episodes."""
        return float(np.std(self.returns))


def task_of(
    model: BaseAlgorithm,
    env: str | gym.Env | VecEnv | None = None,
    env_id: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
) -> Task:
    """Find out what an agent was trained for, and whether an id is enough to make its environment.

    :param model: the agent
    :param env: an id, environments, or None for the model's own environment
    :param env_id: the id, if the environment does not know it
    :param env_kwargs: settings of the task; None for those that the environment was made with
    :raises ValueError: if there is no environment or no id, or if no environments are given and the id makes another
        task than the model's environment
    """
    source = model.get_env() if env is None or isinstance(env, str) else env
    chosen = env if isinstance(env, str) else env_id
    if source is None and chosen is None:
        raise ValueError("env=None is not allowed for a model without an environment; pass the id of its environment")
    venv = None if source is None else model._wrap_env(source)
    made_from = None if venv is None else _made_from(venv)
    if chosen is None and made_from is None:
        raise ValueError(
            "env has no registered id, by which others could make it; register it with gymnasium, or pass env= and env_id="
        )
    known_id, settings = made_from or ("", {})
    task = Task(chosen or known_id, dict(settings if env_kwargs is None else env_kwargs))
    _require_printable(task)
    if venv is None:
        return task
    try:
        made = task.make()
    except Exception as error:  # constructors fail in any way with the arguments of another class
        additions, backend = [f"what its id does not make ({one_line(error)})"], task.backend
    else:
        with contextlib.closing(made):
            additions, backend = _differences(venv, made), getattr(made.unwrapped, "backend", task.backend)
    trained_in = model.get_env()
    if additions and (env is None or isinstance(env, str)):
        raise ValueError(
            f"env={task.env_id!r} is not what the model was trained in, because the model's environment has "
            f"{', '.join(additions)}: the score would be that of another task; build that environment and pass it as env="
        )
    if trained_in not in (None, source) and (unlike := _differences(venv, trained_in)):
        warnings.warn(f"env is not what the model was trained in: it has {', '.join(unlike)}", stacklevel=3)
    return dataclasses.replace(task, backend=backend, additions=tuple(additions))


def _require_printable(task: Task) -> None:
    """Complain of what could not be written into files that others read."""
    if not re.fullmatch(r"[\w:./-]+", task.env_id):
        raise ValueError(f"env_id={task.env_id!r} is not allowed; allowed are letters, digits and any of _ : . / -")
    try:
        json.dumps(task.env_kwargs)
    except TypeError as error:
        raise ValueError(f"env_kwargs={task.env_kwargs!r} cannot be written as JSON: {error}; pass env_kwargs=") from None


def _made_from(venv: VecEnv) -> tuple[str, dict[str, Any]] | None:
    """The id and the settings that an environment was made from; None if it does not know them."""
    env_id, settings = getattr(venv.unwrapped, "made_from", (None, {}))
    defaults: dict[str, Any] = {}
    if not isinstance(env_id, str):
        spec = _spec(venv)
        if spec is None:
            return None
        env_id, settings = spec.id, spec.kwargs
        defaults = gym.registry[env_id].kwargs if env_id in gym.registry else {}
    return env_id, {
        name: value
        for name, value in settings.items()
        if name != "render_mode" and not (name in defaults and repr(defaults[name]) == repr(value))
    }


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
    """Wrappers and settings of an environment that differ from those of the one that its id makes."""
    found, expected = _description(venv), _description(made)
    wrappers, usual = found.pop("wrappers"), expected.pop("wrappers")
    differences = [name for name in wrappers if name not in usual]
    differences += [f"no {name}" for name in usual if name not in wrappers]
    if not differences and wrappers != usual:
        differences = [f"another order of {', '.join(wrappers)}"]
    names = [name for name in (found | expected) if found and found.get(name) != expected.get(name)]
    return differences + [f"{name}={found.get(name)}" for name in names]


def _description(venv: VecEnv) -> dict[str, Any]:
    """What makes a task, in a form that can be compared and shown."""
    wrappers = _wrappers(venv)
    if above := _above_normalization(venv):
        wrappers.insert(len(above), "VecNormalize")  # where it stands only matters below others
    base = venv.unwrapped
    if isinstance(base, BatchedVecEnv):
        task = Task(*(_made_from(venv) or (base.env_id, {})))
        # The same task in gymnasium says more, where there is one.
        with contextlib.suppress(ValueError, TypeError), contextlib.closing(task.make()) as made:
            if not isinstance(made.unwrapped, BatchedVecEnv):
                inner = _description(made)
                return {**inner, "wrappers": wrappers + inner["wrappers"]}
        return {"wrappers": wrappers, "task": f"{task.env_id} {task.env_kwargs}"}
    spec = _spec(venv)
    if spec is None:
        return {"wrappers": [*wrappers, "no registered id"]}
    wrappers += [_named(wrapper) for wrapper in reversed(spec.additional_wrappers) if wrapper.name not in _NEUTRAL]
    settings = {name: repr(value) for name, value in spec.kwargs.items() if name != "render_mode"}
    return {
        "wrappers": wrappers,
        "class": str(spec.entry_point),
        "max_episode_steps": spec.max_episode_steps,
        **settings,
    }


def _named(wrapper: WrapperSpec) -> str:
    settings = {name: value for name, value in (wrapper.kwargs or {}).items() if not isinstance(value, gym.Space)}
    parts = [f"{name}={shown(plain(value))}" for name, value in settings.items()]
    return f"{wrapper.name}({', '.join(parts)})" if parts else wrapper.name


def _wrappers(venv: VecEnv) -> list[str]:
    """Names of the vectorized wrappers that change the task, outermost first; statistics of VecNormalize are the agent's."""
    names = []
    while isinstance(venv, VecEnvWrapper):
        name = type(venv).__name__
        if isinstance(venv, VecFrameStack):
            names.append(f"{name}(n_stack={venv.stacked_obs.n_stack})")
        elif not isinstance(venv, VecNormalize) and name not in _NEUTRAL:
            names.append(name)
        venv = venv.venv
    return names


def _above_normalization(venv: VecEnv | None) -> list[str]:
    """Those of the wrappers that stand above a VecNormalize of observations."""
    normalized = None if venv is None else unwrap_vec_normalize(venv)
    if venv is None or normalized is None or not normalized.norm_obs:
        return []
    every, below = _wrappers(venv), _wrappers(normalized)
    return every[: len(every) - len(below)]


@contextlib.contextmanager
def evaluation_env(model: BaseAlgorithm, env: gym.Env | VecEnv | None, task: Task, seed: int = 0) -> Iterator[VecEnv]:
    """Provide environments as the agent knows them, normalized with its own statistics, which stay as they are.

    :param model: the agent
    :param env: environments to use, which are left as they were; None makes one, and closes it
    :param task: what to make
    :param seed: seed of the environment that is made
    :raises ValueError: if observations or actions are not those of the agent, or are normalized in another place
    """
    statistics = model.get_vec_normalize_env()
    made = task.make(seed) if env is None else None
    try:
        venv = model._wrap_env(env if made is None else made)  # type: ignore[arg-type]
        own = unwrap_vec_normalize(venv)
        if own is not None and statistics is None:
            raise ValueError("env is normalized and the model's is not; give the model its environment with set_env first")
        above = _above_normalization(model.get_env())
        if _above_normalization(venv) != above:
            raise ValueError(
                f"env={task.env_id!r} has no VecNormalize in the place where the model's environment has it, below "
                f"{' and '.join(above) or 'no other wrapper'}; pass an environment that is wrapped in the same order as env="
            )
        try:
            if own is None and statistics is not None and statistics.norm_obs:
                venv = _normalized(venv, statistics)
            check_for_correct_spaces(venv, model.observation_space, model.action_space)
        except (ValueError, AssertionError) as error:  # SB3 asserts that normalized observations are of the right shape
            raise ValueError(f"env={task.env_id!r} is not what the model was trained in: {error}; pass it as env=") from None
        if not (is_vecenv_wrapped(venv, VecMonitor) or venv.env_is_wrapped(Monitor)[0]):
            venv = VecMonitor(venv)
        with _frozen(own, statistics):
            yield venv
    finally:
        if made is not None:
            made.close()


def _normalized(venv: VecEnv, statistics: VecNormalize) -> VecNormalize:
    normalized = copy.deepcopy(statistics)  # without its environments, as it is pickled
    normalized.set_venv(venv)
    normalized.training = False
    normalized.norm_reward = False
    return normalized


@contextlib.contextmanager
def _frozen(own: VecNormalize | None, statistics: VecNormalize | None) -> Iterator[None]:
    """Evaluate with the agent's statistics without changing them, and put everything back."""
    if own is None or statistics is None:
        yield
        return
    before = dict(vars(own))
    names = ("norm_obs", "norm_obs_keys", "obs_rms", "clip_obs", "epsilon")
    vars(own).update({name: vars(statistics)[name] for name in names if name in vars(statistics)})
    own.training = own.norm_reward = False
    try:
        yield
    finally:
        vars(own).clear()
        vars(own).update(before)


def evaluate(
    model: BaseAlgorithm, env: VecEnv, n_episodes: int = 10, *, deterministic: bool = True, seed: int = 0
) -> Evaluation:
    """Run whole episodes, as SB3's ``evaluate_policy`` does.

    :param model: the agent
    :param env: environments from :func:`evaluation_env`
    :param n_episodes: number of episodes
    :param deterministic: whether to take the mode of the policy instead of a sample
    :param seed: seed of the environments
    """
    if n_episodes < 1:
        raise ValueError(f"n_eval_episodes={n_episodes} is not allowed; allowed are positive integers")
    env.seed(seed)
    episodes: Any = evaluate_policy(model, env, n_episodes, deterministic, return_episode_rewards=True)
    returns, lengths = episodes
    return Evaluation([float(value) for value in returns], [int(length) for length in lengths], deterministic, seed)
