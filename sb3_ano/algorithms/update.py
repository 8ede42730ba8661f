"""The minibatch step: gather, loss, gradient, clip by norm, Adam. One function, run as it stands or compiled."""

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.func import functional_call
from torch.nn import functional as F

from sb3_ano.algorithms.buffers import RolloutSamples, gather
from sb3_ano.algorithms.parameters import FlatAdam, FlatParameters, has_tied_parameters
from sb3_ano.algorithms.policies import PolicyEvaluation, overridden_method


class TrustRegion(NamedTuple):
    """Radii of the current update, 0-d tensors; tensors, so that a schedule does not recompile a compiled step.

    :param eps_low: radius below 1, acting where ``A < 0``
    :param eps_high: radius above 1, acting where ``A >= 0``
    """

    eps_low: torch.Tensor
    eps_high: torch.Tensor


#: ``policy_loss(log_ratio, advantages, region, samples)``, a scalar to be minimised.
PolicyLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, TrustRegion, RolloutSamples], torch.Tensor]


@dataclass(frozen=True)
class LossSettings:
    """What a step needs beside the data and the radii; a compiled step is made for one of these.

    :param clip_value: whether the value function is clipped
    :param normalize_advantage: whether to normalise the advantages of each minibatch
    :param ent_coef: weight of the entropy loss
    :param vf_coef: weight of the value loss
    :param max_grad_norm: the gradient is scaled down to this norm
    :param max_kl: a minibatch whose KL exceeds this makes no step and ends the update; None for no limit
    :param discrete: whether actions are indices
    :param precision: of the policy's layers, ``"float32"`` or ``"bfloat16"``
    """

    clip_value: bool
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    max_kl: float | None
    discrete: bool
    precision: str


