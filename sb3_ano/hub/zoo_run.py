"""An agent from the Hub as a training run of the RL Zoo, made from the safe format."""

import os
import tempfile
from pathlib import Path
from typing import Any

from sb3_ano.hub.evaluation import Task
from sb3_ano.hub.folders import new_folder
from sb3_ano.hub.names import environment_name
from sb3_ano.hub.pull import MAX_BYTES, download, quiet_about_batches, read_task
from sb3_ano.hub.safe_format import load_normalization, load_safe
from sb3_ano.hub.stored_agent import NORMALIZATION, open_document
from sb3_ano.hub.zoo_files import write_settings
from sb3_ano.shaping import ShapingLike


def download_run(
    repo_id: str,
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    shaping: ShapingLike | None = None,
    custom_objects: dict[str, Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download an agent as the folder that the zoo's training would have left, for its ``enjoy`` and ``record_video``.

    Nothing of the repository is run, and none of its pickles or YAML files is used: model, statistics and settings are
    written anew from what the safe format says. What it does not know are wrappers of the environment.

    :param repo_id: ``"user/name"``
    :param path: the run's folder, such as ``logs/ano/CartPole-v1_1``, which must be new or empty
    :param revision: branch, tag or commit
    :param token: of the Hub, for private repositories
    :param shaping: as for ``load_from_hub``
    :param custom_objects: as for ``load_from_hub``
    :param max_bytes: size above which a file is refused
    :return: the folder
    :raises HubError: if the repository, a file, the connection or the disk fails
    :raises ValueError: if the repository holds no sound agent in the safe format, or its environment cannot be made
    :raises FileExistsError: if ``path`` is not new or empty
    """
    with new_folder(path, ()) as work, tempfile.TemporaryDirectory() as temporary:
        agent = download(repo_id, Path(temporary) / "agent", revision=revision, token=token, max_bytes=max_bytes)
        task = Task(**read_task(agent))
        name = environment_name(task.env_id)
        settings = work / name
        settings.mkdir()
        env = task.make()
        try:
            if (agent / NORMALIZATION).exists():
                env = load_normalization(agent, env)
                env.save(str(settings / "vecnormalize.pkl"))
            with quiet_about_batches():
                model = load_safe(agent, env, device="cpu", shaping=shaping, custom_objects=custom_objects)
            model.n_envs = open_document(agent)["n_envs"]  # those of the training, not of this environment
            model.save(work / f"{name}.zip")
            write_settings(settings, model, task)
        finally:
            env.close()
    return Path(path)
