"""Every private name of PyTorch that this package reads, each with a fallback if a version of PyTorch lacks it."""

import contextlib
import ctypes
import functools
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

# Attributes that hold hooks, by what they belong to.
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL_MODULES = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_HOOKS_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
# Attributes of a module that hold its parameters, submodules and buffers by name.
_REGISTRIES = ("_parameters", "_modules", "_buffers")

_ABSENT = object()


def has_hooks(owner: nn.Module | nn.Parameter | Optimizer) -> bool:
    """Tell whether hooks are registered on a module, a parameter, or an optimizer; True if this cannot be known.

    Hooks of PyTorch's that are called for every module or optimizer count.
    """
    sources: tuple[tuple[Any, tuple[str, ...]], ...]
    if isinstance(owner, nn.Module):
        sources = ((owner, _MODULE_HOOKS), (_modules, _HOOKS_OF_ALL_MODULES))
    elif isinstance(owner, Optimizer):
        sources = ((owner, _OPTIMIZER_HOOKS), (_optimizers, _HOOKS_OF_ALL_OPTIMIZERS))
    else:
        sources = ((owner, _PARAMETER_HOOKS),)
    for source, names in sources:
        for name in names:
            hooks = getattr(source, name, _ABSENT)
            if hooks is _ABSENT:
                _warn_of_absence(name)
            if hooks:
                return True
    return False


def registries(module: nn.Module) -> list[dict[str, Any]] | None:
    """The dictionaries that hold a module's parameters, submodules, buffers, and hooks; None if they cannot be known."""
    names = (*_REGISTRIES, *_MODULE_HOOKS)
    return [getattr(module, name) for name in names] if all(hasattr(module, name) for name in names) else None


@functools.cache
def _warn_of_absence(name: str) -> None:
    warnings.warn(
        f"torch {torch.__version__} has no {name}: hooks cannot be ruled out, and models train the slow way, as in SB3",
        stacklevel=3,
    )


def compiler_obstacle(options: dict[str, Any]) -> str | None:
    """Say what this version of PyTorch lacks for a compiled update, or None.

    :param options: options of ``torch.compile`` that the update asks for
    """
    try:
        from torch._dynamo import config
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # noqa: F401
        from torch._inductor import list_options

        known = list_options()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} lacks what it needs: {error}"
    absent = [name for name in _TRACING if not hasattr(config, name)] + [name for name in options if name not in known]
    return f"torch {torch.__version__} has no setting {absent[0]}" if absent else None


# The limit on recompilations is the caller's; Dynamo's own logs 20 lines for one that is exceeded.
_TRACING = {"trace_autograd_ops": True, "recompile_limit": 1000}


def tracing() -> contextlib.AbstractContextManager[Any]:
    """Settings under which gradients are traced; they hold for this thread, until the end of the block."""
    from torch._dynamo import config

    return config.patch(_TRACING)


def compilations(function: types.FunctionType) -> list[Any]:
    """The compilations of a function that was given to ``torch.compile``, the last one that ran first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(function.__code__)


def without_guards(function: types.FunctionType) -> Callable[..., Any] | None:
    """The compilation of a function that ran last, to be called without evaluating its guards; None if there is none."""
    entries = compilations(function)
    if not entries:
        return None
    names = function.__name__, function.__defaults__, function.__closure__
    return types.FunctionType(entries[0].code, function.__globals__, *names)


@functools.cache
def products_by_onednn(at_least: int) -> Any:
    """A pass over compiled graphs that gives large float32 products of matrices to oneDNN instead of MKL; None if it cannot.

    :param at_least: multiplications of a product from which on it is large
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

        linear = torch.ops.mkldnn._linear_pointwise
    except (ImportError, AttributeError):
        return None
    aten = torch.ops.aten

    # An operator of our own, because the compiler copies transposed matrices before it calls that of PyTorch.
    @torch.library.custom_op("sb3_ano::product", mutates_args=())
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return linear(left, right.T, None, "none", [], "")

    @product.register_fake
    def _(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.new_empty(left.shape[0], right.shape[1])

    class Products(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            products = (graph.find_nodes(op="call_function", target=op) for op in (aten.mm.default, aten.addmm.default))
            for node in itertools.chain(*products):
                *bias, left, right = node.args
                result, inner = node.meta["val"], left.meta["val"].shape[1]
                if result.dtype != torch.float32 or result.numel() * inner < at_least or node.kwargs:
                    continue
                with graph.inserting_before(node):
                    value = graph.call_function(product._opoverload, (left, right))
                    value.meta.update(node.meta)
                    if bias:
                        value = graph.call_function(aten.add.Tensor, (value, *bias))
                        value.meta.update(node.meta)
                node.replace_all_uses_with(value)
                graph.erase_node(node)

        def uuid(self) -> Any:  # of the compiler's cache
            return get_hash_for_files((__file__,), str(at_least))

    return Products()


def packed_linear(layer: nn.Linear, batch_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward pass of a layer without gradients, with a copy of its weights in the order in which oneDNN reads them.

    :param layer: layer on the CPU
    :param batch_size: number of rows that the order is best for
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), batch_size)
        product = torch.ops.mkldnn._linear_pointwise
    except (AttributeError, RuntimeError):  # built without oneDNN, or the processor lacks the type of number
        return layer.forward
    return lambda inputs: product(inputs, packed, layer.bias, "none", [], "")


def norm_of_all(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors together, a 0-d tensor, without the checks of ``torch.nn.utils.get_total_norm``."""
    if hasattr(torch, "_foreach_norm"):
        norms = torch._foreach_norm(tensors)
    else:
        norms = tuple(torch.linalg.vector_norm(tensor) for tensor in tensors)
    return torch.linalg.vector_norm(torch.stack(norms))


def scale_all(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a 0-d tensor, in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def end_idle_threads() -> None:
    """End PyTorch's threads on the CPU until the next operation that is worth several; nothing happens if OpenMP cannot."""
    if (pause := _pause_of_openmp()) is not None:
        pause(1)  # omp_pause_soft


@functools.cache
def _pause_of_openmp() -> Any:
    try:  # of the library that PyTorch's own is linked with: there may be others in the process
        return ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
