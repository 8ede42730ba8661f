"""Run the step of a minibatch through ``torch.compile``, as a function of vectors, a rollout, indices and numbers.

Two properties make the compiled step fast. It takes a few tensors, because dozens of parameters that share memory are a slow
input. And nothing in it waits for a decision: what :class:`~sb3_ano.fast.step.EagerStep` decides in branches is a factor here.
"""

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.func import functional_call
from torch.optim import Optimizer

from sb3_ano._system import machine
from sb3_ano.fast.policy import PolicyEvaluation
from sb3_ano.fast.private import compilations, products_by_onednn, without_guards
from sb3_ano.fast.step import (
    Losses,
    NumberTensors,
    Settings,
    StepResult,
    adam_state,
    approximate_kl,
    gather,
    minibatch_loss,
    step_result,
    trained_parameters,
)

# Samples times parameters of a minibatch from which on its loops are worth a second thread.
_WORTH_A_THREAD = 10_000_000
# Multiplications of a product of matrices from which on oneDNN is twice as fast where MKL is slow.
_LARGE_PRODUCT = 2**20
# Compilations of one step, altogether and in consecutive calls, after which it is taken to change at every call. A module that
# counts its calls would otherwise be compiled for each minibatch, at some 10 s each.
_COMPILATIONS = 8
_COMPILATIONS_IN_A_ROW = 3
# Each tensor starts at a multiple of this many numbers: a cache line of float32, for aligned vector instructions.
_ALIGNMENT = 16


class CompilationError(RuntimeError):
    """A step could not be compiled; nothing was changed."""


class Vectors(NamedTuple):
    """Parameters and the state of Adam, as compiled code gets them: a few tensors instead of dozens.

    :param parameters: all trained parameters in one vector
    :param leaf: the same memory, to differentiate by
    :param first: first moments
    :param second: second moments
    :param steps: number of steps, 0-d
    :param learning_rate: 0-d float64, as are the next three; tensors, so that a schedule does not recompile
    """

    parameters: torch.Tensor
    leaf: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    steps: torch.Tensor
    learning_rate: torch.Tensor
    beta1: torch.Tensor
    beta2: torch.Tensor
    eps: torch.Tensor


