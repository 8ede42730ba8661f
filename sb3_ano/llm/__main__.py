"""``python -m sb3_ano.llm COMMAND ...``."""

from sb3_ano.llm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
