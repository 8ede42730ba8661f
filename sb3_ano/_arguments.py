"""Arguments of constructors: their names and defaults, and those that are no hyperparameters."""

import inspect

#: Arguments of SB3's algorithms that decide where and how a training runs, but not what is trained.
NOT_HYPERPARAMETERS = frozenset({"env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"})


def constructor_parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor by name, with those of the base classes that its ``**kwargs`` go to.

    :param kind: class
    """
    named: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue

        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        passes_others = False
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                passes_others = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                named.setdefault(parameter.name, parameter)

        if not passes_others:
            break
    return named
