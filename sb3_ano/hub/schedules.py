"""Names for modules that still import them from here."""

from sb3_ano.hub.codec import SCHEDULES, dotted_name

__all__ = ["SCHEDULES", "dotted_name"]
