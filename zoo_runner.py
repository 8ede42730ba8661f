"""The RL Zoo with ANO, SPO and PAPO: ``python zoo_runner.py train --algo ano --env HalfCheetah-v5``."""

import sys

from sb3_ano.zoo.cli import main

if __name__ == "__main__":
    sys.exit(main(program="python zoo_runner.py"))
