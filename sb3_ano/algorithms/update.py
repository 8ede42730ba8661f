"""Update a policy on minibatches: gather, loss, gradient, clip by norm, Adam. Eager and compiled steps share the loss."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.func import functional_call
from torch.nn import functional as F

from sb3_ano._compat import compiler_obstacle, norm_of_all
from sb3_ano.algorithms.buffers import RolloutSamples, gather
from sb3_ano.algorithms.compiled import CompilationError, CompiledStep, compiler_options
from sb3_ano.algorithms.flat_adam import FlatVectors, FusedStep, obstacle
from sb3_ano.algorithms.policy_evaluation import Traits, make_evaluation


class ClipRange(NamedTuple):
    """Radii of the current update, 0-d tensors; tensors, so that a schedule does not recompile compiled code.

    :param low: radius below 1, acting where ``A < 0``
    :param high: radius above 1, acting where ``A >= 0``
    """

    low: torch.Tensor
    high: torch.Tensor


#: ``policy_loss(log_ratio, advantages, clip_range, samples)``, a scalar to be minimized.
PolicyLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, ClipRange, RolloutSamples], torch.Tensor]


class Coefficients(NamedTuple):
    """Numbers of the current update, 0-d tensors for the same reason.

    :param clip_range_vf: radius of the value clip
    :param ent_coef: weight of the entropy loss
    :param vf_coef: weight of the value loss
    :param max_grad_norm: norm to which a longer gradient is scaled down
    :param max_kl: limit of the KL; a minibatch beyond it makes no step and ends the update
    """

    clip_range_vf: torch.Tensor
    ent_coef: torch.Tensor
    vf_coef: torch.Tensor
    max_grad_norm: torch.Tensor
    max_kl: torch.Tensor


@dataclass(frozen=True)
class UpdateSettings:
    """The properties of an algorithm, besides numbers, that an :class:`Updater` is made for.

    :param policy_loss: surrogate of the algorithm
    :param clip_value: whether the value function is clipped
    :param normalize_advantage: whether to normalize the advantages of each minibatch
    :param discrete: whether actions are indices
    :param precision: precision of the policy's layers, ``"float32"`` or ``"bfloat16"``
    :param stock_loss: whether the policy loss is this package's own code
    :param compiled: whether to run the step through ``torch.compile`` if that is possible
    """

    policy_loss: PolicyLoss
    clip_value: bool
    normalize_advantage: bool
    discrete: bool
    precision: str
    stock_loss: bool
    compiled: bool


class _Losses(NamedTuple):
    """The loss of a minibatch, its three terms, and its samples' log-ratios and advantages, ``(batch,)``."""

    loss: torch.Tensor
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    log_ratio: torch.Tensor
    advantages: torch.Tensor


#: Names of the numbers in :attr:`StepResult.scalars`.
SCALARS = ("policy_loss", "value_loss", "entropy_loss", "loss", "grad_norm")


class StepResult(NamedTuple):
    """The outcome of a minibatch for the diagnostics, detached.

    :param scalars: the numbers named in :data:`SCALARS`, the norm before clipping, ``(5,)``
    :param log_ratio: logarithms of the probability ratios, ``(batch,)``
    :param advantages: advantages that the loss was computed with, ``(batch,)``
    :param log_ratio_grad: gradient of the loss by each log-ratio, ``(batch,)``
    :param skipped: 0-d bool; True if loss or gradient is not finite, and then nothing was changed
    :param stop: 0-d bool; True if the KL exceeds its limit, and then nothing was changed
    """

    scalars: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    log_ratio_grad: torch.Tensor
    skipped: torch.Tensor
    stop: torch.Tensor


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute Schulman's estimate ``mean(r - 1 - log r)`` of the KL divergence from the rollout's policy, a scalar."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


