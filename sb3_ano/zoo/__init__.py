"""The RL Zoo with ANO, SPO and PAPO in it.

After ``register()``, every entry point of rl_zoo3 in the same process knows ``ano``, ``spo`` and ``papo`` and finds their
hyperparameters; ``python -m sb3_ano.zoo`` is the command line.
"""

from sb3_ano.zoo.registration import register

__all__ = ["register"]
