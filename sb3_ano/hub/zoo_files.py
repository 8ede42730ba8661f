"""The files by which the RL Zoo knows an agent."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.extras import missing_extra
from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.hyperparameters import hyperparameters
from sb3_ano.hub.names import environment_name

try:
    import yaml
except ImportError as error:
    raise missing_extra("hub", "pyyaml") from error

_LOGS = ("*monitor.csv", "progress.csv", "evaluations.npz")
_ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"


def zoo_config(model: ShapedPolicyAlgorithm, task: Task) -> dict[str, Any]:
    """The content of ``config.yml``: hyperparameters, and how the environment is wrapped."""
    config = hyperparameters(model)
    if "NoFrameskip" in task.env_id:
        config |= {"env_wrapper": [_ATARI_WRAPPER], "frame_stack": 4}
    return config


def zoo_arguments(model: ShapedPolicyAlgorithm, task: Task) -> dict[str, Any]:
    """The content of ``args.yml``: what a zoo training of this agent would have been asked for."""
    return {
        "algo": model.algorithm.lower(),
        "env": task.env_id,
        "env_kwargs": task.env_kwargs,
        "n_timesteps": model.num_timesteps,
        "seed": model.seed if model.seed is not None else -1,
    }


def write_settings(folder: Path, model: ShapedPolicyAlgorithm, task: Task) -> None:
    """Write ``config.yml``, ``args.yml`` and ``env_kwargs.yml``.

    :param folder: where to
    :param model: the agent
    :param task: what it was trained for
    """
    contents = {
        "config.yml": zoo_config(model, task),
        "args.yml": zoo_arguments(model, task),
        "env_kwargs.yml": task.env_kwargs,
    }
    for name, content in contents.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))


def copy_run(folder: Path, run: Path | None, task: Task) -> None:
    """Copy the zoo's hyperparameters over those written anew, and the logs of the training into one archive.

    The zoo's ``args.yml`` stays behind, because it holds paths of the author's machine, and so do other files of the run.

    :param folder: where to
    :param run: folder of the training; None for no logs
    :param task: what was trained for
    """
    logs: list[Path] = []
    if run is not None:
        config = run / environment_name(task.env_id) / "config.yml"
        if config.is_file():
            shutil.copyfile(config, folder / config.name)
        logs = sorted(log for pattern in _LOGS for log in run.glob(pattern))
    with zipfile.ZipFile(folder / "train_eval_metrics.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for log in logs:
            archive.write(log, log.name)


def as_json(content: Any) -> str:
    """Text of a JSON file."""
    return json.dumps(content, indent=1) + "\n"
