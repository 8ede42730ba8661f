"""The RL Zoo with ANO, SPO and PAPO in it.

After ``register()``, every entry point of rl_zoo3 in the same process knows ``ano``, ``spo`` and ``papo`` and finds their
hyperparameters; ``python -m sb3_ano.zoo`` is the command line.
"""

__all__ = ["register"]


def register() -> None:
    """Add ``ano``, ``spo`` and ``papo`` to the RL Zoo of this process; calling it again changes nothing.

    :raises MissingExtraError: if rl-zoo3 is not installed
    """
    # The zoo takes seconds to import, which the command line's help need not wait for.
    from sb3_ano.zoo.registration import register_algorithms

    register_algorithms()
