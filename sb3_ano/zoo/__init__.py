"""The RL Zoo with this package's algorithms in it.

After ``register()``, ``rl_zoo3.train.train()`` in the same process knows ``ano``, ``spo``, ``papo``, ``ano_lstm``,
``ano_mask`` and ``ano_lstm_mask``, and finds their hyperparameters. ``python -m sb3_ano.zoo`` is the command line.
"""

from sb3_ano.extras import needs_extra

__all__ = ["register"]


def register() -> None:
    """Add the algorithms of this package to the RL Zoo of this process; a second call changes nothing.

    Algorithms of others stay as they are.

    :raises MissingExtraError: if rl-zoo3 or one of its dependencies is not installed
    """
    with needs_extra("zoo"):
        # Importing the zoo takes seconds, which the command line's help does not need.
        from sb3_ano.zoo.manager import register_algorithms
    register_algorithms()
