"""The command line of the alignment of language models."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence

_USAGE = """\
usage: python -m sb3_ano.llm COMMAND ...

Language models fine-tuned with GRPO and shaping functions, on TRL.

commands:
  sft       fine-tune a model on prompts and completions
  reward    train a reward model on pairs of completions
  train     GANO or GRPO against a reward model or a reward function
  generate  write completions to a file
  demo      all of it on a small task that needs no download, with a report
  overhead  what shaping costs beside TRL's own trainer, in time and memory

examples:
  python -m sb3_ano.llm sft --model EleutherAI/pythia-1b-deduped --dataset trl-lib/tldr --output_dir sft
  python -m sb3_ano.llm reward --model sft/final --dataset trl-lib/tldr-preference --output_dir reward
  python -m sb3_ano.llm train --model sft/final --reward_model reward/final --dataset trl-lib/tldr --output_dir gano
  python -m sb3_ano.llm generate --model gano/final --dataset trl-lib/tldr --split test --out completions.jsonl
  python -m sb3_ano.llm demo --out llm-demo

'COMMAND --help' shows the options of a command: those of TRL's trainer too, with their defaults here. Set
SB3_ANO_TRACEBACK=1 to see where an error comes from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    :param arguments: those of the command line; None takes the process's own
    :return: exit status: 2 after bad input, 130 after an interrupt
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    command = rest.pop(0)
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return _complain(f"unknown command {command!r}{hint} (commands are {', '.join(_COMMANDS)})")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer otherwise
    try:
        return _COMMANDS[command](rest)
    except SystemExit as finished:  # after help
        return int(finished.code or 0)
    except KeyboardInterrupt:
        print("interrupted; a training goes on with --resume, the demo with the same command", file=sys.stderr)
        return 130
    except (ValueError, OSError, TypeError, ImportError) as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            raise
        # Of these, only ValueError and OSError are surely about the input.
        hint = "" if isinstance(error, ValueError | OSError) else " (SB3_ANO_TRACEBACK=1 shows where it comes from)"
        return _complain(f"{error or repr(error)}{hint}")


def _complain(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


# TRL takes seconds to import, which help and typing errors need not wait for.


def _sft(rest: list[str]) -> int:
    from sb3_ano.llm.commands import sft

    return sft(rest)


def _reward(rest: list[str]) -> int:
    from sb3_ano.llm.commands import reward

    return reward(rest)


def _train(rest: list[str]) -> int:
    from sb3_ano.llm.commands import train

    return train(rest)


def _generate(rest: list[str]) -> int:
    from sb3_ano.llm.generate import generate

    return generate(rest)


def _demo(rest: list[str]) -> int:
    from sb3_ano.llm.demo import demo

    return demo(rest)


def _overhead(rest: list[str]) -> int:
    from sb3_ano.llm.overhead import overhead

    return overhead(rest)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "sft": _sft,
    "reward": _reward,
    "train": _train,
    "generate": _generate,
    "demo": _demo,
    "overhead": _overhead,
}
