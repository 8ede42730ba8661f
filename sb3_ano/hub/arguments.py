"""Names for modules that still import them from here."""

from sb3_ano.hub.codec import encode_arguments, encode_policy

__all__ = ["encode_arguments", "encode_policy"]
