"""Talk to the Hugging Face Hub: downloads that also work from the cache, and errors that show no token and no password."""

import base64
import contextlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from huggingface_hub import HfApi, constants, errors, hf_hub_url, is_offline_mode
from huggingface_hub.errors import HTTPError

from sb3_ano._io import write_file
from sb3_ano._secrets import hide, known_secrets, remember
from sb3_ano.hub.documents import one_line

# A shorter text may be a part of any file.
_SHORTEST_SECRET = 8


def without_login(url: str) -> str:
    """Remove user name and password from an address."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def require_no_secrets(folder: Path) -> None:
    """Check that no file that is about to be published holds a key, token or password of this process.

    :param folder: directory of files, whose archives and pickles are looked into
    :raises ValueError: if one does
    """
    known = []
    for secret in known_secrets():
        if len(secret) >= _SHORTEST_SECRET:
            known.append(secret.encode())

    # Archives compress what they hold, and pickles in JSON are encoded.
    for file in sorted(folder.iterdir()):
        for name, content in _contents(file):
            if any(secret in content for secret in known):
                raise ValueError(
                    f"{name} would publish a key, token or password; remove it from the model's attributes, env_kwargs "
                    "or the files in run, and push again"
                )


def _contents(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a file, of the entries of an archive, and of the pickles in SB3's JSON."""
    if file.suffix != ".zip":
        yield file.name, file.read_bytes()
        return

    with zipfile.ZipFile(file) as archive:
        for entry in archive.namelist():
            content = archive.read(entry)
            yield f"{file.name}/{entry}", content

            # Attributes that JSON has no word for are pickled in it.
            for encoded in re.findall(rb'":serialized:": "([^"]+)"', content):
                yield f"{file.name}/{entry}", base64.b64decode(encoded)


@contextlib.contextmanager
def safe_errors(token: str | None = None) -> Iterator[None]:
    """Hide tokens and passwords in the errors of a block, and put a lost connection on one line.

    huggingface_hub's errors name the address of the request, and a proxy's password may be a part of it.

    :param token: token that the caller passed
    :raises ConnectionError: instead of the HTTP client's errors, which are no OSError
    """
    remember({"hub_token": token, "endpoint": constants.ENDPOINT})

    try:
        yield
    except Exception as error:
        is_lost = isinstance(error, HTTPError) and not isinstance(error, errors.HfHubHTTPError)
        if is_lost:
            endpoint = hide(constants.ENDPOINT)
            message = hide(one_line(error))
            raise ConnectionError(f"the Hub at {endpoint} cannot be reached: {message}") from None
        # Other errors keep their classes, which say what happened.
        _hide_secrets(error)
        raise


