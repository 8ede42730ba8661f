"""Align language models on TRL: GRPO with a shaping function, and the paper's GANO.

``python -m sb3_ano.llm`` is the command line.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sb3_ano.extras import missing_extra

if TYPE_CHECKING:
    from sb3_ano.llm.comparison import compare
    from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig
    from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer
    from sb3_ano.llm.rewards import LearnedReward
    from sb3_ano.llm.training import train

__all__ = ["GANOConfig", "GANOTrainer", "LearnedReward", "ShapedGRPOConfig", "ShapedGRPOTrainer", "compare", "train"]
_MODULES = {
    "GANOConfig": "config",
    "ShapedGRPOConfig": "config",
    "LearnedReward": "rewards",
    "compare": "comparison",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    # TRL takes ten seconds to import, which the command line's help need not wait for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"sb3_ano.llm.{_MODULES.get(name, 'grpo')}")
    except ModuleNotFoundError as error:
        raise missing_extra("llm", str(error.name).partition(".")[0]) from error
    return getattr(module, name)
