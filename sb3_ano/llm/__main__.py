"""``python -m sb3_ano.llm COMMAND ...``."""

import sys

from sb3_ano.llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
