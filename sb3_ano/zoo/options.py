"""The options that ``zoo/tuning`` reads before the zoo parses them; this file goes with ``zoo/tuning``."""

import argparse
from collections.abc import Sequence


def named_in(arguments: Sequence[str]) -> argparse.Namespace:
    """Return algorithm, environment, log directory and whether a search is asked for, with the zoo's defaults.

    :param arguments: command line of ``train``
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("-f", "--folder", "--log-folder")
    parser.add_argument("-optimize", "--optimize-hyperparameters", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError:  # the command itself raises
        return parser.parse_args([])
