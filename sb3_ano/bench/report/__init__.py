"""A report of the experiments: ``python -m sb3_ano.bench report``."""
