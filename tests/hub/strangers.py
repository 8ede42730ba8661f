"""Run programs of strangers: each in a process and a directory of its own, with nothing of the author's but what is brought.

The processes are forks of one that has imported the libraries, because importing them takes longer than the programs.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback

from tests.common import ROOT, variables


@contextlib.contextmanager
def stranger(**others):
    """A function that runs a program, and returns what it printed.

    :param others: variables of its environment
    """
    environment = variables(**others) | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "tests.hub.strangers"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def run(directory, code):
            process.stdin.write(json.dumps([str(directory), code]) + "\n")
            process.stdin.flush()
            status, output = json.loads(process.stdout.readline())
            assert status == 0, output
            return output

        yield run
        process.stdin.close()


def _run(directory: str, code: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status, output = 0, io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                os.chdir(directory)
                # Python's path is that of "python program.py": the directory and what is installed.
                sys.path.insert(0, directory)
                exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
            except BaseException:
                status = 1
                traceback.print_exc()
        with os.fdopen(writer, "w") as file:
            file.write(output.getvalue())
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        output = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


if __name__ == "__main__":
    import rl_zoo3.import_envs  # noqa: F401
    from stable_baselines3.common import evaluation  # noqa: F401

    import sb3_ano.envs
    import sb3_ano.hub  # noqa: F401

    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the author's, as far as a stranger is concerned
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
