"""``python -m sb3_ano.bench``."""

import sys

from sb3_ano.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
