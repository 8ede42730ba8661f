"""An engine for on-policy training with PPO's form of a loss: the numbers of Stable-Baselines3 in a fraction of the time.

Three things cost SB3's PPO its time, none of which is mathematics:

1. *Acting.* A step of a small policy in PyTorch is a hundred calls of a few microseconds each. ``act.py`` computes small
   policies in NumPy, with a tenth of the calls and the same random numbers, and the others with the layers of SB3.
2. *Collecting.* ``collect.py`` is SB3's loop without conversions between arrays and tensors, and without a loop over
   environments that have not ended. It writes the arrays of SB3's rollout buffer directly.
3. *The update.* ``step.py`` has the loss of a minibatch and its step of Adam as functions of tensors. ``compiled.py`` runs
   them through ``torch.compile`` on one vector of all parameters, which exists during an update only: policies and
   optimizers that a user holds are always plain ones.

``rules.py`` decides, in one table, which path each part of a model takes. A custom policy, a hook, another optimizer or a
custom buffer leads to SB3's own code for that part, so that numbers stay the same. :func:`explain` says what was decided.
``engine.py`` keeps compiled code between updates, and ``ppo.py`` applies all this to the algorithms of SB3 and sb3-contrib.

The words: SB3's ``learn`` alternates between rollouts and *updates*. An update is one call of ``train``, has ``n_epochs``
*epochs*, and an epoch has *minibatches*. In a rollout, a *step* is one step of all environments; in an update, it is one step
of the optimizer, on one minibatch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_ano.fast.explanation import Explanation, explain
    from sb3_ano.fast.ppo import PPO, MaskablePPO, RecurrentPPO, accelerate

__all__ = ["PPO", "Explanation", "MaskablePPO", "RecurrentPPO", "accelerate", "explain"]


def __getattr__(name: str) -> Any:
    # On demand, because sb3-contrib takes time to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "ppo"
    if name in ("Explanation", "explain"):
        # Without ppo.py, which needs sb3-contrib.
        module = "explanation"
    return getattr(importlib.import_module(f"sb3_ano.fast.{module}"), name)
