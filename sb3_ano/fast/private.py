"""Every private name of PyTorch that the engine reads, each with a fallback if a version of PyTorch lacks it."""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as _modules
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from sb3_ano._system import warn_user

# Attributes that hold hooks, by the kind of object that they belong to.
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

    Hooks that PyTorch calls for every module or optimizer count.
    """
    sources: list[tuple[object, tuple[str, ...]]]
    if isinstance(owner, nn.Module):
        sources = [(owner, _MODULE_HOOKS), (_modules, _HOOKS_OF_ALL_MODULES)]
    elif isinstance(owner, Optimizer):
        sources = [(owner, _OPTIMIZER_HOOKS), (_optimizers, _HOOKS_OF_ALL_OPTIMIZERS)]
    else:
        sources = [(owner, _PARAMETER_HOOKS)]

    for source, names in sources:
        for name in names:
            # None, or an empty dictionary, if there are no hooks.
            hooks = getattr(source, name, _ABSENT)
            if hooks is _ABSENT:
                # The marker counts as a hook: the model trains the slow way, which calls all hooks.
                _warn_of_absence(name)
            if hooks:
                return True

    return False


def registries(module: nn.Module) -> list[dict[str, Any]] | None:
    """Return the dictionaries of a module's parameters, submodules, buffers and hooks; None if they cannot be known."""
    dictionaries = []
    for name in (*_REGISTRIES, *_MODULE_HOOKS):
        registry = getattr(module, name, None)
        if registry is None:
            return None
        dictionaries.append(registry)

    return dictionaries


@functools.cache
def _warn_of_absence(name: str) -> None:
    warn_user(f"torch {torch.__version__} has no {name}: hooks cannot be ruled out, and models train the slow way, as in SB3")


# Settings of the compiler while a step is traced.
_TRACING = {
    # torch.autograd.grad belongs to the step, so that one graph has forward pass, backward pass and Adam.
    "trace_autograd_ops": True,
    # The limit on recompilations is the engine's. Dynamo logs 20 lines if its own is exceeded.
    "recompile_limit": 1000,
}


def compiler_obstacle(options: dict[str, Any]) -> str | None:
    """Say what this version of PyTorch lacks for a compiled update, or None.

    :param options: options of ``torch.compile`` that the update asks for
    """
    # Imported here, because the compiler takes 43 MB, which models that are not compiled do not need.
    try:
        from torch._dynamo import config
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # noqa: F401
        from torch._inductor import list_options

        known = list_options()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} lacks what it needs: {error}"

    for name in _TRACING:
        if not hasattr(config, name):
            return f"torch {torch.__version__} has no setting {name}"
    for name in options:
        if name not in known:
            return f"torch {torch.__version__} has no setting {name}"

    return None


def tracing() -> contextlib.AbstractContextManager[object]:
    """Return a context in which gradients are traced; the settings hold for this thread."""
    from torch._dynamo import config

    return config.patch(_TRACING)


def compilations(function: types.FunctionType) -> list[Any]:
    """Return the compilations of a function that was given to ``torch.compile``, the last one that ran first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(function.__code__)


def without_guards(function: types.FunctionType) -> Callable[..., Any] | None:
    """Return the compilation that ran last, to be called without evaluating its guards; None if there is none."""
    # PyTorch's own way of skipping guards, a stance, holds for the whole process, and other threads compile, too.
    entries = compilations(function)
    if not entries:
        return None

    return types.FunctionType(
        entries[0].code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@functools.cache
def products_by_onednn(at_least: int) -> Any:
    """Return a pass over compiled graphs that gives large float32 products of matrices to oneDNN instead of MKL.

    :param at_least: multiplications of a product from which on it is large
    :return: the pass, or None if this version of PyTorch cannot
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

        linear = torch.ops.mkldnn._linear_pointwise
    except (ImportError, AttributeError):
        return None
    aten = torch.ops.aten

    # A custom operator, because the compiler copies transposed matrices before it calls that of PyTorch.
    @torch.library.custom_op("sb3_ano::product", mutates_args=())
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return linear(left, right.T, None, "none", [], "")

    # The shape of the result, for the compiler.
    @product.register_fake
    def _(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.new_empty(left.shape[0], right.shape[1])

    class Products(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            without_bias = graph.find_nodes(op="call_function", target=aten.mm.default)
            with_bias = graph.find_nodes(op="call_function", target=aten.addmm.default)
            for node in itertools.chain(without_bias, with_bias):
                # addmm(bias, left, right), or mm(left, right).
                *bias, left, right = node.args
                result = node.meta["val"]
                size = result.numel() * left.meta["val"].shape[1]
                # Keywords scale bias or product, which the operator does not.
                if result.dtype != torch.float32 or size < at_least or node.kwargs:
                    continue

                with graph.inserting_before(node):
                    value = graph.call_function(product._opoverload, (left, right))
                    value.meta.update(node.meta)
                    if bias:
                        # A separate addition, which the compiler may fuse with what follows.
                        value = graph.call_function(aten.add.Tensor, (value, *bias))
                        value.meta.update(node.meta)
                node.replace_all_uses_with(value)
                graph.erase_node(node)

        def uuid(self) -> bytes:
            # Identifies the pass in the compiler's cache: other code, or another limit, makes another graph.
            return get_hash_for_files((__file__,), str(at_least))

    return Products()


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """Let distributions take their parameters unseen, because looking at them waits for the device."""
    # The setting holds for the process, and may be the user's.
    before = getattr(Distribution, "_validate_args", True)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def _scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


#: The norm of each tensor, and the product of each tensor with a 0-d tensor, in place, in one call.
norms: Callable[[list[torch.Tensor]], list[torch.Tensor]] = getattr(torch, "_foreach_norm", _norms)
scale: Callable[[list[torch.Tensor], torch.Tensor], None] = getattr(torch, "_foreach_mul_", _scale)
