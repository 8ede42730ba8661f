"""One minibatch: its samples, the loss, the gradient, a step of Adam, and what the log says about it.

An *update* is one call of ``train``. It has ``n_epochs`` *epochs*, each of which goes through the rollout once, in
*minibatches*. A *step* here is what one minibatch does: loss, gradient, clip by norm, Adam. It is written twice, because the
compiled one may not wait for a decision: :class:`EagerStep` branches in Python, ``make_step`` in ``compiled.py`` multiplies by
0 or 1. Both take their loss from :func:`minibatch_loss`, and ``tests/algorithms/test_compile.py`` compares the parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import TensorDict
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.adam import adam

from sb3_ano.fast.policy import PolicyEvaluation
from sb3_ano.fast.private import norms, scale

# Bytes of images up to which they are copied to be turned to channels_last once. SB3 copies no rollout of one environment.
_TURNED = 2**25


class RolloutSamples(NamedTuple):
    """Samples of a rollout: the fields of SB3's ``RolloutBufferSamples``, and what some algorithms have in addition.

    :param observations: ``(batch, ...)``, or a dictionary of those
    :param actions: ``(batch, action_dim)``
    :param old_values: values at collection, ``(batch,)``
    :param old_log_prob: log-probabilities at collection, ``(batch,)``
    :param advantages: generalized advantage estimates, ``(batch,)``
    :param returns: lambda-returns, ``(batch,)``
    :param action_masks: actions that were allowed, ``(batch, n)``, or None
    :param td_errors: one-step TD errors, ``(batch,)``, for algorithms that ask for them, or None
    """

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    action_masks: torch.Tensor | None = None
    td_errors: torch.Tensor | None = None


class SequenceSamples(NamedTuple):
    """Samples for an LSTM: padded sequences for the policy, and numbers for the loss, which have no padding.

    :param observations: ``(n_sequences * length, ...)``, or a dictionary of those
    :param actions: ``(n_sequences * length, action_dim)``
    :param old_values: ``(batch,)``, as are the next three
    :param lstm_states: states before each sequence, sb3-contrib's ``RNNStates``
    :param episode_starts: 1 where an episode starts, ``(n_sequences * length,)``
    :param present: whether a step is no padding, bool ``(n_sequences * length,)``
    :param action_masks: actions that were allowed, ``(n_sequences * length, n)``, or None
    """

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    lstm_states: Any
    episode_starts: torch.Tensor
    present: torch.Tensor
    action_masks: torch.Tensor | None = None


class ClipRange(NamedTuple):
    """Radii of the current update, 0-d tensors.

    :param low: radius below 1, acting where ``A < 0``
    :param high: radius above 1, acting where ``A >= 0``
    """

    low: torch.Tensor
    high: torch.Tensor


class Numbers(NamedTuple):
    """The numbers of an update, read once from the schedules; the steps get them as :class:`NumberTensors`.

    :param clip_range: radius below 1
    :param clip_range_high: radius above 1
    :param clip_range_vf: radius of the value clip
    :param ent_coef: weight of the entropy loss
    :param vf_coef: weight of the value loss
    :param max_grad_norm: norm to which a longer gradient is scaled down
    :param max_kl: limit of the KL divergence; a minibatch beyond it makes no step and ends the update
    """

    clip_range: float
    clip_range_high: float
    clip_range_vf: float
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    max_kl: float


class NumberTensors(NamedTuple):
    """The same numbers as 0-d float32 tensors, because a Python float would be a constant of compiled code.

    A schedule would then recompile the step at every update.
    """

    clip_range: torch.Tensor
    clip_range_high: torch.Tensor
    clip_range_vf: torch.Tensor
    ent_coef: torch.Tensor
    vf_coef: torch.Tensor
    max_grad_norm: torch.Tensor
    max_kl: torch.Tensor

    @classmethod
    def on_device(cls, numbers: Numbers, device: torch.device) -> Self:
        """Copy the numbers of an update to a device, all in one copy."""
        tensor = torch.tensor(numbers, dtype=torch.float32, device=device)
        return cls(*tensor.unbind())


#: ``policy_loss(log_ratio, advantages, clip_range, samples)``, a scalar to be minimized.
PolicyLoss: TypeAlias = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        ClipRange,
        Any,
    ],
    torch.Tensor,
]


class Settings(NamedTuple):
    """The properties of an algorithm, besides numbers, that a step is made for.

    :param policy_loss: surrogate of the algorithm, a function of tensors
    :param clip_value: whether the value function is clipped
    :param normalize_advantage: whether to normalize the advantages of each minibatch
    :param is_discrete: whether actions are indices
    :param skips_non_finite: whether a minibatch whose loss or gradient is NaN or Inf changes nothing
    """

    policy_loss: PolicyLoss
    clip_value: bool
    normalize_advantage: bool
    is_discrete: bool
    skips_non_finite: bool


class Losses(NamedTuple):
    """The loss of a minibatch, its three terms, and its samples' log-ratios and advantages, ``(batch,)``."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy_loss: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor


