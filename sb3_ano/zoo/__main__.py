"""``python -m sb3_ano.zoo COMMAND ...``."""

import sys

from sb3_ano.zoo.cli import main

if __name__ == "__main__":
    sys.exit(main())
