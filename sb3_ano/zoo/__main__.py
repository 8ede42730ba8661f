"""``python -m sb3_ano.zoo COMMAND ...``."""

from sb3_ano.zoo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
