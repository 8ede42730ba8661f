"""The minibatch step: gather, loss, gradient, clip by norm, Adam. One function, run as it stands or compiled."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.func import functional_call
from torch.nn import functional as F

from sb3_ano._compat import compiler_obstacle
from sb3_ano.algorithms.buffers import RolloutSamples, gather
from sb3_ano.algorithms.compiled import CompilationError, CompiledStep, compiler_options
from sb3_ano.algorithms.parameters import FlatAdam, FlatParameters, has_tied_parameters
from sb3_ano.algorithms.policies import PolicyEvaluation, customization, is_stock


class TrustRegion(NamedTuple):
    """Radii of the current update, 0-d tensors; tensors, so that a schedule does not recompile a compiled step.

    :param eps_low: radius below 1, acting where ``A < 0``
    :param eps_high: radius above 1, acting where ``A >= 0``
    """

    eps_low: torch.Tensor
    eps_high: torch.Tensor


#: ``policy_loss(log_ratio, advantages, region, samples)``, a scalar to be minimised.
PolicyLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, TrustRegion, RolloutSamples], torch.Tensor]


class Coefficients(NamedTuple):
    """Numbers of the current update, 0-d tensors for the same reason.

    :param clip_range_vf: radius of the value clip
    :param ent_coef: weight of the entropy loss
    :param vf_coef: weight of the value loss
    :param max_grad_norm: the gradient is scaled down to this norm
    :param max_kl: a minibatch whose KL exceeds this makes no step and ends the update
    """

    clip_range_vf: torch.Tensor
    ent_coef: torch.Tensor
    vf_coef: torch.Tensor
    max_grad_norm: torch.Tensor
    max_kl: torch.Tensor


@dataclass(frozen=True)
class StepSettings:
    """What shapes a step, beside its numbers; a step is made for one of these.

    :param clip_value: whether the value function is clipped
    :param normalize_advantage: whether to normalise the advantages of each minibatch
    :param discrete: whether actions are indices
    :param precision: of the policy's layers, ``"float32"`` or ``"bfloat16"``
    :param stock_loss: whether the policy loss is this package's own code
    """

    clip_value: bool
    normalize_advantage: bool
    discrete: bool
    precision: str
    stock_loss: bool = False


class LossTerms(NamedTuple):
    """The scalar terms of a minibatch loss, and its samples' log-ratios and advantages, ``(batch,)``."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy_loss: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor

    def detached(self) -> "LossTerms":
        return LossTerms(*(term.detach() for term in self))

    def scalars(self, norm: torch.Tensor) -> torch.Tensor:
        """The scalar terms, and the norm of the gradient, in the order of :class:`StepResult`."""
        return torch.stack([self.policy_loss, self.value_loss, self.entropy_loss, self.loss, norm])


class StepResult(NamedTuple):
    """What a step leaves behind for the statistics, detached.

    :param scalars: policy loss, value loss, entropy loss, loss, and norm of the gradient before clipping, ``(5,)``
    :param log_ratio: ``(batch,)``
    :param advantages: as the loss saw them, ``(batch,)``
    :param gradient: of the loss with respect to each log-ratio, ``(batch,)``
    :param finite: 0-d bool; False if loss or gradient is not finite, and then nothing was changed
    :param stop: 0-d bool; True if the KL exceeds its limit, and then nothing was changed
    """

    scalars: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    gradient: torch.Tensor
    finite: torch.Tensor
    stop: torch.Tensor


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Schulman's estimate ``mean(r - 1 - log r)`` of the KL from the rollout's policy, a scalar."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


