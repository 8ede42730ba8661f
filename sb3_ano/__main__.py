"""``python -m sb3_ano COMMAND ...``, which is ``sb3-ano COMMAND ...``."""

from sb3_ano.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