# What the log gets of a minibatch is computed in two places. If the rollout is on a device, summarize() computes it there,
# because NumPy would wait for the device. Otherwise UpdateStatistics computes it in NumPy for many minibatches at once,
# because a call of PyTorch costs more than the numbers of 64 samples. Both fill the columns _COLUMNS.

#: Names of the numbers in :attr:`StepResult.scalars`.
SCALARS = ("policy_loss", "value_loss", "entropy_loss", "loss", "grad_norm")


class StepResult(NamedTuple):
    """The outcome of a minibatch for the log, detached.

    :param scalars: the numbers named in :data:`SCALARS`, the norm before clipping, ``(5,)``
    :param log_ratio: logarithms of the probability ratios, ``(batch,)``
    :param advantages: advantages that the loss was computed with, ``(batch,)``
    :param log_ratio_grad: gradient of the loss by each log-ratio, ``(batch,)``
    :param skipped: 0-d bool; True if loss or gradient is not finite, and then nothing was changed
    :param stop: 0-d bool; True if the KL divergence exceeds its limit, and then nothing was changed
    """

    scalars: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    log_ratio_grad: torch.Tensor
    skipped: torch.Tensor
    stop: torch.Tensor


class StepSummary(NamedTuple):
    """The numbers of a minibatch that are kept, computed on the device.

    :param numbers: one number for each name in ``_COLUMNS``, ``(14,)``
    :param log_ratio: logarithms of the probability ratios, ``(batch,)``
    :param stop: 0-d bool, as of :class:`StepResult`
    """

    numbers: torch.Tensor
    log_ratio: torch.Tensor
    stop: torch.Tensor


def summarize(result: StepResult, numbers: NumberTensors) -> StepSummary:
    """Compute the numbers of a minibatch without waiting for the device; ``UpdateStatistics`` does the same in NumPy.

    :param result: outcome of the minibatch
    :param numbers: numbers of the update
    """
    log_ratio = result.log_ratio
    ratio = log_ratio.exp()
    # Float, not bool: they are averaged, and multiply gradients.
    above = (ratio > 1.0 + numbers.clip_range_high).float()
    below = (ratio < 1.0 - numbers.clip_range).float()

    # PPO's clip acts above the interval where A >= 0, and below it elsewhere.
    clipped = torch.where(result.advantages >= 0.0, above, below)
    gradient = result.log_ratio_grad.abs()

    # After the scalars, in the order of _COLUMNS.
    columns = [
        result.skipped.float(),
        result.stop.float(),
        (ratio - 1.0 - log_ratio).mean(),  # kl
        ratio.mean(),
        ratio.max(),
        above.mean(),
        below.mean(),
        (clipped * gradient).sum(),  # discarded
        gradient.sum(),
    ]
    return StepSummary(torch.cat([result.scalars, torch.stack(columns)]), log_ratio, result.stop)


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute Schulman's estimate ``mean(r - 1 - log r)`` of the KL divergence from the rollout's policy, a scalar."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def minibatch_loss(
    evaluation: PolicyEvaluation,
    settings: Settings,
    samples: Any,
    numbers: NumberTensors,
) -> Losses:
    """Compute the loss of Algorithm 1 of the paper, with SB3's value loss, twice the paper's, value clip and entropy.

    It stands for the body of the loop over minibatches in SB3's ``PPO.train``, and is traced when the update is compiled:
    branches may depend on ``settings`` and shapes, never on the values of tensors.

    :param evaluation: evaluation of the policy
    :param settings: properties of the algorithm
    :param samples: minibatch, also of a custom buffer's own type
    :param numbers: numbers of the update
    """
    actions = samples.actions
    if settings.is_discrete:
        # The buffer keeps indices as floats, ``(batch, 1)``.
        actions = actions.long().flatten()

    values, log_prob, entropy = evaluation(samples, actions)
    values = values.flatten()

    # As in SB3, one sample is not normalized: its standard deviation is NaN.
    advantages = samples.advantages
    if settings.normalize_advantage and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # The logarithm, not the ratio as in SB3: exp() overflows first, and a shape decides itself what it does with large ratios.
    log_ratio = log_prob - samples.old_log_prob
    clip_range = ClipRange(numbers.clip_range, numbers.clip_range_high)
    policy_loss = settings.policy_loss(log_ratio, advantages, clip_range, samples)

    if settings.clip_value:
        # SB3's clip: the change of the value is limited. The official scripts take the maximum of both losses.
        change = (values - samples.old_values).clamp(-numbers.clip_range_vf, numbers.clip_range_vf)
        values = samples.old_values + change
    value_loss = F.mse_loss(samples.returns, values)

    # Without a closed form, -log_prob of the taken actions estimates the entropy.
    entropy_loss = log_prob.mean() if entropy is None else -entropy.mean()

    loss = policy_loss + numbers.ent_coef * entropy_loss + numbers.vf_coef * value_loss
    return Losses(loss, policy_loss, value_loss, entropy_loss, log_ratio, advantages)


