"""Collect rollouts and update on the device of the environments: tensors from the observation to the step of Adam.

Between the first step of a rollout and its end, nothing waits for the device. On CUDA, acting, advantages and minibatches are
recorded as graphs, of which one call replays all kernels. A graph reads and writes the memory that it was recorded with: this
is why tensors are made once here, and filled in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._system import warn_user
from sb3_ano.envs.batched import mapped
from sb3_ano.envs.tensor import TensorObs, TensorStep, to_numpy
from sb3_ano.fast.act import Observations, RolloutCheck, stacked
from sb3_ano.fast.buffer import copy_to, hold_on_device
from sb3_ano.fast.compiled import compiler_options
from sb3_ano.fast.policy import PolicyEvaluation
from sb3_ano.fast.private import without_validation
from sb3_ano.fast.rules import Decisions, device_of

# Calls of a function before it is recorded: compilation, the check of what was compiled, and one as it will be.
_WARMUP = 3

Result = TypeVar("Result")


class Replayed(Generic[Result]):
    """Call a function of tensors that stay in their places; on CUDA, record it as a graph and replay that.

    :param function: function without arguments, whose results stay in their places, too
    :param device: device of the tensors
    """

    def __init__(self, function: Callable[[], Result], device: torch.device) -> None:
        self._function = function
        self._records = device.type == "cuda"
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        self._calls += 1
        if not self._records or self._calls <= _WARMUP:
            return self._function()

        # Recording runs no kernel, so that the first replay does the work of this call.
        if self._graph is None and not self._record():
            return self._function()

        assert self._graph is not None
        self._graph.replay()
        return self._result  # type: ignore[return-value]  # from _record

    def _record(self) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as a user's logger, may use the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = self._function()
        except RuntimeError as error:
            # The function waits for the device somewhere. It runs as it is from now on.
            self._records = False
            torch.cuda.synchronize()
            reason = str(error).strip().splitlines()[0]
            warn_user(f"no CUDA graph could be recorded, and kernels are launched one by one: {reason}")
            return False
        self._graph = graph
        return True


class DeviceRollout:
    """The tensors of a rollout, and the policy that fills them.

    :param model: on-policy algorithm to which no rule for ``"device"`` applies
    :param env: training environment
    :param n_steps: steps of a rollout
    """

    def __init__(self, model: OnPolicyAlgorithm, env: VecEnv, n_steps: int) -> None:
        self.model = model
        # Any: a TensorVecEnv or a VecNormalize around one here, any VecEnv in HostedRollout.
        self.env: Any = env
        self.n_steps = n_steps
        self.n_envs = env.num_envs
        self.device = model.device

        # Tensors like the arrays of the buffer, by their names. reset() makes the arrays, whose shapes and types are read.
        buffer = hold_on_device(model.rollout_buffer)
        buffer.reset()
        self.tensors: dict[str, Any] = {}
        for name in ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "action_masks"):
            if hasattr(buffer, name):
                self.tensors[name] = mapped(self._zeros, getattr(buffer, name))
        for name in ("advantages", "returns", "td_errors"):
            self.tensors[name] = self._zeros(buffer.advantages)
        self._terminated = torch.zeros(n_steps, self.n_envs, dtype=torch.bool, device=self.device)
        self._truncated = torch.zeros_like(self._terminated)

        # Where a recorded graph reads and writes: the current observations and masks, and the number of the step.
        self._current: TensorObs = mapped(lambda rows: rows[0].clone(), self.tensors["observations"])
        self._masks: torch.Tensor | None = None
        if "action_masks" in self.tensors:
            self._masks = torch.ones_like(self.tensors["action_masks"][0])
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None
        space = model.action_space
        if isinstance(space, spaces.Box):
            low = torch.from_numpy(space.low).to(self.device)
            high = torch.from_numpy(space.high).to(self.device)
            self._bounds = (low, high)
        self._last_values = torch.zeros(self.n_envs, device=self.device)
        # On the device, because a Python integer would be a constant of the graph.
        self._position = torch.zeros(1, dtype=torch.long, device=self.device)

        # The object that was given to the model, and what the functions below were made for.
        self._last_obs: Observations | None = None
        self._made_for: object = None
        self._prepare_steps()

    def _prepare_steps(self) -> None:
        """Make room for what only these environments return."""
        # Observations before resets, and whether the environments told them at a step.
        self._final: TensorObs = mapped(torch.zeros_like, self.tensors["observations"])
        self._is_told = np.zeros(self.n_steps, dtype=bool)

    def _zeros(self, array: np.ndarray) -> torch.Tensor:
        # Environment by environment in memory, which is the order of samples in SB3.
        n_steps, n_envs, *shape = array.shape
        dtype = torch.from_numpy(array).dtype
        return torch.zeros(
            n_envs,
            n_steps,
            *shape,
            dtype=dtype,
            device=self.device,
        ).transpose(0, 1)

    def fits(self, env: VecEnv, n_steps: int) -> bool:
        """Tell whether this is for these environments and this number of steps."""
        return env is self.env and n_steps == self.n_steps and self.device == self.model.device

    def collect(
        self,
        callback: BaseCallback,
        check: RolloutCheck | None,
        evaluation: PolicyEvaluation,
        decisions: Decisions,
        use_masking: bool,
    ) -> bool:
        """Collect a rollout and hand it to the buffer.

        :param callback: callback of the training
        :param check: check for NaN and Inf of environments on the host, or None
        :param evaluation: evaluation of the policy
        :param decisions: decisions for the rollout
        :param use_masking: whether to ask the environments for masks
        :return: False if a callback ended the training
        """
        model = self.model
        first = model.num_timesteps
        self._prepare(evaluation, decisions)

        # SB3's loop, with its parts in the same order: masks, action, number of steps, environments, callback.
        with torch.no_grad(), without_validation():
            for position in range(self.n_steps):
                if self._masks is not None and use_masking:
                    copy_to(self._masks, self._allowed())
                actions = self._act()
                model.num_timesteps += self.n_envs
                self._step(position, actions, check)

                if not callback.on_step():
                    # The log has the episodes of a rollout that a callback ends, as in SB3.
                    self._end_episodes()
                    return False

            copy_to(self._last_values, self.evaluation.values(self._current))
            self._bootstrap_truncations()
            self._compute_advantages()

        self._hand_over(first)
        return True

    def _prepare(self, evaluation: PolicyEvaluation, decisions: Decisions) -> None:
        """Take the policy as it is now, and the observations that the rollout starts with."""
        model = self.model
        is_compiled = decisions.compilation is None
        buffer = model.rollout_buffer
        made_for = (
            (evaluation.policy, evaluation.is_bfloat16, is_compiled, decisions.library_code, decisions.channels_last),
            # Recorded graphs hold these numbers.
            (buffer.gamma, buffer.gae_lambda),
        )
        if made_for != self._made_for:
            self._made_for = made_for
            self.evaluation = evaluation
            self._select_functions(is_compiled, decisions.library_code)

        # The tensors are up to date, unless a reset or a checkpoint has given the model other observations.
        if model._last_obs is not self._last_obs:
            copy_to(self._current, model._last_obs)
        self._starts = torch.as_tensor(model._last_episode_starts, dtype=torch.float32, device=self.device)
        self._position.zero_()

    def _select_functions(self, is_compiled: bool, library_code: bool) -> None:
        """Compile the policy if the update is compiled, and make functions that can be recorded."""
        self._policy_step: Callable[[], tuple[torch.Tensor, ...]] = self._evaluate
        # Compiled code draws other random numbers for Bernoulli distributions than PyTorch does.
        draws_the_same = not isinstance(self.model.action_space, spaces.MultiBinary)
        if is_compiled and library_code and draws_the_same:
            n_parameters = sum(parameter.numel() for parameter in self.model.policy.parameters())
            options = compiler_options(self.device, self.n_envs * n_parameters, library_code)
            # The C++ wrapper does not know all random numbers that policies draw.
            options["cpp_wrapper"] = False
            self._compiled = torch.compile(self._evaluate, fullgraph=True, dynamic=False, options=options)
            self._policy_step = self._evaluate_compiled

        # Code that is not known may wait for the device, which cannot be recorded.
        recordable = self.device if library_code else torch.device("cpu")
        self._act = Replayed(self._act_and_store, recordable)
        self._compute_advantages = Replayed(self._advantages, self.device)

    def _evaluate(self) -> tuple[torch.Tensor, ...]:
        """Return actions of the policy, those for the environments, values and log-probabilities."""
        actions, values, log_probs = self.evaluation.act(self._current, self._masks)
        if torch.compiler.is_compiling():
            # The distribution belongs to the policy: no tensor of the graph may stay behind in it.
            self.evaluation.policy.action_dist.distribution = None  # type: ignore[assignment]

        # torch.clamp with tensors, written as the rollout on the host has it.
        in_bounds = actions
        if self._bounds is not None:
            low, high = self._bounds
            in_bounds = torch.maximum(torch.minimum(actions, high), low)
        return actions, in_bounds, values.flatten(), log_probs

    def _evaluate_compiled(self) -> tuple[torch.Tensor, ...]:
        """Do the same in compiled code, or without it if that fails."""
        try:
            return self._compiled()
        except Exception as error:  # a missing compiler, or code that cannot be traced
            self._policy_step = self._evaluate
            lines = str(error).strip().splitlines() or [""]
            reason = lines[0]
            warn_user(f"torch_compile: acting cannot be compiled and runs without ({reason})")
            return self._evaluate()

    def _act_and_store(self) -> torch.Tensor:
        """Act on the current observations, store all that is known of the step, and return the actions to take."""
        actions, in_bounds, values, log_probs = self._policy_step()
        stored = {
            "actions": actions,
            "values": values,
            "log_probs": log_probs,
            # Before the environments overwrite them.
            "observations": self._current,
        }
        if self._masks is not None:
            stored["action_masks"] = self._masks
        for name, value in stored.items():
            self._put(self.tensors[name], value)
        # Part of the graph, so that each replay writes the next row.
        self._position.add_(1)
        return in_bounds

    def _put(self, rows: Any, value: Any) -> None:
        if isinstance(rows, dict):
            for key, part in rows.items():
                self._put(part, value[key])
        else:
            # Not rows[position] = ..., which would wait for the number.
            row = value.reshape(1, *rows.shape[1:]).to(rows.dtype)
            rows.index_copy_(0, self._position, row)

    def _allowed(self) -> torch.Tensor | np.ndarray:
        """Return the masks of the environments."""
        return self.env.action_masks()

    def _step(self, position: int, actions: torch.Tensor, check: RolloutCheck | None) -> None:
        """Step the environments, and store what they return."""
        # Without the check of each step: the whole rollout is looked at when it is handed over.
        step: TensorStep = self.env.step_tensors(actions)
        self.tensors["rewards"][position].copy_(step.rewards)
        self._terminated[position].copy_(step.terminated)
        self._truncated[position].copy_(step.truncated)
        self._is_told[position] = step.final_observations is not None
        if step.final_observations is not None:
            row = mapped(lambda rows: rows[position], self._final)
            copy_to(row, step.final_observations)
        copy_to(self._current, step.observations)

    def _end_episodes(self) -> None:
        """Give the episodes that ended to the model."""
        # Once per rollout, because reading returns and lengths waits for the device.
        episodes = self.model.ep_info_buffer
        assert episodes is not None  # made by learn
        for _, episode in self.env.end_rollout():
            episodes.append(episode)

    def _bootstrap_truncations(self) -> None:
        """Add the discounted values of the last observations of episodes that were truncated, not terminated."""
        # Without a final observation, the value of the step's own observation stands for the one that follows it.
        truncated = self._truncated & ~self._terminated
        is_told = torch.from_numpy(self._is_told).to(self.device)[:, None]
        untold = (truncated & ~is_told).float()
        self.tensors["rewards"].addcmul_(self.tensors["values"], untold, value=self.model.gamma)

        # Waits for the device once, so that only those values are computed that are needed.
        indices = (truncated & is_told).nonzero(as_tuple=True)
        if len(indices[0]) > 0:
            final = mapped(lambda rows: rows[indices], self._final)
            self._bootstrap(final, indices)

    def _bootstrap(self, final: TensorObs, indices: Sequence[torch.Tensor]) -> None:
        """Add the discounted values of observations to the rewards of some steps and environments."""
        values = self.evaluation.values(final).flatten()
        discounted = self.model.gamma * values
        self.tensors["rewards"].index_put_(tuple(indices), discounted, accumulate=True)

    def _advantages(self) -> None:
        """Compute advantages, lambda-returns and TD errors as the buffer does."""
        tensors = self.tensors
        gamma = self.model.rollout_buffer.gamma
        ends = (self._terminated | self._truncated).float()
        tensors["episode_starts"][1:].copy_(ends[:-1])

        # gamma V(s') (1 - done) + r - V(s), in place in the copy that cat() makes.
        following = torch.cat([tensors["values"][1:], self._last_values[None]])
        errors = following.mul_(gamma).mul_(1.0 - ends).add_(tensors["rewards"]).sub_(tensors["values"])
        tensors["td_errors"].copy_(errors)

        # The recursion of compute_advantages in collect.py. One kernel per step: a graph replays all of them in one call.
        decay = (1.0 - ends) * (gamma * self.model.rollout_buffer.gae_lambda)
        advantages = tensors["advantages"]
        advantages[-1].copy_(errors[-1])
        for position in range(self.n_steps - 2, -1, -1):
            torch.addcmul(errors[position], decay[position], advantages[position + 1], out=advantages[position])
        torch.add(advantages, tensors["values"], out=tensors["returns"])

    def _hand_over(self, first: int) -> None:
        """Give the rollout to the buffer, and what SB3 keeps between rollouts to the model.

        :param first: number of steps before the rollout
        """
        model = self.model
        self.tensors["episode_starts"][0].copy_(self._starts)
        if getattr(model, "check_finite", False):
            self._require_finite(first)

        self._end_episodes()
        # Arrays, because callbacks, evaluation and the next call of learn read them as SB3 has them.
        self._last_obs = to_numpy(self._current)
        model._last_obs = self._last_obs
        model._last_episode_starts = to_numpy(self._terminated[-1] | self._truncated[-1])
        hold_on_device(model.rollout_buffer).hold(self.tensors)

    def _require_finite(self, first: int) -> None:
        """Look at the whole rollout at once, and find environment and step if there is NaN or Inf."""
        observations = self.tensors["observations"]
        parts = {"observation": observations}
        if isinstance(observations, dict):
            parts = dict(observations)
        parts["reward"] = self.tensors["rewards"]
        parts["action of the policy"] = self.tensors["actions"]

        # A sum is NaN or Inf if a summand is: one wait for all parts.
        finite = [torch.isfinite(part.sum(dtype=torch.float32)) for part in parts.values()]
        if bool(torch.stack(finite).all()):
            return

        places = []
        for name, part in parts.items():
            numbers = part.reshape(self.n_steps, self.n_envs, -1)
            is_bad = ~torch.isfinite(numbers).all(dim=-1)
            for step, environment in is_bad.nonzero().tolist():
                places.append((step, environment, name))

        # Finite numbers with a sum that overflows have no place, and are left to the policy.
        if not places:
            return
        # The first step, and there the observation, which is the reason for the others: min() keeps the first of equals.
        step, environment, name = min(places, key=lambda place: place[0])
        raise ValueError(
            f"NaN or Inf in the {name} of environment {environment} at step {first // self.n_envs + step} of the training "
            "(environments count from 0, steps for each environment); observations and rewards must be finite, or "
            "check_finite=False leaves them to the policy"
        )


class HostedRollout(DeviceRollout):
    """The rollout of ordinary environments on the host, with a policy on a device.

    A step waits for the actions, and copies observations through one buffer in pinned memory. Rewards and ends are copied at
    the end of the rollout.
    """

    def _prepare_steps(self) -> None:
        is_cuda = self.device.type == "cuda"

        def on_host(rows: torch.Tensor) -> torch.Tensor:
            return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=is_cuda)

        # Pinned memory is copied to the device without waiting. One buffer is enough, because each step waits for actions.
        self._staged: TensorObs = mapped(on_host, self._current)
        # Copied at the end of the rollout, all at once.
        self._rewards = np.zeros((self.n_steps, self.n_envs), dtype=np.float32)
        self._ended = np.zeros((self.n_steps, self.n_envs), dtype=bool)
        # Steps, environments and last observations of truncated episodes.
        self._truncations: list[tuple[int, int, Observations]] = []

    def _allowed(self) -> torch.Tensor | np.ndarray:
        return np.stack(self.env.env_method("action_masks"))

    def _step(self, position: int, actions: torch.Tensor, check: RolloutCheck | None) -> None:
        # This waits for everything before it, so that the staged observations have been copied, too.
        taken = actions.cpu().numpy()
        observations, rewards, dones, infos = self.env.step(taken)
        if check is not None:
            check.step(taken, observations, rewards)
            check.ends(dones, infos)
        self.model._update_info_buffer(infos, dones)

        self._rewards[position] = rewards
        self._ended[position] = dones
        for index in np.flatnonzero(dones).tolist():
            final = infos[index].get("terminal_observation")
            if final is not None and infos[index].get("TimeLimit.truncated", False):
                self._truncations.append((position, index, final))

        copy_to(self._staged, observations)
        copy_to(self._current, self._staged)

    def _end_episodes(self) -> None:
        # The model has the episodes already, from _update_info_buffer.
        self._truncations = []

    def _bootstrap_truncations(self) -> None:
        copy_to(self.tensors["rewards"], self._rewards)
        # Both kinds of ends are equal from here on.
        copy_to(self._terminated, self._ended)
        if not self._truncations:
            return

        steps, environments, finals = zip(*self._truncations, strict=True)
        final = mapped(lambda rows: torch.from_numpy(rows).to(self.device), stacked(finals))
        indices = [torch.tensor(rows, device=self.device) for rows in (steps, environments)]
        self._bootstrap(final, indices)


def make_rollout(model: OnPolicyAlgorithm, env: VecEnv, n_steps: int) -> DeviceRollout:
    """Make the rollout for environments on the device, or on the host."""
    if device_of(env) is None:
        return HostedRollout(model, env, n_steps)
    return DeviceRollout(model, env, n_steps)
