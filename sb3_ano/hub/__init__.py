"""Share agents: the safe format, and the Hugging Face Hub."""

from sb3_ano.extras import needs_extra
from sb3_ano.hub.documents import SafeFormatError, untrusted

with needs_extra("hub"), untrusted("."):  # import nothing from the current directory, which may be a stranger's
    from sb3_ano.hub.pull import download_run, load_from_hub
    from sb3_ano.hub.push import package, push_to_hub
    from sb3_ano.hub.safe_format import load_normalization, load_safe, save_safe

__all__ = [
    "SafeFormatError",
    "download_run",
    "load_from_hub",
    "load_normalization",
    "load_safe",
    "package",
    "push_to_hub",
    "save_safe",
]