def step_result(
    losses: Losses,
    norm: torch.Tensor,
    log_ratio_grad: torch.Tensor | None,
    stop: torch.Tensor,
) -> StepResult:
    """Collect what the log needs of a minibatch.

    :param losses: loss of the minibatch, its terms and samples
    :param norm: norm of the gradient before clipping
    :param log_ratio_grad: gradient of the loss by each log-ratio, or None
    :param stop: whether the KL divergence exceeds its limit
    """
    # Detached, or the results that are kept would keep the graphs of their minibatches.
    loss = losses.loss.detach()
    policy_loss = losses.policy_loss.detach()
    value_loss = losses.value_loss.detach()
    entropy_loss = losses.entropy_loss.detach()
    log_ratio = losses.log_ratio.detach()

    scalars = torch.stack([policy_loss, value_loss, entropy_loss, loss, norm])
    if log_ratio_grad is None:
        # A frozen actor has no gradient, nor has a minibatch that ends the update.
        gradient = torch.zeros_like(log_ratio)
    else:
        gradient = log_ratio_grad.detach()

    # The sum is NaN or Inf if one of them is. A minibatch beyond the limit of the KL counts as stopped, whatever its loss is.
    skipped = ~(torch.isfinite(loss + norm) | stop)
    return StepResult(
        scalars,
        log_ratio,
        losses.advantages.detach(),
        gradient,
        skipped,
        stop,
    )


