"""Policy optimisation with shaping functions, for Stable-Baselines3."""

from importlib.metadata import PackageNotFoundError, version

from sb3_ano.algorithms import ANO, PAPO, SPO
from sb3_ano.extras import MissingExtraError

try:
    __version__ = version("sb3-ano")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = ["ANO", "PAPO", "SPO", "MissingExtraError", "__version__"]
