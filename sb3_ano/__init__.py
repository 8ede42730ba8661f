"""Policy optimization with shaping functions, for Stable-Baselines3."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sb3_ano.extras import MissingExtraError

if TYPE_CHECKING:
    from sb3_ano.algorithms import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO
    from sb3_ano.fast import accelerate, explain

try:
    __version__ = version("sb3-ano")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "ANO",
    "PAPO",
    "SPO",
    "MaskableANO",
    "MissingExtraError",
    "RecurrentANO",
    "RecurrentMaskableANO",
    "__version__",
    "accelerate",
    "explain",
]


def __getattr__(name: str) -> Any:
    # On demand, because sb3_ano.shaping and sb3_ano.llm work without Stable-Baselines3 and gymnasium.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "sb3_ano.fast" if name in ("accelerate", "explain") else "sb3_ano.algorithms"
    return getattr(importlib.import_module(module), name)
