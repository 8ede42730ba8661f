"""Measurements of this package: ``python -m sb3_ano.bench speed`` and ``parity``."""
