"""An interpreter that sees the distributions that this package declares, and no others of the test environment."""

import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def declared(*extras: str) -> dict[str, Distribution]:
    """The distributions that ``pip install 'sb3-ano[EXTRAS]'`` brings, dependencies of dependencies too, by name.

    :raises PackageNotFoundError: if one is not installed in the test environment
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in project["optional-dependencies"][extra]]
    found: dict[str, Distribution] = {}
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = distribution(name)
            dependencies = [Requirement(line) for line in found[name].requires or []]
            waiting += [one for one in dependencies if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def make_environment(folder: Path, distributions: dict[str, Distribution]) -> Path:
    """A virtual environment with links to the files of these distributions, and to this package's source.

    :return: its interpreter
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    for one in distributions.values():
        for top in {file.parts[0] for file in one.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))
    (site / "sb3_ano.pth").write_text(f"{ROOT}\n")
    return python


if __name__ == "__main__":  # for experiments at the command line: FOLDER EXTRA...
    print(make_environment(Path(sys.argv[1]), declared(*sys.argv[2:])))
