"""The workflows for the public repository call targets of the Makefile, on the versions that the package declares."""

import re

import yaml

from tests.common import PROJECT, ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands():
    """Yield the command of each step, once per entry of its job's matrix."""
    for job in WORKFLOW["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job["steps"]:
            for target in targets:
                yield step.get("run", "").replace("${{ matrix.target }}", target)


def test_each_command_is_a_target_of_the_makefile_or_a_script_of_the_repository():
    for command in filter(None, commands()):
        words = command.removeprefix("sudo ").split()
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS
        else:
            assert (ROOT / words[0]).is_file()


def test_all_that_ci_runs_is_run_here_too():
    ci = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    called = {word for command in commands() if command.startswith("make ") for word in command.split()[1:]}
    assert set(ci) | {"test-newest"} == called


def test_the_oldest_and_the_newest_python_of_the_package_are_tested_weekly():
    declared = [entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if "Python :: 3." in entry]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == [declared[0], declared[-1]]
    # YAML 1.1 reads the key "on" as a truth value.
    assert WORKFLOW[True]["schedule"][0]["cron"].endswith("* * 1")
