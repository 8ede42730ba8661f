"""``train --cluster``: the zoo's training on a Ray cluster, by RLlib."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from gymnasium import spaces
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS
from ray.tune import register_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn
from tqdm import tqdm

from sb3_ano._io import replace_directory, restore, write_file
from sb3_ano._system import require_reachable
from sb3_ano.rllib import SETTINGS, ANOConfig, copy_to_rllib, copy_to_sb3, trained_steps
from sb3_ano.zoo.manager import OwnManager

_EPISODES = "episodes"
_ACTIVATIONS = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.SiLU: "silu"}
_CHECKPOINT_SECONDS = 60.0
# Lost processes and nodes, after each of which the training starts again from its last checkpoint.
_MOST_LOSSES = 10
_LOSSES = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
)
# Parts of a schedule.
_POINTS = 20


class ClusterManager(OwnManager):
    """Run an experiment of the zoo whose environments are stepped, and whose networks are trained, on a Ray cluster.

    :param args: arguments of the zoo's manager
    :param cluster: address of the cluster, ``"auto"``, or an empty string for the one that runs here, or a new one
    :param env_runners: processes that step environments
    :param learners: processes that train; 0 trains in this one
    :param options: keyword arguments of :class:`~sb3_ano.zoo.manager.OwnManager`
    """

    def __init__(self, *args: Any, cluster: str, env_runners: int = 2, learners: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        if cluster not in ("", "auto"):
            require_reachable("--cluster", cluster)
        self._cluster = cluster
        self._env_runners = env_runners
        self._learners = learners

    def check_model(self, model: Any) -> None:
        """Raise ValueError for a model that RLlib cannot express; the message names what it lacks."""
        policy = model.policy
        extractor = policy.mlp_extractor
        space = model.observation_space
        normalized = model.get_vec_normalize_env()
        is_stock = (
            type(policy) is ActorCriticPolicy
            and type(policy.features_extractor) is FlattenExtractor
            and type(extractor) is MlpExtractor
        )
        is_vector = isinstance(space, spaces.Box) and len(space.shape) <= 1 and space.dtype.kind == "f"

        lacking = None
        if not is_stock:
            lacking = f"policy {type(policy).__name__}"
        elif not is_vector:
            lacking = f"observation space {space}"
        elif model.use_sde:
            lacking = "use_sde"
        elif _sizes(extractor.policy_net) != _sizes(extractor.value_net):
            lacking = "net_arch with different sizes for pi and vf"
        elif policy.activation_fn not in _ACTIVATIONS:
            lacking = f"activation_fn {policy.activation_fn.__name__}"
        elif isinstance(model.action_space, spaces.MultiBinary):
            lacking = f"action space {model.action_space}"
        elif self.continue_training and normalized is not None and normalized.norm_obs:
            lacking = "-i with normalized observations; train further without --cluster"
        elif self.frame_stack is not None or self.vec_env_wrapper is not None:
            lacking = "frame_stack and vec_env_wrapper"
        if lacking is not None:
            raise ValueError(f"--cluster trains with RLlib, which cannot express {lacking}")

    def learn(self, model: Any) -> None:
        """Train on the cluster, and copy the result to the model; an interrupt ends the training early.

        :param model: model of the zoo, whose networks the training starts from
        :raises ValueError: if a hyperparameter cannot be expressed in RLlib
        """
        config = self._configure(model)
        # Here, errors of the environment are shown as they are.
        envs = model.env.unwrapped
        envs.reset()
        envs.step(np.stack([model.action_space.sample() for _ in range(envs.num_envs)]))

        self._connect()
        try:
            resume = self.resumed is not None
            for _ in range(_MOST_LOSSES):
                try:
                    return self._train(config.copy(copy_frozen=False), model, resume=resume)
                except _LOSSES as error:  # RLlib replaces environment runners itself, not learners
                    resume = True
                    then = "starting again without one"
                    if (self.checkpoints / "rllib").exists():
                        then = "continuing from the last checkpoint"
                    print(f"A part of the cluster was lost ({type(error).__name__}): {then}")
            raise OSError(f"the cluster lost processes {_MOST_LOSSES} times; --resume continues the run")
        finally:
            ray.shutdown()
            model.env.close()

    def _connect(self) -> None:
        """Connect to the cluster, or start one if none runs here and none was named."""
        needed = self._env_runners + self._learners
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(self._cluster or "auto", **options)
        except ConnectionError as error:
            if self._cluster:
                raise OSError(f"--cluster {self._cluster}: no Ray cluster was found: {error}") from error
            ray.init("local", num_cpus=max(needed, 1), include_dashboard=False, **options)

        available = int(ray.cluster_resources().get("CPU", 0))
        if available < needed:
            ray.shutdown()
            raise ValueError(f"--env-runners and --learners need {needed} processors; the cluster has {available}")

    def _train(self, config: ANOConfig, model: Any, resume: bool) -> None:
        """Train until the end or an interrupt.

        :param config: settings of RLlib
        :param model: model to copy the networks from, and to
        :param resume: whether to restore the last checkpoint, if there is one
        """
        algorithm = config.build_algo()
        checkpoint = self.checkpoints / "rllib"
        try:
            restore(checkpoint)
            if resume and checkpoint.exists():
                algorithm.restore_from_path(str(checkpoint.absolute()))
            else:
                copy_to_rllib(model, algorithm)

            log = Path(self.save_path, "cluster.monitor.csv")
            if trained_steps(algorithm) > 0 and log.exists():
                rows = log.read_text().splitlines(keepends=True)
            else:
                rows = [f"#{json.dumps({'t_start': time.time(), 'env_id': self.env_name.gym_id})}\n", "r,l,t\n"]

            def save() -> None:
                if self.record:
                    with replace_directory(checkpoint) as directory:
                        algorithm.save_to_path(str(directory.absolute()))
                write_file(log, "".join(rows))  # so that it ends where the checkpoint does

            with contextlib.suppress(KeyboardInterrupt):
                self._iterate(algorithm, rows, save)
            save()
            copy_to_sb3(algorithm, model)
        finally:
            algorithm.stop()

    def _iterate(self, algorithm: Any, rows: list[str], save: Callable[[], None]) -> None:
        """Train until the number of steps is reached.

        :param algorithm: algorithm of RLlib
        :param rows: lines of the monitor file, to which the return, the length and the time of each episode are added
        :param save: function that writes checkpoint and log
        """
        start = json.loads(rows[0][1:])["t_start"]
        freq = self.record.get("checkpoint_freq")
        steps = trained_steps(algorithm)
        saved_steps = steps
        saved_time = time.time()
        with tqdm(total=self.n_timesteps, initial=steps, unit="step", disable=not self.show_progress) as progress:
            while steps < self.n_timesteps:
                results = algorithm.train().get(ENV_RUNNER_RESULTS)
                if results is None:  # RLlib replaces environment runners that fail, a few times
                    raise OSError("all environment runners fail; 'train' without --cluster shows the errors of environments")

                # Pairs of return and length, of which RLlib unpacks a list if there is only one
                pairs = np.reshape(results.get(_EPISODES, []), (-1, 2))
                end = time.time() - start
                for total, length in pairs.tolist():
                    rows.append(f"{total:.6f},{int(length)},{end:.6f}\n")
                steps = trained_steps(algorithm)
                progress.update(steps - progress.n)
                progress.set_postfix(reward=f"{results.get('episode_return_mean', math.nan):.1f}")

                is_due = time.time() - saved_time > _CHECKPOINT_SECONDS
                if freq:
                    is_due = steps - saved_steps >= freq
                if is_due:
                    save()
                    saved_steps = steps
                    saved_time = time.time()

    def _configure(self, model: Any) -> ANOConfig:
        """Return RLlib's settings for the hyperparameters of a model; print those that RLlib does not have."""
        normalized = model.get_vec_normalize_env()
        lacking = {
            "clip_range_vf": model.clip_range_vf is not None,
            "target_kl": model.target_kl is not None,
            "normalize_advantage=False": not model.normalize_advantage,
            "norm_reward": normalized is not None and normalized.norm_reward,
            "evaluations (--eval-freq)": self.eval_freq > 0,
        }
        names = ", ".join(name for name, is_set in lacking.items() if is_set)
        if names:
            print(f"RLlib has no {names}: the training goes without")

        # Other processes have not imported what registers the id.
        spec = gym.spec(self.env_name.gym_id)
        env_kwargs = self.env_kwargs
        wrapper = self.env_wrapper or (lambda env: env)
        register_env("sb3_ano", lambda _: wrapper(gym.make(spec, **env_kwargs)))

        runners: dict[str, Any] = {
            "num_env_runners": self._env_runners,
            "num_envs_per_env_runner": max(1, model.n_envs // max(self._env_runners, 1)),
            "sample_timeout_s": None,  # RLlib drops samples of slow environments after a minute by default
        }
        if normalized is not None and normalized.norm_obs:
            clip_obs = normalized.clip_obs
            runners["env_to_module_connector"] = lambda *_, **__: MeanStdFilter(clip_by_value=clip_obs)
        network = {
            "fcnet_hiddens": _sizes(model.policy.mlp_extractor.policy_net),
            "fcnet_activation": _ACTIVATIONS[model.policy.activation_fn],
            "free_log_std": isinstance(model.action_space, spaces.Box),
            "vf_share_layers": False,
        }

        hyperparams = {}
        for name, rllibs_name in SETTINGS.items():
            hyperparams[rllibs_name] = self._points(getattr(model, name), name)
        learners = max(self._learners, 1)
        rollout = model.n_steps * model.n_envs
        return (
            ANOConfig()
            .environment("sb3_ano", normalize_actions=False, clip_actions=True)
            .env_runners(**runners)
            .learners(num_learners=self._learners)
            .rl_module(model_config=DefaultModelConfig(**network))
            .training(
                **hyperparams,
                shaping=model.shaping,
                train_batch_size_per_learner=rollout // learners,
                minibatch_size=max(1, min(model.batch_size, rollout) // learners),
                vf_clip_param=float("inf"),
                grad_clip_by="global_norm",
            )
            .callbacks(_LogEpisodes)
            .debugging(seed=self.seed, log_level="ERROR")
        )

    def _points(self, value: Any, name: str) -> Any:
        """Return a number, or the points of a schedule, between which RLlib interpolates."""
        if value == math.inf:
            return None  # RLlib's gradients are NaN with an infinite limit
        if not callable(value):
            return value

        points = []
        for index in range(_POINTS + 1):
            progress_remaining = 1.0 - index / _POINTS
            points.append([self.n_timesteps * index // _POINTS, max(float(value(progress_remaining)), 0.0)])
        values = {point[1] for point in points}
        if len(values) == 1:
            return values.pop()
        return points


def _sizes(network: nn.Sequential) -> list[int]:
    return [layer.out_features for layer in network if isinstance(layer, nn.Linear)]


class _LogEpisodes(RLlibCallback):
    """Report the return and the length of each episode."""

    def on_episode_end(self, *, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, **_: object) -> None:
        parts = [*(prev_episode_chunks or []), episode]  # an episode is cut where a rollout ends
        total = float(sum(part.get_return() for part in parts))
        length = sum(map(len, parts))
        metrics_logger.log_value(_EPISODES, (total, length), reduce="item_series")
