"""``benchmark`` and ``record_training`` start a ``python`` that does not know other packages' algorithms.

``python`` is whatever the shell finds under that name, and ``benchmark`` asks it for an ``enjoy.py`` in the current folder.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

from sb3_ano.zoo.repairs._source import syntax_tree

_MODULES = ("rl_zoo3.benchmark", "rl_zoo3.record_training")


def is_needed() -> bool:
    """Whether one of the commands starts ``python`` by that name."""
    if hasattr(subprocess.call, "__wrapped__"):
        return False
    lists = (node for module in _MODULES for node in ast.walk(syntax_tree(module)) if isinstance(node, ast.List))
    return any(isinstance(node.elts[0], ast.Constant) and node.elts[0].value == "python" for node in lists if node.elts)


def apply() -> None:
    """Start this interpreter with this package's command line instead."""
    original = subprocess.call

    @functools.wraps(original)
    def call(command: Any, *args: Any, **kwargs: Any) -> int:
        return original(with_our_algorithms(command), *args, **kwargs)

    subprocess.call = call  # type: ignore[assignment]


def with_our_algorithms(command: Any) -> Any:
    """The same command of the zoo through this package's command line; other commands as they are."""
    match command:
        case ["python", "enjoy.py", *arguments]:
            return [*_entry_point(), "enjoy", *arguments]
        case ["python", "-m", str(module), *arguments] if module.startswith("rl_zoo3."):
            return [*_entry_point(), module.removeprefix("rl_zoo3."), *arguments]
    return command


def _entry_point() -> list[str]:
    """In a clone, which need not be installed, its script."""
    script = Path(__file__).resolve().parents[3] / "zoo_runner.py"
    return [sys.executable, str(script)] if script.is_file() else [sys.executable, "-m", "sb3_ano.zoo"]