class EagerStep:
    """Make the steps of one update as SB3 does, so that hooks act.

    :param policy: actor and critic, with its optimizer
    :param evaluation: evaluation of the policy
    :param settings: properties of the algorithm
    :param numbers: numbers of the update
    :param is_fused: whether PyTorch's fused Adam gives what the optimizer's ``step`` does
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        evaluation: PolicyEvaluation,
        settings: Settings,
        numbers: NumberTensors,
        is_fused: bool,
    ) -> None:
        self._policy = policy
        self._optimizer = policy.optimizer
        self._evaluation = evaluation
        self._settings = settings
        self._numbers = numbers
        self._fused = FusedAdam(policy.optimizer) if is_fused else None

    def __call__(self, rollout: Any, indices: torch.Tensor | None) -> StepResult:
        """Make one step on ``rollout[indices]``, or on all of ``rollout`` if ``indices`` is None."""
        samples = rollout
        if indices is not None:
            samples = gather(rollout, indices)
        losses = minibatch_loss(self._evaluation, self._settings, samples, self._numbers)
        loss = losses.loss

        # First stop, then clip, then skip, as in make_step of compiled.py. SB3 stops before the backward pass, too, so that
        # parameters keep the gradients of the minibatch before.
        stop = approximate_kl(losses.log_ratio.detach()) > self._numbers.max_kl
        if bool(stop):
            no_norm = torch.zeros_like(loss.detach())
            return step_result(losses, no_norm, None, stop)

        self._optimizer.zero_grad()
        # The gradient by each log-ratio is a by-product of the same backward pass, for ``ppo_discarded_gradient``.
        if losses.log_ratio.requires_grad:
            losses.log_ratio.retain_grad()
        # backward() instead of autograd.grad(): hooks of parameters act, and parameters without a gradient keep None.
        loss.backward()

        limit = self._numbers.max_grad_norm
        skips_non_finite = self._settings.skips_non_finite
        if self._fused is not None:
            norm = self._fused.step(loss.detach(), limit, skips_non_finite)
        else:
            # SB3's own two lines, for any optimizer.
            norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), limit.item())
            if not skips_non_finite or bool(torch.isfinite(loss.detach() + norm)):
                self._optimizer.step()
            else:
                # No gradient of NaN stays behind for a callback to find.
                self._optimizer.zero_grad()

        return step_result(losses, norm, losses.log_ratio.grad, stop)


class FusedAdam:
    """Clip gradients by norm and make the step of a plain Adam on the CPU by PyTorch's fused kernel.

    That does what ``clip_grad_norm_`` and the optimizer's ``step`` do, with a tenth of the calls. One is made for each update.

    :param optimizer: optimizer of the policy, to which no rule for ``"optimizer"`` applies
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        group = optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        self._options = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": 0.0,
        }
        self._trained = trained_parameters(optimizer)
        # Those that have a gradient, their moments, and their numbers of steps. They are kept from minibatch to minibatch,
        # because collecting them takes time at every step.
        self._parameters: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._second: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    @torch.no_grad()
    def step(
        self,
        loss: torch.Tensor,
        max_norm: torch.Tensor,
        skips_non_finite: bool,
    ) -> torch.Tensor:
        """Make a step; parameters without a gradient are left alone, as in PyTorch.

        :param loss: loss whose gradient the parameters have
        :param max_norm: norm to which a longer gradient is scaled down
        :param skips_non_finite: whether a loss or gradient that is NaN or Inf changes nothing
        :return: norm of the gradient before clipping
        """
        gradients = []
        for parameter in self._trained:
            if parameter.grad is not None:
                gradients.append(parameter.grad)

        # The norm of the norms, as clip_grad_norm_ computes it, so that rounding is the same.
        norm = torch.linalg.vector_norm(torch.stack(norms(gradients)))
        if skips_non_finite and not bool(torch.isfinite(loss + norm)):
            self._optimizer.zero_grad()
            return norm

        # clip_grad_norm_ multiplies by 1 if there is nothing to clip. 1e-6 is its constant, too.
        if bool(norm + 1e-6 > max_norm):
            scale(gradients, max_norm / (norm + 1e-6))

        # Which parameters have a gradient changes only if some have none.
        if len(self._parameters) != len(gradients) or len(gradients) < len(self._trained):
            self._parameters = []
            self._first = []
            self._second = []
            self._counts = []
            for parameter in self._trained:
                if parameter.grad is not None:
                    state = adam_state(self._optimizer, parameter)
                    self._parameters.append(parameter)
                    self._first.append(state["exp_avg"])
                    self._second.append(state["exp_avg_sq"])
                    self._counts.append(state["step"])

        adam(
            self._parameters,
            gradients,
            self._first,
            self._second,
            [],  # of AMSGrad
            self._counts,
            fused=True,
            amsgrad=False,
            maximize=False,
            **self._options,
        )
        return norm


def trained_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of the first group that are not frozen."""
    # The only group: a rule for "optimizer" applies to others.
    trained = []
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.requires_grad:
            trained.append(parameter)
    return trained


def adam_state(optimizer: Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return Adam's state of a parameter, made as Adam makes it before the first step."""
    # A defaultdict: this makes an empty state, as Adam's own step does.
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif state["step"].dtype != torch.float32:
        # PyTorch counts in its default type, the fused kernel in float32 only.
        state["step"] = state["step"].to(torch.float32)
    return state


# Samples