class FlatVectors:
    """Copy parameters and Adam's state to vectors before the compiled steps of an update, and back after them.

    On the CPU, the vectors take memory between :meth:`attach` and :meth:`detach` only. Outside of an update, parameters and
    optimizer are as without them.

    :param optimizer: plain Adam
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors = trained_parameters(optimizer)
        # Rounded up, so that the next tensor is aligned.
        self._sizes = []
        for tensor in self.tensors:
            cache_lines = math.ceil(tensor.numel() / _ALIGNMENT)
            self._sizes.append(cache_lines * _ALIGNMENT)
        self._is_attached = False

        device = self.tensors[0].device
        parameters = torch.zeros(sum(self._sizes), dtype=torch.float32, device=device)
        # PyTorch's Adam computes with Python's floats, which are float64: float32 would round 1 - beta2 to other digits.
        self._numbers = torch.zeros(4, dtype=torch.float64, device=device)
        learning_rate, beta1, beta2, eps = self._numbers.unbind()
        self.vectors = Vectors(
            parameters=parameters,
            # Made here, because PyTorch 2.11 cannot trace its creation.
            leaf=parameters.detach().requires_grad_(),
            first=torch.zeros_like(parameters),
            second=torch.zeros_like(parameters),
            steps=torch.zeros((), dtype=torch.float32, device=device),
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
        )
        self._bytes = parameters.untyped_storage().nbytes()

    @torch.no_grad()
    def attach(self) -> None:
        """Copy parameters, moments and numbers of the optimizer to the vectors."""
        parameters, _, first, second, steps, *_ = self.vectors
        for vector in (parameters, first, second):
            storage = vector.untyped_storage()
            # On CUDA, even the same size would give it another address, which recorded graphs do not follow.
            if storage.nbytes() != self._bytes:
                storage.resize_(self._bytes)
            # The gaps between tensors, too: the norm of the gradient and Adam run over the whole vector.
            vector.zero_()

        views = zip(
            self.tensors,
            self.views(parameters),
            self.views(first),
            self.views(second),
            strict=True,
        )
        for tensor, of_parameter, of_first, of_second in views:
            # Before the first update of a model, Adam has no state yet.
            state = adam_state(self._optimizer, tensor)
            of_parameter.copy_(tensor)
            of_first.copy_(state["exp_avg"])
            of_second.copy_(state["exp_avg_sq"])

        # Read at every update: a schedule, or a user, may have changed them.
        group = self._optimizer.param_groups[0]
        numbers = [float(group["lr"]), *group["betas"], group["eps"]]
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        # One count is enough: the rule "uneven steps" leaves other models uncompiled.
        steps.copy_(self._optimizer.state[self.tensors[0]]["step"])
        self._is_attached = True

    @torch.no_grad()
    def detach(self) -> None:
        """Copy the vectors to parameters and optimizer, and give their memory back."""
        # An update whose compilation failed has detached them already.
        if not self._is_attached:
            return
        parameters, _, first, second, steps, *_ = self.vectors

        count = steps.item()
        views = zip(
            self.tensors,
            self.views(parameters),
            self.views(first),
            self.views(second),
            strict=True,
        )
        for tensor, of_parameter, of_first, of_second in views:
            state = self._optimizer.state[tensor]
            tensor.copy_(of_parameter)
            state["exp_avg"].copy_(of_first)
            state["exp_avg_sq"].copy_(of_second)
            state["step"].fill_(count)

        self._is_attached = False
        if parameters.device.type == "cpu":
            for vector in (parameters, first, second):
                vector.untyped_storage().resize_(0)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Split a vector of all parameters into tensors of their shapes."""
        views = []
        for part, like in zip(vector.split(self._sizes), self.tensors, strict=True):
            # Without the gap at the end of the part.
            numbers = part[: like.numel()]
            views.append(numbers.view(like.shape))
        return views

    def flattened(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join tensors with the shapes of the parameters to a vector, with zeros in the gaps."""
        parts = []
        for tensor, size in zip(tensors, self._sizes, strict=True):
            parts.append(tensor.reshape(-1))
            if size > tensor.numel():
                parts.append(tensor.new_zeros(size - tensor.numel()))
        return torch.cat(parts)


def adam_on_vectors(vectors: Vectors, gradient: torch.Tensor, apply: torch.Tensor) -> None:
    """Make one step of Adam (Kingma & Ba 2015, Algorithm 1) in place, or none.

    :param vectors: parameters and state of Adam
    :param gradient: gradient of the loss by the parameters, finite if ``apply`` is 1
    :param apply: 0-d float64, 1 or 0; with 0, parameters, moments and steps stay as they are
    """
    parameters, _, first, second, steps, learning_rate, beta1, beta2, eps = vectors
    # A factor instead of a branch, so that compiled code need not wait for the decision.
    steps.add_(apply.float())
    # The first minibatch may make no step; a count of 0 would divide 0 by 0 below.
    count = steps.double().clamp(min=1.0)
    # where() instead of a product, because 0 * NaN is NaN.
    gradient = torch.where(apply > 0.0, gradient, 0.0)
    weight = ((1.0 - beta2) * apply).float()

    # The order of PyTorch's own Adam, so that rounding differs as little as possible.
    first.lerp_(gradient, ((1.0 - beta1) * apply).float())
    second.mul_(1.0 - weight).add_(weight * gradient * gradient)
    denominator = second.sqrt() / (1.0 - beta2**count).sqrt().float() + eps
    size = (apply * learning_rate / (1.0 - beta1**count)).float()
    parameters.sub_(size * first / denominator)


class _Loss(torch.nn.Module):
    """The loss as a module with the policy in it, so that ``functional_call`` replaces the parameters in all of it."""

    def __init__(self, evaluation: PolicyEvaluation, settings: Settings) -> None:
        super().__init__()
        self.policy = evaluation.policy
        self._evaluation = evaluation
        self._settings = settings

    def forward(self, samples: Any, numbers: NumberTensors) -> Losses:
        return minibatch_loss(self._evaluation, self._settings, samples, numbers)


#: ``step(vectors, rollout, indices, numbers)``. Without indices, the rollout is a minibatch, of a custom buffer's own type.
Step: TypeAlias = Callable[[Vectors, Any, torch.Tensor | None, NumberTensors], StepResult]


def make_step(
    flat: FlatVectors,
    evaluation: PolicyEvaluation,
    settings: Settings,
    uses_all: bool,
) -> Step:
    """Return the step of a minibatch as a function of tensors, which changes the vectors in place.

    :param flat: vectors of the policy
    :param evaluation: evaluation of the policy
    :param settings: properties of the algorithm
    :param uses_all: whether the loss depends on all parameters, as with SB3's policies
    """
    loss_module = _Loss(evaluation, settings)
    policy = evaluation.policy
    names = [f"policy.{name}" for name, parameter in policy.named_parameters() if parameter.requires_grad]

    def step(
        vectors: Vectors,
        rollout: Any,
        indices: torch.Tensor | None,
        numbers: NumberTensors,
    ) -> StepResult:
        samples = rollout
        if indices is not None:
            samples = gather(rollout, indices)

        # Parts of the vector replace the parameters: compiled code gets one tensor instead of dozens.
        parts = flat.views(vectors.leaf)
        replaced = dict(zip(names, parts, strict=True))
        # One module may be registered under several names, as SB3's shared features extractor is. Replacing its parameters
        # under the first is enough.
        losses = functional_call(loss_module, replaced, (samples, numbers), tie_weights=False)

        # A frozen actor leaves nothing to differentiate the log-ratio by. This is known when the step is traced.
        wanted = []
        if losses.log_ratio.requires_grad:
            wanted.append(losses.log_ratio)

        if uses_all:
            # By the vector itself: no gradients of parts have to be joined.
            gradient, *rest = torch.autograd.grad(losses.loss, [vectors.leaf, *wanted])
        else:
            # Parameters of custom policies may get no gradient, which is not one of zero.
            gradients = torch.autograd.grad(losses.loss, [*parts, *wanted], allow_unused=True)
            of_parts = list(gradients[: len(parts)])
            if any(part is None for part in of_parts):
                # Adam leaves such parameters alone. On the vector, it would move them by their old moments.
                raise RuntimeError("some of its parameters get no gradient")
            gradient = flat.flattened(of_parts)
            rest = list(gradients[len(parts) :])
        log_ratio_grad = rest[0] if rest else None

        # Stop, clip and skip as in EagerStep, without branches: a minibatch that is to change nothing gets a factor of 0. The
        # gradient is computed in any case, because the decision is known only when all kernels have run.
        norm = torch.linalg.vector_norm(gradient)
        factor = (numbers.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = gradient * factor
        stop = approximate_kl(losses.log_ratio) > numbers.max_kl
        apply = ~stop
        if settings.skips_non_finite:
            apply = apply & torch.isfinite(losses.loss + norm)
        with torch.no_grad():
            adam_on_vectors(vectors, clipped, apply.double())

        return step_result(losses, norm, log_ratio_grad, stop)

    return step


def compiler_options(device: torch.device, products: int, known_code: bool) -> dict[str, Any]:
    """Return options of ``torch.compile`` for a step; they change its speed only, unless its code is known.

    :param device: device of the step
    :param products: samples of a minibatch times parameters; with few of them, one thread is faster than waking others
    :param known_code: whether all code is PyTorch's, SB3's, and this package's, and actions are not squashed; then ``tanh``
        may be computed from ``exp``, with an absolute error of 1e-7. Code that divides by ``1 - tanh(x) ** 2`` or takes its
        logarithm, as squashed gSDE does, would lose all digits
    """
    options: dict[str, Any] = {
        # The sizes and the alignment of the vectors are made here, and hold for every call.
        "size_asserts": False,
        "alignment_asserts": False,
        # Random numbers are drawn as without compilation, so that dropout has the same masks.
        "fallback_random": True,
    }
    if device.type != "cpu":
        return options

    # The code that calls the kernels is C++, too: Python would take longer than the kernels of small networks.
    options["cpp_wrapper"] = True
    options["cpp.use_decompose_tanh"] = known_code
    # Without a probe per set of instructions that compiles a library; the sets still follow the processor's flags.
    options["cpp.vec_isa_ok"] = True

    if products < _WORTH_A_THREAD:
        options["cpp.threads"] = 1
    elif _mkl_is_slow():
        products_pass = products_by_onednn(_LARGE_PRODUCT)
        if products_pass is not None:
            options["post_grad_custom_pre_pass"] = products_pass
    return options


def _mkl_is_slow() -> bool:
    """Tell whether MKL makes large products at half of the processor's speed, as it does on AMD's with AVX-512."""
    return "AMD" in machine()["cpu"] and torch.backends.cpu.get_cpu_capability() == "AVX512"


class CompiledStep:
    """Compile a step for minibatches of one length.

    PyTorch checks at every call whether the objects that the code depends on are as they were at compilation. These guards
    cost a third of a small step. If nothing but data should change during an epoch, guards are evaluated at the first call of
    the epoch, and once more after each compilation, because the call itself may have changed something.

    :param step: step of a minibatch
    :param options: options of ``torch.compile``
    :param is_constant: whether nothing but data should change during an epoch
    """

    def __init__(self, step: Step, options: dict[str, Any], is_constant: bool) -> None:
        assert isinstance(step, types.FunctionType)  # made by make_step
        # Compiled code is cached with the code object of a function: a copy has compilations of its own.
        code = step.__code__.replace()
        self._function = types.FunctionType(
            code,
            step.__globals__,
            step.__name__,
            step.__defaults__,
            step.__closure__,
        )
        # A graph with breaks would be slower than the eager step; dynamic shapes, than one compilation per length.
        self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, options=options)
        self._is_constant = is_constant
        self._compilations_in_a_row = 0
        # The last compilation, to be called without guards until the epoch ends.
        self._unguarded: Callable[..., StepResult] | None = None

    def start_epoch(self) -> None:
        """Evaluate the guards at the next call."""
        self._unguarded = None

    def __call__(self, *arguments: Any) -> StepResult:
        """Make one step.

        :raises CompilationError: if compilation failed, or would be needed too often
        """
        if self._unguarded is not None:
            return self._unguarded(*arguments)

        # The limit of the compiler itself is lifted in private.py, so that this one acts, with its own message.
        before = len(compilations(self._function))
        if before >= _COMPILATIONS or self._compilations_in_a_row >= _COMPILATIONS_IN_A_ROW:
            raise CompilationError(f"it was compiled {before} times, because what it depends on keeps changing")
        try:
            result: StepResult = self._compiled(*arguments)
        except Exception as error:
            # A missing compiler, or code that cannot be traced. Its text fills a screen.
            lines = str(error).strip().splitlines() or [""]
            raise CompilationError(f"{type(error).__name__}: {lines[0]}") from error

        if len(compilations(self._function)) > before:
            # Guards are evaluated once more, at the next call.
            self._compilations_in_a_row += 1
            return result

        self._compilations_in_a_row = 0
        if self._is_constant:
            self._unguarded = without_guards(self._function)
        return result
