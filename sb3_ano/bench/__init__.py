"""Experiments and reports: ``python -m sb3_ano.bench run``, ``report`` and ``export``."""