def rollout_tensors(buffer: RolloutBuffer, channels_last: bool, with_td_errors: bool) -> RolloutSamples:
    """Return a rollout as tensors ``(n_envs * n_steps, ...)``, environment by environment, on the buffer's device.

    On the CPU they share their memory with the buffer's arrays, which have these shapes from then on, as SB3 leaves them.

    :param buffer: rollout buffer of SB3, or one with masks of sb3-contrib
    :param channels_last: whether images get that memory format, where it takes no more memory than SB3 does
    :param with_td_errors: whether to compute one-step TD errors
    :raises ValueError: if the buffer is not full
    """
    # SB3's get() has an assert here.
    if not buffer.full:
        raise ValueError(f"the rollout buffer holds {buffer.pos} of {buffer.buffer_size} steps; collect a whole rollout first")

    # SB3's flag: the arrays of this rollout are rearranged once, by whoever reads them first.
    if not buffer.generator_ready:
        if isinstance(buffer.observations, dict):
            for key, array in buffer.observations.items():
                buffer.observations[key] = _environment_major(array, channels_last)
        else:
            buffer.observations = _environment_major(buffer.observations, channels_last)
        buffer.actions = _environment_major(buffer.actions)
        buffer.values = _environment_major(buffer.values)
        buffer.log_probs = _environment_major(buffer.log_probs)
        buffer.advantages = _environment_major(buffer.advantages)
        buffer.returns = _environment_major(buffer.returns)
        if hasattr(buffer, "action_masks"):
            buffer.action_masks = _environment_major(buffer.action_masks)
        buffer.generator_ready = True

    # On the CPU, neither from_numpy() nor to() copies. SB3's get() copies each minibatch.
    device = buffer.device
    observations: torch.Tensor | TensorDict
    if isinstance(buffer.observations, dict):
        observations = {}
        for key, array in buffer.observations.items():
            observations[key] = torch.from_numpy(array).to(device)
    else:
        observations = torch.from_numpy(buffer.observations).to(device)

    action_masks = None
    if hasattr(buffer, "action_masks"):
        action_masks = torch.from_numpy(buffer.action_masks).to(device)
    td_errors = None
    if with_td_errors:
        td_errors = torch.from_numpy(_td_errors(buffer)).to(device)

    return RolloutSamples(
        observations=observations,
        actions=torch.from_numpy(buffer.actions).to(device),
        old_values=torch.from_numpy(buffer.values).to(device).flatten(),
        old_log_prob=torch.from_numpy(buffer.log_probs).to(device).flatten(),
        advantages=torch.from_numpy(buffer.advantages).to(device).flatten(),
        returns=torch.from_numpy(buffer.returns).to(device).flatten(),
        action_masks=action_masks,
        td_errors=td_errors,
    )


def _environment_major(array: np.ndarray, channels_last: bool = False) -> np.ndarray:
    """Do what SB3's ``swap_and_flatten`` does; ``channels_last`` lays images ``(n, channels, height, width)`` out in that way.

    As in SB3, the rollout of one environment is not copied, unless it consists of a few images that are to be turned.
    """
    swapped = np.ascontiguousarray(array).swapaxes(0, 1)
    is_image = channels_last and array.ndim == 5

    # The rollout of several environments is copied in any case.
    if is_image and (array.shape[1] > 1 or array.nbytes <= _TURNED):
        # reshape() copies in this order of axes; the last transpose is a view with SB3's order of axes.
        turned = swapped.transpose(0, 1, 3, 4, 2)
        return turned.reshape(-1, *turned.shape[2:]).transpose(0, 3, 1, 2)

    # Numbers such as values become ``(n, 1)``, as in SB3.
    shape = array.shape[2:] or (1,)
    return swapped.reshape(-1, *shape)


def _td_errors(buffer: RolloutBuffer) -> np.ndarray:
    """Return the TD errors that advantages are made of, ``A_t - gamma lambda (1 - start_{t+1}) A_{t+1}``."""
    # Advantages have been rearranged; episode_starts have not, because no loss reads them.
    errors = buffer.advantages.reshape(buffer.n_envs, buffer.buffer_size).copy()
    starts = buffer.episode_starts.reshape(buffer.buffer_size, buffer.n_envs).T
    continues = 1.0 - starts[:, 1:]

    # The right side is computed before anything is written, so that every A_{t+1} is still an advantage. float32, or the
    # product would be float64.
    decay = np.float32(buffer.gamma * buffer.gae_lambda)
    errors[:, :-1] -= decay * continues * errors[:, 1:]
    return errors.reshape(-1)


