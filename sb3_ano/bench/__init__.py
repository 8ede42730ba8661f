"""Experiments and reports: ``python -m sb3_ano.bench run``, ``report``, ``export`` and ``import``."""
