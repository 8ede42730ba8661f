"""``all_plots`` dies of one run with one episode in its evaluations, and keeps a single number of one run or one episode.

``plot_from_file``, which expects a number of each run, dies of that in turn.
"""

import ast
import pickle
import sys
import types
from typing import Any

import numpy as np

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.repairs._source import compile_anew, function_in, syntax_tree

try:
    import rl_zoo3.plots
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_FUNCTION = "all_plots"
_SQUEEZED, _WHOLE = "np.array(last_eval).squeeze()", "np.array(last_eval)"
# The package has functions of the modules' names, which hide the modules.
_all_plots: Any = sys.modules["rl_zoo3.plots.all_plots"]
_plot_from_file: Any = sys.modules["rl_zoo3.plots.plot_from_file"]


def is_needed() -> bool:
    """Whether all_plots squeezes the last evaluations before it averages over the episodes of each run."""
    if _plot_from_file.pickle is not pickle:
        return False
    function = function_in(syntax_tree(_all_plots.__name__), _FUNCTION)
    return any(ast.unparse(node) == _SQUEEZED for node in ast.walk(function))


def apply() -> None:
    """Average without squeezing; of files that were written before, take the returns that lie beside the number."""
    function = function_in(syntax_tree(_all_plots.__name__), _FUNCTION)
    compile_anew(_all_plots, _Unsqueezed().visit(function))
    rl_zoo3.plots.all_plots = getattr(_all_plots, _FUNCTION)
    _plot_from_file.pickle = types.SimpleNamespace(load=_load)


class _Unsqueezed(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:  # the name that is looked for
        if ast.unparse(node) == _SQUEEZED:
            return ast.parse(_WHOLE, mode="eval").body
        return self.generic_visit(node)


def _load(file: Any) -> Any:
    results = pickle.load(file)
    for env, by_label in results.items():
        if env == "results_table":
            continue
        for result in by_label.values():
            if np.ndim(result["last_evals"]) == 0:
                result["last_evals"] = np.asarray(result["mean_per_eval"])[-1]
    return results
