"""Every private name of PyTorch that this package reads, each with a fallback if a version of PyTorch lacks it."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as _modules
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

# Attributes that hold hooks, by what they belong to.
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL_MODULES = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_HOOKS_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
# Attributes of a module that hold its parameters and submodules by name.
_REGISTRIES = ("_parameters", "_modules")

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
    """The dictionaries that hold a module's parameters, submodules, and hooks; None if they cannot be known."""
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


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Let distributions be built from tensors without numbers: gSDE samples when it is built, on the meta device too."""
    validates = getattr(Distribution, "_validate_args", __debug__)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)
