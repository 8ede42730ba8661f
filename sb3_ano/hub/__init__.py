"""Agents for others: the safe format, and the Hugging Face Hub.

The modules behind these names are imported when they are first used, because they need packages of the extra ``hub``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sb3_ano.hub.folders import no_imports_from

if TYPE_CHECKING:
    from sb3_ano.hub.documents import SafeFormatError
    from sb3_ano.hub.errors import HubError
    from sb3_ano.hub.packaging import package
    from sb3_ano.hub.pull import download, load_from_hub
    from sb3_ano.hub.push import push_folder, push_to_hub
    from sb3_ano.hub.safe_format import load_normalization, load_safe, save_safe
    from sb3_ano.hub.video import RenderError
    from sb3_ano.hub.zoo_run import download_run

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

_MODULES = {
    "HubError": "errors",
    "RenderError": "video",
    "SafeFormatError": "documents",
    "download": "pull",
    "download_run": "zoo_run",
    "load_from_hub": "pull",
    "load_normalization": "safe_format",
    "load_safe": "safe_format",
    "package": "packaging",
    "push_folder": "push",
    "push_to_hub": "push",
    "save_safe": "safe_format",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with no_imports_from("."):  # a stranger's folder may be the current one
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
