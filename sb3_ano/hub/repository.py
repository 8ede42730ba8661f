"""An agent's repository on the Hub: the names of its files, and errors in one line."""

import contextlib
from collections.abc import Iterator

from huggingface_hub import errors

from sb3_ano._registry import zoo_name
from sb3_ano.hub.documents import one_line
from sb3_ano.hub.safe_format import SAFE_FILES

CARD, RESULTS, LOGS, STATISTICS = "README.md", "results.json", "train_eval_metrics.zip", "vec_normalize.pkl"
VIDEO = "replay.mp4"
#: Names of files that do not depend on the agent. Together with the saved model, nothing else is read or written.
FIXED_FILES = (*SAFE_FILES, CARD, RESULTS, VIDEO, LOGS, STATISTICS, "args.yml", "config.yml", "env_kwargs.yml")


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
