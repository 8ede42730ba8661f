"""Align language models on TRL with shaping functions: PPO, SPO and ANO with a critic, GRPO and GANO without.

``python -m sb3_ano.llm`` is the command line.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sb3_ano.extras import needs_extra

if TYPE_CHECKING:
    from sb3_ano.llm.comparison import compare
    from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig, ShapedPPOConfig
    from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer
    from sb3_ano.llm.ppo import ANOTrainer, PPOTrainer, ShapedPPOTrainer, SPOTrainer
    from sb3_ano.llm.rewards import LearnedReward
    from sb3_ano.llm.smollm import model_path
    from sb3_ano.llm.training import train

__all__ = [
    "ANOTrainer",
    "GANOConfig",
    "GANOTrainer",
    "LearnedReward",
    "PPOTrainer",
    "SPOTrainer",
    "ShapedGRPOConfig",
    "ShapedGRPOTrainer",
    "ShapedPPOConfig",
    "ShapedPPOTrainer",
    "compare",
    "model_path",
    "train",
]


def __getattr__(name: str) -> Any:
    # TRL takes ten seconds to import, which the command line's help need not wait for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"LearnedReward": "rewards", "GANOTrainer": "grpo", "ShapedGRPOTrainer": "grpo"}
    modules |= {"compare": "comparison", "model_path": "smollm", "train": "training"}
    module = modules.get(name, "config" if name.endswith("Config") else "ppo")
    with needs_extra("llm"):
        return getattr(importlib.import_module(f"sb3_ano.llm.{module}"), name)
