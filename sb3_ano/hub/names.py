"""The files of an agent's repository. Nothing is read or written on the Hub under any other name."""

import re

from sb3_ano.hub.safe_format import SAFE_FILES

#: What SB3 and the RL Zoo read beside the model.
ZOO_FILES = ("args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip", "vec_normalize.pkl")
CARD, RESULTS, VIDEO, CURVE = "README.md", "results.json", "replay.mp4", "learning_curve.png"
FIXED_FILES = (*SAFE_FILES, *ZOO_FILES, CARD, RESULTS, VIDEO, CURVE)

# A file at the top of a repository whose name is nothing but a name.
_MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,120}\.zip")
_OWN_MODEL_FILE = re.compile(r"(ano|spo|papo)-[A-Za-z0-9._+-]{1,120}\.zip")


def environment_name(env_id: str) -> str:
    """The RL Zoo's name of an environment's files: no module, and no slash.

    >>> environment_name("ALE/Pong-v5")
    'ALE-Pong-v5'
    """
    return env_id.rpartition(":")[2].replace("/", "-")


def model_file(algorithm: str, env_id: str) -> str:
    """The RL Zoo's name of the saved model.

    :param algorithm: name of the class
    :param env_id: id of the environment
    """
    return f"{algorithm.lower()}-{environment_name(env_id)}.zip"


def is_model_file(name: str) -> bool:
    """Whether a name from a repository may be that of a saved model."""
    return _MODEL_FILE.fullmatch(name) is not None and name not in FIXED_FILES


def is_own(name: str) -> bool:
    """Whether a push of this package may have left this file."""
    return name in FIXED_FILES or _OWN_MODEL_FILE.fullmatch(name) is not None
