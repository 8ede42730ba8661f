"""Align language models on TRL, with shaping functions.

usage: sb3-ano llm COMMAND ...

commands:
  train     train a policy with PPO, SPO or ANO and a critic, or GRPO or GANO
  compare   win rates of policies against each other, by a chat model, a reward model or a function

examples:
  trl sft --model_name_or_path EleutherAI/pythia-1b-deduped --dataset_name trl-lib/tldr --output_dir sft
  trl reward --model_name_or_path sft --dataset_name trl-lib/tldr-preference --output_dir reward
  sb3-ano llm train --algo ano --model_name_or_path sft --reward_model reward --dataset_name trl-lib/tldr --output_dir ano
  sb3-ano llm train --algo gano --model_name_or_path sft --reward_funcs my_rewards:brevity --dataset_name trl-lib/tldr
  sb3-ano llm compare ano=ano/final sft --dataset_name trl-lib/tldr --reward_model reward --out comparison

'sb3-ano llm train --help' shows the options. Set SB3_ANO_TRACEBACK=1 to see where an error comes from.
"""

import os
import sys
import warnings
from collections.abc import Sequence

import sb3_ano.llm
from sb3_ano.cli import check_names, run


def main(arguments: Sequence[str] | None = None, program: str = "python -m sb3_ano.llm") -> int:
    """Run a command.

    :param arguments: command line, by default that of the process
    :param program: name of the program in help texts
    :return: exit status: 2 after an error, 130 after an interrupt
    """

    def command(rest: list[str]) -> int:
        if not rest or rest[0] in ("-h", "--help"):
            print(__doc__.replace("sb3-ano llm", program).rstrip())
            return 0
        check_names("command", rest[:1], ["train", "compare"])

        # Otherwise TRL reports every trainer to the Hub.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        # Errors of this library are raised, too.
        os.environ.setdefault("DATASETS_VERBOSITY", "critical")
        # Progress bars belong on terminals.
        os.environ.setdefault("TQDM_DISABLE", "" if sys.stderr.isatty() else "1")
        # TRL passes an argument that transformers has renamed.
        warnings.filterwarnings("ignore", ".*is deprecated and will be removed in v6", FutureWarning)

        # Imports TRL
        if rest[0] == "train":
            sb3_ano.llm.train(rest[1:], program)
        else:
            sb3_ano.llm.compare(rest[1:], program)
        return 0

    resumption = "'train' with --resume continues from the last checkpoint, the same 'compare' continues"
    return run(command, arguments, f"interrupted; {resumption}")


if __name__ == "__main__":
    raise SystemExit(main())