def gather(samples: RolloutSamples, indices: torch.Tensor) -> RolloutSamples:
    """Return the samples at ``indices``, with actions in float32 as SB3 has them."""
    # Traced, so that the compiler fuses the gathering with what reads the samples.
    picked: list[Any] = []
    for field in samples:
        if field is None:
            picked.append(None)
        elif isinstance(field, dict):
            picked.append({key: values[indices] for key, values in field.items()})
        else:
            picked.append(field[indices])

    minibatch = RolloutSamples(*picked)
    return minibatch._replace(actions=minibatch.actions.to(torch.float32))


def without_padding(samples: Any) -> SequenceSamples:
    """Drop the padding from the numbers of the loss, which is a mean over samples."""
    # sb3-contrib's own limit: its mask is 1 or 0 in float32.
    present = samples.mask > 1e-8
    return SequenceSamples(
        observations=samples.observations,
        # MultiBinary actions are integers in sb3-contrib, with which its RecurrentPPO fails.
        actions=samples.actions.float(),
        old_values=samples.old_values[present],
        old_log_prob=samples.old_log_prob[present],
        advantages=samples.advantages[present],
        returns=samples.returns[present],
        lstm_states=samples.lstm_states,
        episode_starts=samples.episode_starts,
        present=present,
        action_masks=getattr(samples, "action_masks", None),
    )


# The log

# Samples whose log-ratios, advantages and gradients are kept until they are summarized: little memory, and few waits.
_SAMPLES = 2**16
# What is kept of each minibatch: SCALARS; whether it was skipped, and whether it ended the update; means over its samples and
# the largest ratio; and the sum of the gradient in absolute value, of samples that PPO's clip would discard, and of all.
# summarize() relies on this order.
_COLUMNS = (*SCALARS, "skipped", "stop", "kl", "ratio_mean", "ratio_max", "above", "below", "discarded", "gradient")


