"""Whether the user trusts the authors of what is downloaded."""

import os


def is_trusted() -> bool:
    """Whether TRUST_REMOTE_CODE is set, which ``--trust-remote-code`` does for a command and its children."""
    return os.environ.get("TRUST_REMOTE_CODE", "").lower() in ("y", "yes", "t", "true", "on", "1")
