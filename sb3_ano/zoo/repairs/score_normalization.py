"""``plot_from_file --rliable`` normalises a handful of environments, and aggregates them with raw scores of all others."""

import ast
import functools
import sys
from typing import Any

from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.extras import missing_extra
from sb3_ano.zoo.repairs._source import compile_anew, function_in, syntax_tree

try:
    import rl_zoo3.plots
    from rl_zoo3.plots.score_normalization import min_max_score_per_env
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_FUNCTION = "plot_from_file"
# The package has a function of the module's name, which hides the module.
_module = sys.modules[f"rl_zoo3.plots.{_FUNCTION}"]
_TABLE = "env_key_to_env_id"


class NormalizedEnvironments(dict[str, str]):
    """The zoo's table of environments to normalise, and all others with reference scores, which go by their id."""

    def __init__(self, known: dict[str, str]) -> None:
        super().__init__(known)
        self._references = ReferenceScores()

    def __contains__(self, env: object) -> bool:
        return super().__contains__(env) or env in min_max_score_per_env or self._references.find(str(env)) is not None

    def __missing__(self, env: str) -> str:
        return env


def is_needed() -> bool:
    """Whether the function has a table of its own of what to normalise, in which MuJoCo's environments are missing."""
    if hasattr(_module.normalize_score, "__wrapped__"):
        return False
    table = _table_in(function_in(syntax_tree(_module.__name__), _FUNCTION))
    return table is not None and "HalfCheetah-v5" not in ast.literal_eval(table.value)


def apply() -> None:
    """Normalise those too, by this package's reference scores.

    The table is inside the function, which is compiled anew with another in its place.
    """
    _module.normalize_score = _by_our_references(_module.normalize_score)  # type: ignore[attr-defined]
    function = function_in(syntax_tree(_module.__name__), _FUNCTION)
    table = _table_in(function)
    assert table is not None  # or the repair is not needed
    table.value = ast.Call(ast.Name(NormalizedEnvironments.__name__, ast.Load()), [table.value], [])
    vars(_module)[NormalizedEnvironments.__name__] = NormalizedEnvironments
    compile_anew(_module, function)
    rl_zoo3.plots.plot_from_file = getattr(_module, _FUNCTION)


def _table_in(function: ast.FunctionDef) -> ast.Assign | None:
    assignments = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    return next((one for one in assignments if ast.unparse(one.targets[0]) == _TABLE), None)


def _by_our_references(normalize: Any) -> Any:
    references = ReferenceScores()

    @functools.wraps(normalize)
    def normalize_score(score: Any, env_id: str) -> Any:
        return normalize(score, env_id) if env_id in min_max_score_per_env else references.normalise(env_id, score)

    return normalize_score
