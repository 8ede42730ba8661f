"""An agent's repository on the Hub: the names of its files, its id, and errors in one line."""

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id

from sb3_ano._registry import ALGORITHMS, zoo_name
from sb3_ano.hub.documents import one_line
from sb3_ano.hub.safe_format import SAFE_FILES

CARD, RESULTS, LOGS, STATISTICS = "README.md", "results.json", "train_eval_metrics.zip", "vec_normalize.pkl"
VIDEO, CURVE = "replay.mp4", "learning_curve.png"
#: Names of files that do not depend on the agent. Together with the saved model, nothing else is read or written.
FIXED_FILES = (*SAFE_FILES, CARD, RESULTS, VIDEO, CURVE, LOGS, STATISTICS, "args.yml", "config.yml", "env_kwargs.yml")

# A name from a repository is only used if it cannot be a path.
_MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,120}\.zip")


class HubError(OSError):
    """The Hub, the connection to it, or the disk failed; the message has one line."""


def environment_name(env_id: str) -> str:
    """Return the RL Zoo's name of an environment's files, which has no module and no slash.

    >>> environment_name("ALE/Pong-v5")
    'ALE-Pong-v5'
    """
    return env_id.rpartition(":")[2].replace("/", "-")


def model_file(algorithm: str, env_id: str) -> str:
    """Return the RL Zoo's name of a saved model.

    :param algorithm: name of the class
    :param env_id: id of the environment
    """
    return f"{zoo_name(algorithm)}-{environment_name(env_id)}.zip"


def is_model_file(name: str) -> bool:
    """Return whether a name from a repository can be the name of a saved model."""
    return _MODEL_FILE.fullmatch(name) is not None and name not in FIXED_FILES


def is_own(name: str) -> bool:
    """Return whether an earlier push of this package can have written a file of this name."""
    return name in FIXED_FILES or (is_model_file(name) and name.partition("-")[0] in ALGORITHMS)


def check_repo_id(repo_id: str) -> None:
    """Check the id of a repository without asking the Hub.

    :raises ValueError: if it is not of the form ``"user/name"``
    """
    with contextlib.suppress(errors.HFValidationError):
        validate_repo_id(repo_id)
        if repo_id.count("/") == 1:
            return
    raise ValueError(f"repo_id={repo_id!r} is not allowed; allowed is 'user/name', of letters, digits, '-', '_' and '.'")


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Put the errors of huggingface_hub, of the connection and of the disk on one line.

    :param doing: action for the message, such as ``"download me/ano-CartPole-v1"``
    :raises HubError: if the Hub, the connection or the disk fails
    """
    try:
        yield
    except (errors.HTTPError, OSError, RuntimeError) as error:
        # huggingface_hub wraps the reasons of failed uploads and of failed requests for a file.
        wraps = type(error) is RuntimeError or isinstance(error, errors.LocalEntryNotFoundError)
        reason = error.__cause__ if wraps and error.__cause__ is not None else error
        if isinstance(reason, HubError) or not isinstance(reason, errors.HTTPError | OSError):
            raise
        # The chain of huggingface_hub's own errors has dozens of lines that say less.
        raise HubError(f"cannot {doing}: {one_line(reason)}") from None
