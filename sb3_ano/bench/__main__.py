"""``python -m sb3_ano.bench``."""

from sb3_ano.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