class Updater:
    """Update a policy on minibatches, one per call, after :meth:`start_update`.

    :param policy: actor and critic, with its optimizer
    :param settings: properties of the algorithm
    """

    def __init__(self, policy: ActorCriticPolicy, settings: UpdateSettings) -> None:
        self.settings = settings
        self._policy, self._optimizer = policy, policy.optimizer
        self._evaluation = make_evaluation(policy, settings.precision)
        #: Whether images are read in that memory format, so that a rollout should be in it.
        self.channels_last = self._evaluation.traits.channels_last
        self._loss_module = _LossModule(policy, self._losses)
        self._obstacle = self._obstacle_to_vectors(self._evaluation.traits)
        #: Parameters and moments as vectors, for compiled steps.
        self.vectors: FlatVectors | None = None
        self._names: list[str] = []
        #: Clipping and Adam's step for steps that are not compiled; None if they have to be PyTorch's own.
        self._fused_step: FusedStep | None = None
        self.clip_range = ClipRange(*(self._number() for _ in ClipRange._fields))
        self.coefficients = Coefficients(*(self._number() for _ in Coefficients._fields))
        self._compiled_steps: dict[tuple[int, bool], CompiledStep] = {}
        self.compiled = settings.compiled and self._can_be_compiled()

    def _number(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._policy.device)

    def is_compatible(self, policy: ActorCriticPolicy, settings: UpdateSettings) -> bool:
        """Tell whether the policy, its optimizer and the settings are still those that this updater was made for."""
        if settings != self.settings or policy is not self._policy or policy.optimizer is not self._optimizer:
            return False
        traits = Traits.of(policy)
        return traits == self._evaluation.traits and self._obstacle_to_vectors(traits) == self._obstacle

    def _obstacle_to_vectors(self, traits: Traits) -> str | None:
        """Say why gradients and steps have to be made as SB3 makes them, or None."""
        if any(parameter.grad is not None for parameter in self._policy.parameters() if not parameter.requires_grad):
            return "a frozen parameter has a gradient, which counts for the norm"
        return traits.customization or obstacle(self._optimizer, self._policy)

    def _can_be_compiled(self) -> bool:
        tied = "several of its layers share parameters" if _has_tied_parameters(self._policy) else None
        reason = self._obstacle or tied or compiler_obstacle(self._compiler_options(1))
        if reason is not None:
            _warn_of_eager(reason)
        return reason is None

    def _compiler_options(self, batch_size: int) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self._policy.parameters())
        stock = self._evaluation.traits.stock and self.settings.stock_loss and not self._policy.squash_output
        return compiler_options(self._policy.device, batch_size * parameters, stock)

    def start_update(self, clip_range: tuple[float, float], coefficients: dict[str, float]) -> None:
        """Set the numbers of an update; those of Adam are read from the optimizer.

        :param clip_range: radii below and above 1
        :param coefficients: numbers by the names of :class:`Coefficients`
        """
        for tensor, value in zip(self.clip_range, clip_range, strict=True):
            tensor.fill_(value)
        for name, value in coefficients.items():
            getattr(self.coefficients, name).fill_(value)
        if self.compiled:
            if self.vectors is None:
                self.vectors = FlatVectors(self._optimizer)
            self.vectors.attach()
        is_plain = self._obstacle is None and self._policy.device.type == "cpu"
        self._fused_step = FusedStep(self._optimizer) if is_plain else None
        self._names = [f"policy.{name}" for name, parameter in self._policy.named_parameters() if parameter.requires_grad]

    def end_update(self) -> None:
        """Give policy and optimizer the results of compiled steps; to be called however an update ends."""
        if self.vectors is not None:
            self.vectors.detach()

    def start_epoch(self) -> None:
        """Check again what compiled code depends on."""
        for step in self._compiled_steps.values():
            step.begin()

    def __call__(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        """Make one step on ``rollout[indices]``, or on all of ``rollout`` if ``indices`` is None."""
        if not self.compiled:
            return self._train_step(rollout, indices)
        variant = len(rollout.advantages if indices is None else indices), indices is None
        if variant not in self._compiled_steps:
            # Custom modules may change at every call, and minibatches of a custom buffer may differ in their types.
            constant = self._evaluation.traits.stock and indices is not None
            self._compiled_steps[variant] = CompiledStep(self._train_step, self._compiler_options(variant[0]), constant)
        try:
            result: StepResult = self._compiled_steps[variant](rollout, indices)
            return result
        except CompilationError as error:
            self.compiled = False
            self.end_update()
            self.vectors = None
            _warn_of_eager(str(error))
            return self._train_step(rollout, indices)

    def _train_step(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        samples = rollout if indices is None else gather(rollout, indices)
        if not torch.compiler.is_compiling():
            return self._eager_step(samples)
        losses, gradient, log_ratio_grad = self._traced_gradient(samples)
        norm = torch.linalg.vector_norm(gradient)
        stop = approximate_kl(losses.log_ratio) > self.coefficients.max_kl
        self._step_on_vectors(gradient, norm, torch.isfinite(losses.loss + norm) & ~stop)
        return self._result(losses, norm, log_ratio_grad, stop)

    def _traced_gradient(self, samples: RolloutSamples) -> tuple[_Losses, torch.Tensor, torch.Tensor | None]:
        """Compute the loss, its gradient as a vector, and its gradient by each log-ratio, in a form that can be compiled."""
        assert self.vectors is not None
        # Its parts replace the parameters: compiled code gets one vector instead of dozens of tensors.
        leaf = self.vectors.leaf
        parts = self.vectors.views(leaf)
        replaced = dict(zip(self._names, parts, strict=True))
        # One module may be registered under several names, as SB3's shared features extractor is: replacing its
        # parameters under the first is enough.
        losses = functional_call(self._loss_module, replaced, (samples,), tie_weights=False)
        wanted = [losses.log_ratio] if losses.log_ratio.requires_grad else []
        if self._evaluation.traits.stock:
            gradient, *rest = torch.autograd.grad(losses.loss, [leaf, *wanted])
        else:
            # All parameters of SB3's own policies are used; those of others may get no gradient, which is not one of zero.
            gradients = torch.autograd.grad(losses.loss, [*parts, *wanted], allow_unused=True)
            if any(part is None for part in gradients[: len(parts)]):
                raise RuntimeError("some of its parameters get no gradient")
            gradient, rest = self.vectors.flattened(list(gradients[: len(parts)])), list(gradients[len(parts) :])
        return losses, gradient, rest[0] if rest else None

    def _eager_step(self, samples: RolloutSamples) -> StepResult:
        """Make a backward pass and a step as SB3 does, so that hooks act."""
        losses = self._losses(samples)
        stop = approximate_kl(losses.log_ratio.detach()) > self.coefficients.max_kl
        norm, log_ratio_grad = torch.zeros_like(losses.loss), None
        if not bool(stop):
            self._optimizer.zero_grad()
            if losses.log_ratio.requires_grad:
                losses.log_ratio.retain_grad()
            losses.loss.backward()
            log_ratio_grad = losses.log_ratio.grad
            norm = self._optimize(losses.loss.detach())
        return self._result(losses, norm, log_ratio_grad, stop)

    def _optimize(self, loss: torch.Tensor) -> torch.Tensor:
        """Clip the gradients and make a step of the optimizer if they are finite; return the norm before clipping."""
        if self._fused_step is None:
            norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self.coefficients.max_grad_norm.item())
            if bool(torch.isfinite(loss + norm)):
                self._optimizer.step()
            else:
                self._optimizer.zero_grad()
            return norm

        gradients = self._fused_step.gradients()
        norm = norm_of_all(gradients)
        if bool(torch.isfinite(loss + norm)):
            self._fused_step(gradients, norm, self.coefficients.max_grad_norm)
        else:
            self._optimizer.zero_grad()
        return norm

    def _step_on_vectors(self, gradient: torch.Tensor, norm: torch.Tensor, apply: torch.Tensor) -> None:
        assert self.vectors is not None
        self.vectors.step(gradient * (self.coefficients.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), apply.double())

    @staticmethod
    def _result(losses: _Losses, norm: torch.Tensor, log_ratio_grad: torch.Tensor | None, stop: torch.Tensor) -> StepResult:
        loss, log_ratio, advantages = losses.loss.detach(), losses.log_ratio.detach(), losses.advantages.detach()
        scalars = torch.stack([*(term.detach() for term in losses.terms), loss, norm])
        # A frozen actor has no gradient.
        gradient = torch.zeros_like(log_ratio) if log_ratio_grad is None else log_ratio_grad.detach()
        return StepResult(scalars, log_ratio, advantages, gradient, ~(torch.isfinite(loss + norm) | stop), stop)

    def _losses(self, samples: RolloutSamples) -> _Losses:
        """Compute the loss of Algorithm 1 of the paper, with SB3's value loss, twice the paper's, value clip and entropy."""
        settings, coefficients = self.settings, self.coefficients
        actions = samples.actions.long().flatten() if settings.discrete else samples.actions
        values, log_prob, entropy = self._evaluation(samples, actions)
        values = values.flatten()

        advantages = samples.advantages
        if settings.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        log_ratio = log_prob - samples.old_log_prob
        policy_loss = settings.policy_loss(log_ratio, advantages, self.clip_range, samples)

        if settings.clip_value:
            change = (values - samples.old_values).clamp(-coefficients.clip_range_vf, coefficients.clip_range_vf)
            values = samples.old_values + change
        value_loss = F.mse_loss(samples.returns, values)

        # Without a closed form, -log_prob of the taken actions estimates the entropy.
        entropy_loss = log_prob.mean() if entropy is None else -entropy.mean()

        loss = policy_loss + coefficients.ent_coef * entropy_loss + coefficients.vf_coef * value_loss
        return _Losses(loss, (policy_loss, value_loss, entropy_loss), log_ratio, advantages)


class _LossModule(torch.nn.Module):
    """The loss as a module with the policy in it, so that ``functional_call`` replaces the parameters in all of it."""

    def __init__(self, policy: ActorCriticPolicy, losses: Callable[[RolloutSamples], _Losses]) -> None:
        super().__init__()
        self.policy = policy
        self._losses = losses

    def forward(self, samples: RolloutSamples) -> _Losses:
        return self._losses(samples)


def _has_tied_parameters(module: torch.nn.Module) -> bool:
    """Tell whether two modules own the same parameter."""
    owned = [id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)]
    return len(owned) > len(set(owned))


def _warn_of_eager(reason: str) -> None:
    warnings.warn(f"torch_compile: the update cannot be compiled and runs without ({reason})", stacklevel=5)
