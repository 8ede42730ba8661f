"""Alignment of language models: GRPO with a shaping function, and the paper's GANO, on TRL.

``python -m sb3_ano.llm`` trains, and shows the differences on a small task of its own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig
    from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer

__all__ = ["GANOConfig", "GANOTrainer", "ShapedGRPOConfig", "ShapedGRPOTrainer"]


def __getattr__(name: str) -> Any:
    # TRL takes ten seconds to import, which the command line's help need not wait for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sb3_ano.llm import config, grpo

    return getattr(config if name.endswith("Config") else grpo, name)
