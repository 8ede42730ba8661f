"""One run in a process of its own, which ends with its parent: ``python -m sb3_ano.bench.experiments.worker REQUEST``.

It prints the number of steps after each update; where it fails, a last line of JSON with ``error`` and ``errno``.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch

from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.training import train


def main() -> int:
    """Run what the argument specifies."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    run = Run.from_specification(request["suite"], request["specification"])
    try:
        train(run, Path(request["folder"]), request["threads"], request["device"], lambda done: print(done, file=answers))
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps({"error": message, "errno": error.errno if isinstance(error, OSError) else None}), file=answers)
        raise
    return 0


def _exit_with_parent() -> None:
    """Wait for the end of standard input, which the parent holds open as long as it lives."""
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
