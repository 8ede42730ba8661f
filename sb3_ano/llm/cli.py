"""The command line ``python -m sb3_ano.llm``."""

import os
import sys
from collections.abc import Sequence

import sb3_ano.llm
from sb3_ano.cli import check_command, run

_USAGE = """\
usage: {program} COMMAND ...

Align language models on TRL, with shaping functions.

commands:
  train     train a policy with PPO, SPO or ANO and a critic, or GRPO or GANO
  compare   win rates of policies against each other, by a chat model, a reward model or a function

examples:
  trl sft --model_name_or_path EleutherAI/pythia-1b-deduped --dataset_name trl-lib/tldr --output_dir sft
  trl reward --model_name_or_path sft --dataset_name trl-lib/tldr-preference --output_dir reward
  {program} train --algo ano --model_name_or_path sft --reward_model reward --dataset_name trl-lib/tldr --output_dir ano
  {program} train --algo gano --model_name_or_path sft --reward_funcs my_rewards:brevity --dataset_name trl-lib/tldr
  {program} compare gano=gano/final sft --dataset_name trl-lib/tldr --reward_model reward --out comparison

'{program} train --help' shows the options. Set SB3_ANO_TRACEBACK=1 to see where an error comes from."""


def main(arguments: Sequence[str] | None = None, program: str = "python -m sb3_ano.llm") -> int:
    """Run a command.

    :param arguments: command line, by default that of the process
    :param program: name of the program in help texts
    :return: exit status: 2 after an error, 130 after an interrupt
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> int:
        if not rest or rest[0] in ("-h", "--help"):
            print(_USAGE.format(program=program))
            return 0
        check_command(rest[0], ["train", "compare"])
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL reports every trainer to the Hub
        getattr(sb3_ano.llm, rest[0])(rest[1:], program)
        return 0

    return run(command, "interrupted; 'train' with --resume continues from the last checkpoint, the same 'compare' continues")
