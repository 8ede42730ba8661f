"""The environments that an agent is judged in, and the judgement."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import Error as GymnasiumError
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize, is_vecenv_wrapped, unwrap_vec_normalize

from sb3_ano.envs import make_vec_env, register_atari


@dataclasses.dataclass(frozen=True)
class Task:
    """What an agent was trained for.

    :param env_id: the registered id
    :param env_kwargs: settings of the task, as ``make_vec_env`` takes them
    :param from_id: whether ``make_vec_env`` makes the agent's environment from these two alone
    """

    env_id: str
    env_kwargs: dict[str, Any]
    from_id: bool = True

    def make(self, seed: int = 0) -> VecEnv:
        """One environment, which renders where gymnasium has the task and can show it."""
        for settings in ({**self.env_kwargs, "render_mode": "rgb_array"}, self.env_kwargs):
            with contextlib.suppress(ValueError, TypeError):
                return make_vec_env(self.env_id, 1, backend="gymnasium", seed=seed, env_kwargs=settings)
        return make_vec_env(self.env_id, 1, seed=seed, env_kwargs=self.env_kwargs)

    def in_gymnasium(self) -> bool:
        """Whether gymnasium knows the id, perhaps with another backend that is faster."""
        try:
            register_atari(self.env_id)
            gym.spec(self.env_id)
        except (GymnasiumError, ModuleNotFoundError, ImportError):
            return False
        return True


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


def task_of(env: str | gym.Env | VecEnv | None, model: BaseAlgorithm, env_kwargs: dict[str, Any] | None) -> Task:
    """The task of an environment, by its registered id.

    :param env: an id, environments, or None for those of the model
    :param model: the agent
    :param env_kwargs: settings of the task, None for those that the environment was made with
    :raises ValueError: if there is no environment, or it has no id
    """
    if isinstance(env, str):
        return Task(env, dict(env_kwargs or {}))
    source = model.get_env() if env is None else env
    if source is None:
        raise ValueError("env=None is not allowed for a model without an environment; pass the id of its environment")
    spec = _spec(source)
    if spec is None:
        raise ValueError(
            "env has no registered id, by which others could make it; register it with gymnasium, or pass env_id="
        )
    env_id, settings = spec.id, {key: value for key, value in spec.kwargs.items() if key != "render_mode"}
    if settings.get("game") and env_id.startswith("ALE/"):  # of Atari games, make_vec_env sets these itself
        env_id = f"{spec.name}NoFrameskip-v4" if settings.get("repeat_action_probability") == 0.0 else env_id
        settings = {}
    return Task(env_id, settings if env_kwargs is None else dict(env_kwargs))


def _spec(env: gym.Env | VecEnv) -> Any:
    if not isinstance(env, VecEnv):
        return env.spec
    try:
        return env.get_attr("spec", [0])[0]
    except AttributeError:
        return None


@contextlib.contextmanager
def evaluation_env(model: BaseAlgorithm, env: gym.Env | VecEnv | None, task: Task, seed: int = 0) -> Iterator[VecEnv]:
    """Environments as the agent knows them: normalised with its own statistics, which stay as they are.

    :param model: the agent
    :param env: environments to use, which are left as they were; None makes one, and closes it
    :param task: what to make
    :param seed: of the environment that is made
    :raises ValueError: if observations or actions are not those of the agent
    """
    statistics = model.get_vec_normalize_env()
    made = task.make(seed) if env is None else None
    try:
        venv = model._wrap_env(env if made is None else made)  # type: ignore[arg-type]
        own = unwrap_vec_normalize(venv)
        if own is not None and statistics is None:
            raise ValueError("env is normalised and the model's is not; give the model its environment with set_env first")
        if own is None and statistics is not None:
            venv = _normalised(venv, statistics)
        try:
            check_for_correct_spaces(venv, model.observation_space, model.action_space)
        except ValueError as error:
            raise ValueError(f"env={task.env_id!r} is not what the model was trained in: {error}; pass it as env=") from None
        if not (is_vecenv_wrapped(venv, VecMonitor) or venv.env_is_wrapped(Monitor)[0]):
            venv = VecMonitor(venv)
        with _frozen(own, statistics):
            yield venv
    finally:
        if made is not None:
            made.close()


def _normalised(venv: VecEnv, statistics: VecNormalize) -> VecNormalize:
    normalised = copy.deepcopy(statistics)  # without its environments, as it is pickled
    normalised.set_venv(venv)
    normalised.training = False
    normalised.norm_reward = False
    return normalised


@contextlib.contextmanager
def _frozen(own: VecNormalize | None, statistics: VecNormalize | None) -> Iterator[None]:
    """Evaluate with the agent's statistics without changing them, and put everything back."""
    if own is None or statistics is None:
        yield
        return
    before = {name: getattr(own, name) for name in ("training", "norm_reward", "obs_rms")}
    own.training = own.norm_reward = False
    own.obs_rms = statistics.obs_rms
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(own, name, value)


def evaluate(
    model: BaseAlgorithm, env: VecEnv, n_episodes: int = 10, *, deterministic: bool = True, seed: int = 0
) -> Evaluation:
    """Run whole episodes, as SB3's ``evaluate_policy`` does.

    :param model: the agent
    :param env: from :func:`evaluation_env`
    :param n_episodes: number of episodes
    :param deterministic: whether to take the mode of the policy in place of a sample
    :param seed: of the environments
    """
    if n_episodes < 1:
        raise ValueError(f"n_eval_episodes={n_episodes} is not allowed; allowed are whole numbers from 1")
    env.seed(seed)
    episodes: Any = evaluate_policy(model, env, n_episodes, deterministic, return_episode_rewards=True)
    returns, lengths = episodes
    return Evaluation([float(value) for value in returns], [int(length) for length in lengths], deterministic, seed)
