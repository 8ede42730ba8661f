"""Without ``ffmpeg`` on the path, ``push_to_hub`` and ``record_training`` go on without a video, or die of its absence."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from sb3_ano.extras import missing_extra

try:
    import imageio_ffmpeg  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("zoo", "imageio-ffmpeg") from error


def is_needed() -> bool:
    """Whether no ffmpeg is found."""
    return shutil.which("ffmpeg") is None


def apply() -> None:
    """Put the ffmpeg that comes with imageio on the path, under the name that the zoo calls.

    :raises ValueError: if there is none for this platform
    """
    try:
        binary = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise ValueError("videos need ffmpeg; none was found, and imageio-ffmpeg has none for this platform") from error
    folder = Path(tempfile.mkdtemp(prefix="ffmpeg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if os.name == "nt":  # where links need rights of their own
        shutil.copy2(binary, folder / "ffmpeg.exe")
    else:
        (folder / "ffmpeg").symlink_to(binary)
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{folder}"
