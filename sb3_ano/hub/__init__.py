"""Share agents: the safe format, and the Hugging Face Hub."""

from sb3_ano.extras import missing_extra
from sb3_ano.hub.documents import SafeFormatError, untrusted

try:
    with untrusted("."):  # import nothing from the current directory, which may be a stranger's
        from sb3_ano.hub.pull import download, download_run, load_from_hub
        from sb3_ano.hub.push import package, push_folder, push_to_hub
        from sb3_ano.hub.repository import HubError
        from sb3_ano.hub.safe_format import load_normalization, load_safe, save_safe
        from sb3_ano.hub.video import RenderError
except ModuleNotFoundError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error

__all__ = [
    "HubError",
    "RenderError",
    "SafeFormatError",
    "download",
    "download_run",
    "load_from_hub",
    "load_normalization",
    "load_safe",
    "package",
    "push_folder",
    "push_to_hub",
    "save_safe",
]