class MinibatchStep:
    """Updates a policy on minibatches, one a call, between :meth:`begin` and :meth:`end`.

    :param policy: actor and critic, with its optimizer; if that is a plain Adam, parameters become views of one vector
    :param policy_loss: the algorithm's surrogate
    :param settings: what shapes the step
    :param compiled: whether to run the step through ``torch.compile``; if that is impossible, a warning says so, and the step
        runs as it is
    """

    def __init__(
        self, policy: ActorCriticPolicy, policy_loss: PolicyLoss, settings: StepSettings, compiled: bool = False
    ) -> None:
        self.settings = settings
        self._policy, self._policy_loss = policy, policy_loss
        self._evaluation = PolicyEvaluation(policy, settings.precision)
        self._loss_of_policy = _LossOfPolicy(policy, self._loss)
        self._optimizer = policy.optimizer
        self.parameters = FlatParameters(policy)
        self._stock = is_stock(policy)
        self.adam: FlatAdam | None = None
        self._obstacle = self._obstacle_to_adam()
        if self._obstacle is None:
            self.parameters.share()
            self.adam = FlatAdam(self._optimizer, self.parameters)
        self._names = [f"policy.{name}" for name in self.parameters.names]
        self.region = TrustRegion(*(torch.zeros((), device=policy.device) for _ in TrustRegion._fields))
        self.coefficients = Coefficients(*(torch.zeros((), device=policy.device) for _ in Coefficients._fields))
        self._variants: dict[tuple[int, bool], CompiledStep] = {}
        self._asked_to_compile = compiled
        self.compiled = compiled and self._can_be_compiled()

    def _obstacle_to_adam(self) -> str | None:
        """Why gradients and steps have to be made as SB3 makes them, or None."""
        if any(parameter.grad is not None for parameter in self._policy.parameters() if not parameter.requires_grad):
            return "a frozen parameter has a gradient, which counts for the norm"
        return customization(self._policy) or FlatAdam.obstacle(self._optimizer, self.parameters)

    def _can_be_compiled(self) -> bool:
        reason = self._obstacle
        if reason is None and has_tied_parameters(self._policy):
            reason = "several of its layers share parameters"
        if reason is None:
            reason = compiler_obstacle(self._compiler_options(1))
        if reason is None:
            return True
        _warn_of_eager(reason)
        return False

    def _compiler_options(self, length: int) -> dict[str, Any]:
        stock = self._stock and self.settings.stock_loss and not self._policy.squash_output
        return compiler_options(self._policy.device, length * len(self.parameters.vector), stock)

    def serves(self, policy: ActorCriticPolicy, policy_loss: PolicyLoss, settings: StepSettings, compiled: bool) -> bool:
        """Whether this step can continue: same settings, and policy and optimizer are still what it was made for."""
        same = settings == self.settings and compiled == self._asked_to_compile and policy_loss == self._policy_loss
        if not same or policy is not self._policy or policy.optimizer is not self._optimizer:
            return False
        if not self._evaluation.is_current() or self._stock != is_stock(policy) or not self.parameters.are_those_of(policy):
            return False
        if self.adam is None:
            return self._obstacle_to_adam() is not None
        return self.parameters.are_shared() and self._obstacle_to_adam() is None and self.adam.is_current()

    def begin(self, region: tuple[float, float], coefficients: dict[str, float]) -> None:
        """Set the numbers of an update, and read the learning rate from the optimizer.

        :param region: radii below and above 1
        :param coefficients: by the names of :class:`Coefficients`
        """
        for tensor, value in zip(self.region, region, strict=True):
            tensor.fill_(value)
        for name, value in coefficients.items():
            getattr(self.coefficients, name).fill_(value)
        if self.adam is not None:
            self.adam.begin()

    def start_epoch(self) -> None:
        """Look again at what compiled code depends on."""
        for variant in self._variants.values():
            variant.begin()

    def end(self) -> None:
        """Let the optimizer's state show what was done."""
        if self.adam is not None:
            self.adam.publish()

    def __call__(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        """One step on ``rollout[indices]``, or on all of ``rollout`` where ``indices`` is None."""
        if not self.compiled:
            return self._step(rollout, indices)
        length = len(rollout.advantages if indices is None else indices)
        variant = length, indices is None
        if variant not in self._variants:
            # Custom modules may change at every call, and minibatches of a custom buffer may differ in their types.
            constant = self._stock and indices is not None
            self._variants[variant] = CompiledStep(self._step, self._compiler_options(length), constant)
        try:
            return self._variants[variant](rollout, indices)
        except CompilationError as error:
            self.compiled = False
            _warn_of_eager(str(error))
            return self._step(rollout, indices)

    def _step(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        samples = rollout if indices is None else gather(rollout, indices)
        if self.adam is None or not torch.compiler.is_compiling():
            return self._eager_step(samples)
        terms, gradient, log_ratio_gradient = self._traced_gradient(samples)

        norm = torch.linalg.vector_norm(gradient)
        finite = torch.isfinite(terms.loss + norm)
        stop = approximate_kl(terms.log_ratio) > self.coefficients.max_kl
        self.adam.step(self._clipped(gradient, norm), (finite & ~stop).double())
        return StepResult(terms.scalars(norm), terms.log_ratio, terms.advantages, log_ratio_gradient, finite, stop)

    def _clipped(self, gradient: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return gradient * (self.coefficients.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _traced_gradient(self, samples: RolloutSamples) -> tuple[LossTerms, torch.Tensor, torch.Tensor]:
        """The loss, its gradient as a vector, and its gradient with respect to each log-ratio, for the compiler."""
        # One leaf, whose parts stand in for the parameters: compiled code gets one vector in place of dozens of tensors.
        leaf = self.parameters.vector.detach().requires_grad_()
        parts = self.parameters.views(leaf)
        replaced = dict(zip(self._names, parts, strict=True))
        # One module may be registered under several names, as SB3's shared features extractor is: replacing its
        # parameters under the first is enough.
        terms, log_ratio = functional_call(self._loss_of_policy, replaced, (samples,), tie_weights=False)
        wanted = [log_ratio] if log_ratio.requires_grad else []
        if self._stock:
            gradient, *rest = torch.autograd.grad(terms.loss, [leaf, *wanted])
        else:
            # All parameters of SB3's own policies are used; those of others may get no gradient, which is not one of zero.
            gradients = torch.autograd.grad(terms.loss, [*parts, *wanted], allow_unused=True)
            if any(part is None for part in gradients[: len(parts)]):
                raise RuntimeError("some of its parameters get no gradient")
            gradient, rest = self.parameters.flattened(list(gradients[: len(parts)])), list(gradients[len(parts) :])
        return terms.detached(), gradient, rest[0] if rest else torch.zeros_like(log_ratio)

    def _eager_step(self, samples: RolloutSamples) -> StepResult:
        """A backward pass and a step, as in SB3, so that hooks act."""
        terms, log_ratio = self._loss(samples)
        stop = approximate_kl(log_ratio.detach()) > self.coefficients.max_kl
        norm, gradient = torch.zeros_like(terms.loss.detach()), torch.zeros_like(log_ratio)
        if not bool(stop):
            self._optimizer.zero_grad()
            if log_ratio.requires_grad:
                log_ratio.retain_grad()
            terms.loss.backward()
            gradient = gradient if log_ratio.grad is None else log_ratio.grad
            norm = self._optimize(terms.loss.detach())
        finite = torch.isfinite(terms.loss.detach() + norm)
        terms = terms.detached()
        return StepResult(terms.scalars(norm), terms.log_ratio, terms.advantages, gradient.detach(), finite, stop)

    def _optimize(self, loss: torch.Tensor) -> torch.Tensor:
        """Clip the gradients and make a step of the optimizer, if they are finite; the norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters.tensors]
        if self.adam is not None and any(gradient is None for gradient in gradients):
            self.adam.publish()
            self.adam = None  # it would move parameters without a gradient by their momentum
        if self.adam is not None:
            gradient = self.parameters.flattened(gradients)  # type: ignore[arg-type]
            norm = torch.linalg.vector_norm(gradient)
            self.adam.step(self._clipped(gradient, norm), torch.isfinite(loss + norm).double())
            return norm
        max_norm = self.coefficients.max_grad_norm.item()
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), max_norm)
        if bool(torch.isfinite(loss + norm)):
            self._optimizer.step()
        else:
            self._optimizer.zero_grad()
        return norm

    def _loss(self, samples: RolloutSamples) -> tuple[LossTerms, torch.Tensor]:
        """Loss of Algorithm 1 of the paper, with SB3's value clip and entropy estimate; and the log-ratio, with its graph."""
        settings, coefficients = self.settings, self.coefficients
        actions = samples.actions.long().flatten() if settings.discrete else samples.actions
        values, log_prob, entropy = self._evaluation(samples.observations, actions)
        values = values.flatten()

        advantages = samples.advantages
        if settings.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        log_ratio = log_prob - samples.old_log_prob
        policy_loss = self._policy_loss(log_ratio, advantages, self.region, samples)

        if settings.clip_value:
            change = (values - samples.old_values).clamp(-coefficients.clip_range_vf, coefficients.clip_range_vf)
            values = samples.old_values + change
        value_loss = F.mse_loss(samples.returns, values)

        # Without a closed form, -log_prob of the taken actions estimates the entropy.
        entropy_loss = log_prob.mean() if entropy is None else -entropy.mean()

        loss = policy_loss + coefficients.ent_coef * entropy_loss + coefficients.vf_coef * value_loss
        return LossTerms(loss, policy_loss, value_loss, entropy_loss, log_ratio, advantages), log_ratio

    def not_finite(
        self, result: StepResult, rollout: RolloutSamples | None, indices: torch.Tensor | None, most: int = 3
    ) -> list[str]:
        """What to name in the report of a skipped minibatch: loss terms, or else the gradients that they made.

        The gradients are computed again, at the parameters of now, which further minibatches may have moved.

        :param result: of the step that was skipped
        :param rollout: that the minibatch was taken from; None where it is not there any more
        :param most: gradients to name at most
        """
        finite = result.scalars.isfinite().tolist()
        losses = [
            name
            for name, is_finite in zip(("policy_loss", "value_loss", "entropy_loss"), finite, strict=False)
            if not is_finite
        ]
        if losses:
            return losses
        if not finite[3]:
            return ["the weighted sum of the losses (vf_coef, ent_coef)"]
        if rollout is None or indices is None:
            return ["gradient"]
        loss = self._loss(gather(rollout, indices))[0].loss
        parts = torch.autograd.grad(loss, self.parameters.tensors, allow_unused=True)
        gradients = [
            f"gradient of {name}"
            for name, part in zip(self.parameters.names, parts, strict=True)
            if part is not None and not bool(part.isfinite().all())
        ]
        if len(gradients) > most:
            return [*gradients[:most], f"{len(gradients) - most} more gradients"]
        return gradients or ["norm of the gradient (overflow)"]


class _LossOfPolicy(torch.nn.Module):
    """The loss as a module with the policy in it, so that the policy's parameters can be replaced for the whole of it."""

    def __init__(self, policy: ActorCriticPolicy, loss: Callable[[RolloutSamples], Any]) -> None:
        super().__init__()
        self.policy = policy
        self._loss = loss

    def forward(self, samples: RolloutSamples) -> Any:
        return self._loss(samples)


def _warn_of_eager(reason: str) -> None:
    warnings.warn(f"torch_compile: the update cannot be compiled and runs without ({reason})", stacklevel=5)
