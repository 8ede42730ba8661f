"""The RL Zoo's command line with this package's algorithms in it."""

import sys
from collections.abc import Sequence

from sb3_ano.cli import GROUPS, check_names, run
from sb3_ano.zoo import register

_HELP = """\
usage: {program} COMMAND ...

The RL Zoo with ANO, SPO and PAPO (--algo ano|spo|papo), and ANO with LSTM policies and masks (--algo ano_lstm|ano_mask|
ano_lstm_mask), next to its own algorithms.

commands:
{commands}

examples:
  {program} train --algo ano --env CartPole-v1 -P
  {program} enjoy --algo ano --env CartPole-v1 --no-render
  {program} --algo spo --env HalfCheetah-v5 -params desired_kl:0.02

'{program} COMMAND --help' shows options, 'sb3-ano --version' the version, SB3_ANO_TRACEBACK=1 where an error comes from."""

#: Commands of the zoo: summary by name.
COMMANDS = {
    "train": "train an agent; the default if only options are given",
    "enjoy": "run a trained agent of the directory logs and print its returns",
    "record_video": "record a trained agent",
    "record_training": "record the best and the final agent and the checkpoints of a run, in one video",
    "benchmark": "evaluate all agents of a directory and tabulate their returns",
    "plot_train": "plot the returns of training episodes",
    "all_plots": "plot and tabulate the evaluations of several algorithms, and save them to a file",
    "plot_from_file": "plot a file of all_plots",
    "push_to_hub": "evaluate and record an agent, and push it to the Hugging Face Hub",
    "load_from_hub": "download an agent as a run, as train would have left it",
}


def main(arguments: Sequence[str] | None = None, program: str = "python -m sb3_ano.zoo") -> int:
    """Run a command.

    :param arguments: command line, by default that of the process
    :param program: name of the program in messages and help texts
    :return: exit status: 2 after an error, 130 after an interrupt
    """
    listed = COMMANDS | (GROUPS if program == "sb3-ano" else {})

    def command(rest: list[str]) -> int:
        if not rest or rest[0] in ("-h", "--help"):
            lines = "\n".join(f"  {name:<17}{summary}" for name, summary in listed.items())
            print(_HELP.format(program=program, commands=lines))
            return 0
        name = "train" if rest[0].startswith("-") else rest.pop(0)
        check_names("command", [name], listed)
        register()
        from sb3_ano.zoo.commands import run_command  # imports the zoo, which help and typing errors need not wait for

        try:
            run_command(name, rest, f"{program} {name}")
        finally:
            sys.stdout.flush()  # so that a closed pipe is noticed here, and not at the end of the process
        return 0

    return run(command, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