def _hide_secrets(error: BaseException) -> None:
    """Change the messages of an error and of all errors that Python prints with it."""
    seen: set[int] = set()
    # Errors can name each other in a circle.
    pending: list[object] = [error]
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__, *current.args]

        current.args = hide(current.args)
        # Of add_note, which are printed, too
        if hasattr(current, "__notes__"):
            current.__notes__ = hide(current.__notes__)
        if isinstance(current, OSError):  # its text is made of these
            current.strerror = hide(current.strerror)
            if current.filename is not None:  # None would be printed
                current.filename = hide(current.filename)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def download(
    repo_id: str,
    names: tuple[str, ...],
    marker: str,
    max_bytes: int,
    revision: str | None = None,
    token: str | None = None,
) -> dict[str, Path]:
    """Download files of one commit into huggingface_hub's cache, or take them from there if the Hub cannot be asked.

    Like ``hf_hub_download``, this works with ``HF_HUB_OFFLINE=1`` and without a connection for a branch, tag or commit that
    was downloaded before.

    :param repo_id: repository, ``"user/name"``
    :param names: names of the files; those that the repository lacks are left out
    :param marker: one of them, without which nothing is downloaded; it comes last, so that where it is the others are, too
    :param max_bytes: number of bytes that the files may have together
    :param revision: branch, tag or commit
    :param token: token of the Hub
    :return: paths in the cache by name; empty if the repository lacks the marker
    :raises ValueError: if the files are larger, or the Hub does not tell the size of one
    :raises huggingface_hub.errors.LocalEntryNotFoundError: if the Hub cannot be reached, and the cache lacks the files
    :raises OSError: huggingface_hub's own errors, if the Hub rejects the request
    """
    revision = revision or constants.DEFAULT_REVISION
    api = HfApi(token=token)
    ordered = [*(name for name in names if name != marker), marker]

    with safe_errors(token):
        try:
            paths = _download_online(api, repo_id, ordered, marker, max_bytes, revision)
        except errors.RevisionNotFoundError:
            # The cache may have a branch that has been deleted.
            raise
        except (HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
            paths = _cached(api, repo_id, ordered, marker, revision)
            if not paths:
                raise _unavailable(error, repo_id, revision) from None
            # It may be the cache of another program.
            sizes = {name: path.stat().st_size for name, path in paths.items()}
            _require_size(repo_id, sizes, max_bytes)
    return paths


def _download_online(
    api: HfApi, repo_id: str, ordered: list[str], marker: str, max_bytes: int, revision: str
) -> dict[str, Path]:
    info = api.model_info(repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True)
    listed = {}
    for file in info.siblings or []:
        listed[file.rfilename] = file.size
    if marker not in listed:
        return {}

    sizes = {}
    for name in ordered:
        if name not in listed:
            continue
        size = listed[name]
        if size is None:  # some mirrors list no sizes, but tell them of each file
            url = hf_hub_url(repo_id, name, revision=info.sha, endpoint=api.endpoint)
            size = api.get_hf_file_metadata(url=url).size

        # Without a size, the file could fill the disk.
        if size is None:
            endpoint = without_login(constants.ENDPOINT)
            raise ValueError(
                f"{repo_id} cannot be downloaded, because {endpoint} does not tell the size of {name}; "
                f"the files may have at most {max_bytes:,} bytes together; set HF_ENDPOINT to a Hub that tells it"
            )
        sizes[name] = size
    _require_size(repo_id, sizes, max_bytes)

    paths = {}
    for name in sizes:  # all of one commit, whatever is pushed meanwhile
        paths[name] = Path(api.hf_hub_download(repo_id, name, revision=info.sha))
    if revision != info.sha:
        # Downloads of a commit do not note which branch or tag it was; the next one may have to do without the Hub.
        with contextlib.suppress(OSError):  # a cache that cannot be written to
            write_file(paths[marker].parents[2] / "refs" / revision, str(info.sha))
    return paths


def _require_size(repo_id: str, sizes: dict[str, int], max_bytes: int) -> None:
    size = sum(sizes.values())
    if size > max_bytes:
        raise ValueError(f"{repo_id} has {size:,} bytes; allowed are {max_bytes:,}")


def _cached(api: HfApi, repo_id: str, ordered: list[str], marker: str, revision: str) -> dict[str, Path]:
    try:
        found = Path(api.hf_hub_download(repo_id, marker, revision=revision, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return {}

    snapshot = found.parent  # of one commit
    paths = {}
    for name in ordered:
        if (snapshot / name).exists():
            paths[name] = snapshot / name
    return paths


def _unavailable(error: Exception, repo_id: str, revision: str) -> Exception:
    """Return the error for files that neither the Hub nor the cache has; what the Hub rejects stays its own error."""
    cause: BaseException = error
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        cause = error.__cause__  # this error does not say what happened
    if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code < 500:
        return error

    missing = f"{repo_id} at revision {revision!r} is not in the cache {constants.HF_HUB_CACHE}"
    if is_offline_mode():
        return errors.LocalEntryNotFoundError(
            f"HF_HUB_OFFLINE is set, and {missing}; unset it to download the agent, or set HF_HUB_CACHE to a cache that has it"
        )
    reason = hide(one_line(cause))
    endpoint = hide(constants.ENDPOINT)
    return errors.LocalEntryNotFoundError(
        f"the Hub at {endpoint} cannot be reached ({reason}), and {missing}; an agent that was loaded once with a connection "
        "loads without"
    )