class UpdateStatistics:
    """Collect the results of one call of ``train``, to be read rarely, because reading waits for the device.

    What is kept of a minibatch does not grow with its size.

    :param numbers: numbers of the update, floats
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        # Minibatches wait here as results or, from a device, as summaries, until they become rows of numbers.
        self._results: list[StepResult] = []
        self._summaries: list[torch.Tensor] = []
        self._n_samples = 0
        self._rows: list[np.ndarray] = []
        self._length = 0
        #: First minibatch of the current epoch, because SB3's ``approx_kl`` is the mean of the last one.
        self.epoch_start = 0

    def add(self, result: StepResult | StepSummary) -> None:
        """Record a minibatch."""
        self._length += 1
        if isinstance(result, StepSummary):
            # 14 numbers each: all of them are read at the end of the update.
            self._summaries.append(result.numbers)
            return

        self._results.append(result)
        self._n_samples += len(result.log_ratio)
        if self._n_samples >= _SAMPLES:
            self._summarize_minibatches()

    def __len__(self) -> int:
        return self._length

    def _summarize_minibatches(self) -> None:
        """Replace the results that have been collected by their numbers; :func:`summarize` has the same formulas."""
        scalars, log_ratios, all_advantages, gradients, skipped, stop = zip(*self._results, strict=True)
        columns = dict(zip(SCALARS, _read(torch.stack(scalars)).T, strict=True))
        columns["skipped"] = _read(torch.stack(skipped))
        columns["stop"] = _read(torch.stack(stop))

        # The samples of all minibatches in a row, and where each minibatch starts: reduceat() then takes one call for all.
        log_ratio = _read(torch.cat(log_ratios))
        advantages = _read(torch.cat(all_advantages))
        gradient = np.abs(_read(torch.cat(gradients)))
        sizes = np.array(list(map(len, log_ratios)))
        starts = np.cumsum(sizes) - sizes

        # A ratio may leave even float64; then its mean and KL are infinite. Skipped minibatches may have NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.exp(log_ratio)
            columns["kl"] = np.add.reduceat(ratio - 1.0 - log_ratio, starts) / sizes
            columns["ratio_mean"] = np.add.reduceat(ratio, starts) / sizes
            columns["ratio_max"] = np.maximum.reduceat(ratio, starts)

            above = ratio > 1.0 + self._numbers.clip_range_high
            below = ratio < 1.0 - self._numbers.clip_range
            columns["above"] = np.add.reduceat(above.astype(float), starts) / sizes
            columns["below"] = np.add.reduceat(below.astype(float), starts) / sizes

            # The gradient of a skipped minibatch may be Inf, which a product with 0 would make NaN.
            clipped = np.where(advantages >= 0.0, above, below)
            discarded = np.where(clipped, gradient, 0.0)
            columns["discarded"] = np.add.reduceat(discarded, starts)
            columns["gradient"] = np.add.reduceat(gradient, starts)

        rows = [columns[name] for name in _COLUMNS]
        self._rows.append(np.stack(rows, axis=1))
        self._results = []
        self._n_samples = 0

    def table(self) -> dict[str, np.ndarray]:
        """Return the numbers of all minibatches by name, each ``(len(self),)``."""
        if self._results:
            self._summarize_minibatches()
        if self._summaries:
            self._rows.append(_read(torch.stack(self._summaries)))
            self._summaries = []
        return dict(zip(_COLUMNS, np.concatenate(self._rows).T, strict=True))

    def epoch_kl(self) -> float:
        """Return the mean KL of the current epoch's minibatches that were not skipped; NaN if there was none."""
        table = self.table()
        kept = table["skipped"] == 0.0
        kept[: self.epoch_start] = False
        if not kept.any():
            # A comparison with NaN is False, so that the update continues.
            return float("nan")
        return float(table["kl"][kept].mean())

    def non_finite_term(self, minibatch: int) -> str:
        """Name the first loss term of a skipped minibatch that is NaN or Inf, or else the gradient.

        :param minibatch: number of the minibatch, counted from 0
        """
        table = self.table()
        for term in ("policy_loss", "value_loss", "entropy_loss"):
            if not np.isfinite(table[term][minibatch]):
                return term
        if not np.isfinite(table["loss"][minibatch]):
            return "the weighted sum of the losses (vf_coef, ent_coef)"
        return "the gradient"

    def summary(self, with_skipped: bool = False) -> dict[str, float]:
        """Average over the minibatches of the update, under SB3's names if it has one.

        ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last minibatch); ``kl_mean`` and ``kl_max``
        look at the whole update. ``ppo_discarded_gradient`` is the share of the surrogate's gradient, in absolute value over
        samples, that comes from samples whose gradient PPO's clip would have set to zero.

        :param with_skipped: whether minibatches whose loss or gradient is not finite count, as in SB3
        """
        table = self.table()
        kept = (table["skipped"] == 0.0) | with_skipped
        in_last_epoch = np.arange(self._length) >= self.epoch_start
        is_last_epoch = in_last_epoch[kept]
        for name in _COLUMNS:
            table[name] = table[name][kept]

        # SB3 clears its list of approx_kl at each epoch, so that it logs the mean of the last one.
        kl = table["kl"]
        approx_kl = kl.mean()
        if is_last_epoch.any():
            approx_kl = kl[is_last_epoch].mean()

        # A minibatch that ended the update has no gradient.
        moved = table["stop"] == 0.0
        gradient = table["gradient"][moved].sum()
        discarded = 0.0
        if gradient > 0.0:
            discarded = table["discarded"][moved].sum() / gradient
        grad_norm = 0.0
        if moved.any():
            grad_norm = table["grad_norm"][moved].mean()

        above = float(table["above"].mean())
        below = float(table["below"].mean())
        return {
            "policy_gradient_loss": float(table["policy_loss"].mean()),
            "value_loss": float(table["value_loss"].mean()),
            "entropy_loss": float(table["entropy_loss"].mean()),
            "loss": float(table["loss"][-1]),
            "approx_kl": float(approx_kl),
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "ratio_mean": float(table["ratio_mean"].mean()),
            "ratio_max": float(table["ratio_max"].max()),
            "clip_fraction": above + below,
            "fraction_above": above,
            "fraction_below": below,
            "ppo_discarded_gradient": float(discarded),
            "grad_norm": float(grad_norm),
        }


def _read(values: torch.Tensor) -> np.ndarray:
    """Bring a tensor to the host, in float64."""
    return values.double().cpu().numpy()
