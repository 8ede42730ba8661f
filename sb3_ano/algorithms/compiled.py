"""A minibatch step through ``torch.compile``, and through CUDA graphs."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

# Samples times parameters of a minibatch from which on its loops are worth a second thread.
_WORTH_A_THREAD = 10_000_000


class CompilationError(RuntimeError):
    """A step could not be compiled; nothing was changed."""


class CompiledStep:
    """A bound method, compiled for minibatches of one length.

    PyTorch checks at every call whether what the code depends on is still as it was when it was compiled, and these guards
    would cost a fifth of the step. During an epoch nothing changes but the data: guards are evaluated at its first call only,
    where a change leads to another compilation.

    :param step: ``step(rollout, indices)``, a NamedTuple of tensors
    :param device: where it computes
    :param products: samples of a minibatch times parameters; with few of them, one thread is faster than waking others
    """

    def __init__(self, step: Any, device: torch.device, products: int) -> None:
        function = step.__func__
        # Compiled code is cached with the code object of a function. With a copy of its own, calls without guards can only
        # find what was compiled for this step.
        copy = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        options: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
        if device.type == "cpu":
            options |= {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}
            if products < _WORTH_A_THREAD:
                options["cpp.threads"] = 1
        self._step = types.MethodType(torch.compile(copy, fullgraph=True, dynamic=False, options=options), step.__self__)
        self._captured = CapturedStep(self._step, device) if device.type == "cuda" else None
        self._checked = False

    def begin(self) -> None:
        """Evaluate the guards at the next call."""
        self._checked = False

    def __call__(self, rollout: Any, indices: torch.Tensor | None) -> Any:
        """One step.

        :raises CompilationError: if it had to be compiled, and that failed
        """
        if self._checked:
            with contextlib.suppress(_GuardError):
                return self._unguarded(rollout, indices)
        compilations = _compilations()
        try:
            with _all_guards():
                result = self._step(rollout, indices)
        except Exception as error:  # a missing compiler, code that cannot be traced, or changes without end
            raise CompilationError(_first_line(error)) from error
        self._checked = True
        if self._captured is not None and _compilations() != compilations:
            self._captured.forget()
        return result

    def _unguarded(self, rollout: Any, indices: torch.Tensor | None) -> Any:
        try:
            return (self._captured or self._step)(rollout, indices)
        except RuntimeError as error:
            # Where there are several compilations, those guards that tell them apart are evaluated all the same.
            if "skip_guard_eval_unsafe" in str(error):
                raise _GuardError from error
            raise


class _GuardError(Exception):
    """None of the compilations fits; nothing was run."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """What has to be set while compiled steps run: from the second call of an epoch on, no guards."""
    from torch._dynamo import config

    with config.patch(trace_autograd_ops=True), torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        yield


def _all_guards() -> Any:
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=False)


def _compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _first_line(error: Exception) -> str:
    """What went wrong, of an error message of PyTorch's that fills a screen."""
    lines = str(error).strip().splitlines() or [repr(error)]
    context = [line.strip() for line in lines if "debug context" in line]
    return f"{type(error).__name__}: {'; '.join([lines[0], *context[:1]])}"


class CapturedStep:
    """Replays a step as one CUDA graph, which costs the host two launches in place of one for each kernel.

    The first calls run as they are, for libraries to set themselves up. A rollout that lies elsewhere in memory than the one
    that was captured is captured anew; those of a :class:`~sb3_ano.algorithms.buffers.FlatRolloutBuffer` stay where they are.

    :param step: ``step(rollout, indices)``, a NamedTuple of tensors
    :param device: a CUDA device
    """

    _ORDINARY_CALLS = 3

    def __init__(self, step: Callable[[Any, torch.Tensor | None], Any], device: torch.device) -> None:
        self._step, self._device = step, device
        self._calls = 0
        self.forget()

    def forget(self) -> None:
        """Capture anew at the next call."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []

    def __call__(self, rollout: Any, indices: torch.Tensor | None) -> Any:
        """One step."""
        self._calls += 1
        if indices is None or self._calls <= self._ORDINARY_CALLS:
            return self._step(rollout, indices)
        with torch.cuda.device(self._device):
            if self._graph is None or _addresses(rollout) != self._addresses:
                self._capture(rollout, indices)
            self._indices.copy_(indices)
            self._graph.replay()  # type: ignore[union-attr]
            return type(self._result)(*(values.clone() for values in self._result))

    def _capture(self, rollout: Any, indices: torch.Tensor) -> None:
        """Record the step, which executes nothing."""
        self._indices = indices.clone()
        self._addresses = _addresses(rollout)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result: NamedTuple | Any = self._step(rollout, self._indices)


def _addresses(rollout: Any) -> list[int]:
    parts = [values.values() if isinstance(values, dict) else [values] for values in rollout]
    return [tensor.data_ptr() for part in parts for tensor in part]