class LossTerms(NamedTuple):
    """The scalar terms of a minibatch loss, and its samples' log-ratios and advantages, ``(batch,)``."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy_loss: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor


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
    """Updates a policy on minibatches, one a call.

    :param policy: actor and critic, with its optimizer; its parameters become views of one vector
    :param policy_loss: the algorithm's surrogate
    :param settings: coefficients
    :param compiled: whether to run the step through ``torch.compile``; where that cannot be, a warning says so, and the step
        runs as it stands
    """

    def __init__(
        self, policy: ActorCriticPolicy, policy_loss: PolicyLoss, settings: LossSettings, compiled: bool = False
    ) -> None:
        self.settings = settings
        self.parameters = FlatParameters(policy)
        self.adam: FlatAdam | None = None
        self._policy, self._policy_loss = policy, policy_loss
        self._evaluation = PolicyEvaluation(policy, settings.precision)
        self._optimizer = policy.optimizer
        self._names = [f"policy.{name}" for name in self.parameters.names]
        device = policy.device
        self.region = TrustRegion(*(torch.zeros((), device=device) for _ in range(2)))
        self.clip_range_vf = torch.zeros((), device=device)
        self._variants: dict[int, Any] = {}
        if FlatAdam.supports(self._optimizer, self.parameters):
            self.adam = FlatAdam(self._optimizer, self.parameters)
        self._asked_to_compile = compiled
        self.compiled = compiled and self._can_be_compiled()

    def _can_be_compiled(self) -> bool:
        overridden = overridden_method(self._policy)
        if overridden is not None:
            reason = f"{type(self._policy).__name__} overrides {overridden}"
        elif self.adam is None:
            reason = f"its optimizer is not a plain torch.optim.Adam, but {type(self._optimizer).__name__}"
        elif has_tied_parameters(self._policy):
            reason = "several of its layers share parameters"
        else:
            return True
        _warn_of_eager(reason)
        return False

    def serves(self, policy: ActorCriticPolicy, settings: LossSettings, compiled: bool) -> bool:
        """Whether this step can go on: same settings, and nobody replaced parameters or optimizer state in between."""
        same = settings == self.settings and compiled == self._asked_to_compile and policy.optimizer is self._optimizer
        if not same or policy is not self._policy or not self.parameters.are_those_of(policy):
            return False
        if self.adam is None:
            return not FlatAdam.supports(self._optimizer, self.parameters)
        return FlatAdam.supports(self._optimizer, self.parameters) and self.adam.is_current()

    def begin(self, eps_low: float, eps_high: float, clip_range_vf: float | None) -> None:
        """Set the radii of an update, and read the learning rate from the optimizer."""
        self.region.eps_low.fill_(eps_low)
        self.region.eps_high.fill_(eps_high)
        self.clip_range_vf.fill_(clip_range_vf or 0.0)
        if self.adam is not None:
            self.adam.begin()

    def end(self) -> None:
        """Let the optimizer's state show what was done."""
        if self.adam is not None:
            self.adam.publish()

    def __call__(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        """One step on ``rollout[indices]``, or on all of ``rollout`` where ``indices`` is None."""
        if not self.compiled:
            return self._step(rollout, indices)
        length = len(rollout.advantages if indices is None else indices)
        if length in self._variants:
            return self._variants[length](rollout, indices)
        self._variants[length] = compiled_variant(self._step)
        try:
            return self._variants[length](rollout, indices)
        except Exception as error:  # before anything was changed: a missing compiler, or code that cannot be traced
            self.compiled = False
            _warn_of_eager(_first_line(error))
            return self._step(rollout, indices)

    def _step(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        samples = rollout if indices is None else gather(rollout, indices)
        terms, gradient, log_ratio_gradient = self._loss_and_gradient(samples)

        norm = torch.linalg.vector_norm(gradient)
        finite = torch.isfinite(terms.loss + norm)
        stop = torch.zeros_like(finite)
        if self.settings.max_kl is not None:
            stop = approximate_kl(terms.log_ratio) > self.settings.max_kl
        go = (finite & ~stop).double()
        gradient = gradient * (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self._apply(gradient, go)

        scalars = torch.stack([terms.policy_loss, terms.value_loss, terms.entropy_loss, terms.loss, norm])
        return StepResult(scalars, terms.log_ratio, terms.advantages, log_ratio_gradient, finite, stop)

    def _loss_and_gradient(self, samples: RolloutSamples) -> tuple[LossTerms, torch.Tensor, torch.Tensor]:
        """The loss, its gradient as a vector, and its gradient with respect to each log-ratio, all detached."""
        if torch.compiler.is_compiling():
            # One leaf, whose parts stand in for the parameters: a compiled step gets one vector in place of dozens of tensors.
            leaf = self.parameters.vector.detach().requires_grad_()
            replaced = dict(zip(self._names, self.parameters.views(leaf), strict=True))
            terms, log_ratio = self._loss(samples, replaced)
            gradient, log_ratio_gradient = torch.autograd.grad(terms.loss, [leaf, log_ratio])
        else:
            terms, log_ratio = self._loss(samples, None)
            wanted = [*self.parameters.tensors, log_ratio]
            *gradients, log_ratio_gradient = torch.autograd.grad(terms.loss, wanted, materialize_grads=True)
            gradient = self.parameters.flattened(gradients)
        return LossTerms(*(term.detach() for term in terms)), gradient, log_ratio_gradient

    def _loss(self, samples: RolloutSamples, parameters: dict[str, torch.Tensor] | None) -> tuple[LossTerms, torch.Tensor]:
        """Loss of Algorithm 1 of the paper, with SB3's value clip and entropy estimate."""
        settings = self.settings
        actions = samples.actions.long().flatten() if settings.discrete else samples.actions
        inputs = (samples.observations, actions)
        if parameters is None:
            values, log_prob, entropy = self._evaluation(*inputs)
        else:
            # One module may be registered under several names, as SB3's shared features extractor is: replacing its
            # parameters under the first is enough.
            values, log_prob, entropy = functional_call(self._evaluation, parameters, inputs, tie_weights=False)
        values = values.flatten()

        advantages = samples.advantages
        if settings.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        log_ratio = log_prob - samples.old_log_prob
        policy_loss = self._policy_loss(log_ratio, advantages, self.region, samples)

        if settings.clip_value:
            change = (values - samples.old_values).clamp(-self.clip_range_vf, self.clip_range_vf)
            values = samples.old_values + change
        value_loss = F.mse_loss(samples.returns, values)

        # Without a closed form, -log_prob of the taken actions estimates the entropy.
        entropy_loss = log_prob.mean() if entropy is None else -entropy.mean()

        loss = policy_loss + settings.ent_coef * entropy_loss + settings.vf_coef * value_loss
        return LossTerms(loss, policy_loss, value_loss, entropy_loss, log_ratio, advantages), log_ratio

    def _apply(self, gradient: torch.Tensor, go: torch.Tensor) -> None:
        if self.adam is not None:
            self.adam.step(gradient, go)
        elif bool(go):
            # An optimizer of the user's makes its own step.
            for parameter, part in zip(self.parameters.tensors, self.parameters.views(gradient), strict=True):
                parameter.grad = part
            self._optimizer.step()
            self._optimizer.zero_grad()

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
        _, gradient, _ = self._loss_and_gradient(gather(rollout, indices))
        gradients = [
            f"gradient of {name}"
            for name, part in zip(self.parameters.names, self.parameters.views(gradient), strict=True)
            if not bool(part.isfinite().all())
        ]
        if len(gradients) > most:
            return [*gradients[:most], f"{len(gradients) - most} more gradients"]
        return gradients or ["norm of the gradient (overflow)"]


def compile_settings() -> Any:
    """What has to be set while compiled steps run; a context manager."""
    from torch._dynamo import config

    # torch.autograd.grad inside the compiled function
    return config.patch(trace_autograd_ops=True)


def compiled_variant(step: Any) -> Callable[[RolloutSamples, torch.Tensor | None], StepResult]:
    """Compile :meth:`MinibatchStep._step` for arguments of one shape, to be called without checking them again.

    Guards would cost a fifth of the step. They are left out because the owner keeps one variant for each length of a
    minibatch and starts anew when settings change; those on numbers that a policy loss reads are kept. Compiled code is
    cached with the code object of the function, and without guards nothing would tell two steps apart, hence the copy.
    """
    function, owner = step.__func__, step.__self__
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    on_cpu = owner.parameters.vector.device.type == "cpu"
    options: dict[str, Any] = {
        "guard_filter_fn": _needed_guards,
        "size_asserts": False,
        "alignment_asserts": False,
        "cpp_wrapper": on_cpu,
        "cpp.use_decompose_tanh": True,
    }
    compiled = types.MethodType(torch.compile(copy, fullgraph=True, dynamic=False, options=options), owner)
    return compiled if on_cpu else CapturedStep(compiled)


class CapturedStep:
    """Replays a step as one CUDA graph, which costs the host two launches in place of one for each kernel.

    The rollout must lie in the same memory at each call, as that of a :class:`~sb3_ano.algorithms.buffers.FlatRolloutBuffer`
    does. The first calls run as they are, for libraries to set themselves up, and because capturing does not execute.

    :param step: on the current CUDA device
    """

    _ORDINARY_CALLS = 3

    def __init__(self, step: Callable[[RolloutSamples, torch.Tensor | None], StepResult]) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rollout: RolloutSamples, indices: torch.Tensor | None) -> StepResult:
        self._calls += 1
        if indices is None or self._calls <= self._ORDINARY_CALLS:
            return self._step(rollout, indices)
        if self._graph is None:
            self._indices = indices.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._step(rollout, self._indices)
        self._indices.copy_(indices)
        self._graph.replay()
        return StepResult(*(values.clone() for values in self._result))


def _needed_guards(entries: Any) -> list[bool]:
    return [entry.guard_type in ("EQUALS_MATCH", "CONSTANT_MATCH") and "_policy_loss" in entry.name for entry in entries]


def _warn_of_eager(reason: str) -> None:
    warnings.warn(f"torch_compile: the update cannot be compiled and runs without ({reason})", stacklevel=5)


def _first_line(error: Exception) -> str:
    """What went wrong, of an error message of PyTorch's that fills a screen."""
    lines = str(error).strip().splitlines() or [repr(error)]
    context = [line.strip() for line in lines if "debug context" in line]
    return f"{type(error).__name__}: {'; '.join([lines[0], *context[:1]])}"
