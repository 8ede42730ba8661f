"""The paper's experiments as runs: ``python -m sb3_ano.bench run``."""
