"""What goes wrong between here and the Hub, in one line each."""

import contextlib
from collections.abc import Iterator

from sb3_ano.extras import missing_extra

try:
    from huggingface_hub import errors
except ImportError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error


class HubError(OSError):
    """The Hub, the connection to it, or the disk refused; the message says which, and what helps."""


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn huggingface_hub's errors, and those of connection and disk, into one line.

    :param doing: what is being done, for the message, such as ``"download me/ano-CartPole-v1"``
    :raises HubError: in their place
    :raises ValueError: for a name of a repository that is malformed
    """
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"cannot {doing}: {_one_line(error)}") from None
    except HubError:
        raise
    except RuntimeError as error:
        # huggingface_hub wraps what goes wrong while it uploads large files.
        if not isinstance(error.__cause__, errors.HTTPError | OSError):
            raise
        raise HubError(f"cannot {doing}: {_reason(error.__cause__)}") from None
    except (errors.HTTPError, OSError) as error:
        # The chain is huggingface_hub's inside, dozens of lines that say less.
        raise HubError(f"cannot {doing}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return _STATUS.get(status, f"the Hub answered {status}: {error.server_message or _one_line(error)}")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, errors.HTTPError):
        return f"the connection failed ({_one_line(error) or type(error).__name__})"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# The first kind that fits counts.
_REASONS: list[tuple[type[BaseException], str]] = [
    (errors.GatedRepoError, "its authors ask you to accept terms on its page first"),
    (errors.RepositoryNotFoundError, "there is no such repository, or it is private and the token may not see it"),
    (errors.RevisionNotFoundError, "it has no such revision"),
    (errors.RemoteEntryNotFoundError, "it has no such file"),
    (errors.LocalTokenNotFoundError, "no token was found; log in with 'hf auth login', or pass token="),
    (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set"),
]
_STATUS = {
    401: "the Hub does not accept the token; log in again with 'hf auth login', or pass another token=",
    403: "the token may not do that; it needs the right to write to this repository",
    412: "the repository was changed meanwhile; do it again",
}
