"""Names for modules that still import them from here."""

from sb3_ano.hub.safe_format import NORMALIZATION, open_document

__all__ = ["NORMALIZATION", "open_document"]
