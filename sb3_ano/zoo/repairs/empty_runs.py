"""``enjoy`` and its like take the latest run folder, even if it holds no agent because the run was stopped early."""

import contextlib
import functools
import io
import tempfile
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import rl_zoo3.exp_manager  # before the repair, because training numbers its folders by all that are there
    import rl_zoo3.utils
    from huggingface_sb3 import EnvironmentName  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error


def is_needed() -> bool:
    """Whether an empty folder hides the agent in the one before it."""
    name = EnvironmentName("Probe-v0")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for run in (1, 2):
            (Path(folder) / "probe" / f"{name}_{run}").mkdir(parents=True)
        (Path(folder) / "probe" / f"{name}_1" / f"{name}.zip").touch()
        try:
            rl_zoo3.utils.get_model_path(0, folder, "probe", name)
        except ValueError:
            return True
    return False


def apply() -> None:
    """Count only runs with an agent where an agent is looked for, that is in ``rl_zoo3.utils`` and who imports from it now."""
    latest = rl_zoo3.utils.get_latest_run_id

    @functools.wraps(latest)
    def get_latest_run_id(log_path: str, env_name: Any) -> int:
        newest = latest(log_path, env_name)
        for run in range(newest, 0, -1):
            folder = Path(log_path) / f"{env_name}_{run}"
            if any(folder.glob("*.zip")):
                return run
            if folder.is_dir():
                print(f"{folder} holds no agent yet: 'train --resume' goes on with a run that was cut off")
        return newest

    rl_zoo3.utils.get_latest_run_id = get_latest_run_id
