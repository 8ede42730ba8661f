"""``push_to_hub`` imports ``generate_metadata``, which has been ``_generate_metadata`` since sb3-team-hf-integration 3.0."""

import ast
import sys
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.repairs._source import syntax_tree

try:
    import huggingface_sb3.push_to_hub  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise missing_extra("zoo", error.name or "sb3-team-hf-integration") from error

# The package has a function of the module's name, which hides the module.
_module = sys.modules["huggingface_sb3.push_to_hub"]


def is_needed() -> bool:
    """Whether the zoo imports a name that the Hub's integration has under another."""
    imported = {
        alias.name
        for node in ast.walk(syntax_tree("rl_zoo3.push_to_hub"))
        if isinstance(node, ast.ImportFrom) and node.module == _module.__name__
        for alias in node.names
    }
    return "generate_metadata" in imported and not hasattr(_module, "generate_metadata")


def apply() -> None:
    """Add the name, and return what the zoo saves: a dictionary."""

    def generate_metadata(model_name: str, env_id: str, mean_reward: float, std_reward: float) -> dict[str, Any]:
        return _module._generate_metadata(model_name, env_id, mean_reward, std_reward).to_dict()

    _module.generate_metadata = generate_metadata  # type: ignore[attr-defined]
