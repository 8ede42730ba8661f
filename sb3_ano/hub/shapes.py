"""Names for modules that still import them from here."""

from sb3_ano.hub.codec import is_built_in

__all__ = ["is_built_in"]
