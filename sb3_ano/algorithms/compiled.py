"""Run a minibatch step through ``torch.compile``."""

import types
from collections.abc import Callable
from typing import Any

import torch

from sb3_ano._compat import compilations, products_by_onednn, without_guards
from sb3_ano._system import machine

#: Seconds that a compilation takes: about 10 on two cores with an empty cache.
COMPILE_SECONDS = 11.0
#: Seconds that a compiled minibatch saves: a constant, and a part for each sample and parameter. Both are low guesses, from
#: networks of 64-64 and 256-256; convolutions save several times more.
SAVED_SECONDS, SAVED_SECONDS_PER_PRODUCT = 4e-4, 2e-11
# Samples times parameters of a minibatch from which on its loops are worth a second thread.
_WORTH_A_THREAD = 10_000_000
# Multiplications of a product of matrices from which on oneDNN is twice as fast where MKL is slow.
_LARGE_PRODUCT = 2**20
# Compilations of one step, altogether and in consecutive calls, after which it is taken to change at every call.
_COMPILATIONS, _COMPILATIONS_IN_A_ROW = 8, 3


class CompilationError(RuntimeError):
    """A step could not be compiled; nothing was changed."""


def pays(minibatches: float, products: int) -> bool:
    """Tell whether a training is long enough for compilation to save more time than it takes.

    :param minibatches: minibatches of the training
    :param products: samples of a minibatch times parameters
    """
    return minibatches * (SAVED_SECONDS + SAVED_SECONDS_PER_PRODUCT * products) >= COMPILE_SECONDS


def compiler_options(device: torch.device, products: int, stock: bool) -> dict[str, Any]:
    """Return options of ``torch.compile`` for a step; they change its speed only, unless the step is ``stock``.

    :param device: device of the step
    :param products: samples of a minibatch times parameters; with few of them, one thread is faster than waking others
    :param stock: whether all code is PyTorch's, SB3's, and this package's, and actions are not squashed; then ``tanh`` may be
        computed from ``exp``, with an absolute error of 1e-7. Code that divides by ``1 - tanh(x) ** 2`` or takes its
        logarithm, as squashed gSDE does, would lose all digits
    """
    # Random numbers are drawn as without compilation, so that dropout has the same masks.
    options: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False, "fallback_random": True}
    if device.type == "cpu":
        # Without a probe per set of instructions that compiles a library; the sets still follow the processor's flags.
        options |= {"cpp_wrapper": True, "cpp.use_decompose_tanh": stock, "cpp.vec_isa_ok": True}
        if products < _WORTH_A_THREAD:
            options["cpp.threads"] = 1
        elif _mkl_is_slow() and (products_pass := products_by_onednn(_LARGE_PRODUCT)) is not None:
            options["post_grad_custom_pre_pass"] = products_pass
    return options


def _mkl_is_slow() -> bool:
    """Tell whether MKL makes large products at half of the processor's speed, as it does on AMD's with AVX-512."""
    return "AMD" in machine()["cpu"] and torch.backends.cpu.get_cpu_capability() == "AVX512"


class CompiledStep:
    """Compile a bound method for minibatches of one length.

    PyTorch checks at every call whether the objects that the code depends on are as they were at compilation. These guards
    cost a third of a small step. If nothing but data should change during an epoch, guards are evaluated at the first call of
    the epoch, and once more after each compilation, because the call itself may have changed something.

    :param step: bound method ``step(rollout, indices)`` that returns a NamedTuple of tensors
    :param options: options of ``torch.compile``
    :param constant: whether nothing but data should change during an epoch
    """

    def __init__(self, step: Any, options: dict[str, Any], constant: bool) -> None:
        function = step.__func__
        # Compiled code is cached with the code object of a function: a copy has compilations of its own.
        self._function = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        compiled = torch.compile(self._function, fullgraph=True, dynamic=False, options=options)
        self._owner = step.__self__
        self._compiled_fn = types.MethodType(compiled, self._owner)
        self._constant = constant
        self._compilations_in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """Evaluate the guards at the next call."""
        self._unguarded: Callable[..., Any] | None = None

    def __call__(self, rollout: Any, indices: torch.Tensor | None) -> Any:
        """Make one step.

        :raises CompilationError: if compilation failed, or would be needed too often
        """
        if self._unguarded is not None:
            return self._unguarded(self._owner, rollout, indices)
        before = len(compilations(self._function))
        if before >= _COMPILATIONS or self._compilations_in_a_row >= _COMPILATIONS_IN_A_ROW:
            raise CompilationError(f"it was compiled {before} times, because what it depends on keeps changing")
        try:
            result = self._compiled_fn(rollout, indices)
        except Exception as error:  # a missing compiler, or code that cannot be traced; its text fills a screen
            raise CompilationError(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}") from error
        if len(compilations(self._function)) > before:
            self._compilations_in_a_row += 1
            return result
        self._compilations_in_a_row = 0
        if self._constant:
            self._unguarded = without_guards(self._function)
        return result
