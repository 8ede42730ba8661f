"""Run the zoo's commands in children of one process, so that the libraries are imported once.

Each line of the standard input is a directory and a command. The answer is two lines: the child's process id, and its status.
"""

import os
import shlex
import sys

import torch

from sb3_ano.zoo import cli, commands  # noqa: F401  # what the children would import

torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    directory, command = line.split(maxsplit=1)
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        for stream in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        status = cli.main(shlex.split(command))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
