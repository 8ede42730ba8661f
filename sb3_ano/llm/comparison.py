"""The command ``compare``: win rates of policies against each other."""

import argparse
import functools
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openai
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize

from sb3_ano._io import write_figure, write_file
from sb3_ano._secrets import hide, remember_arguments
from sb3_ano._system import now, versions
from sb3_ano.cli import Parser
from sb3_ano.llm.config import check_range
from sb3_ano.llm.data import FORMATS, Prompt, check_arguments, check_paths, load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.generation import generate, read_completions
from sb3_ano.llm.judges import (
    FUNCTION_SECONDS,
    REQUEST,
    REQUEST_SECONDS,
    TEMPLATE,
    Judge,
    Ledger,
    Pair,
    Row,
    judge_by_chat,
    judge_by_score,
    plain,
)
from sb3_ano.llm.rewards import LearnedReward

#: Rows by policy and prompt.
Policies: TypeAlias = dict[str, dict[str, Row]]

#: Text of the report, with the names of what is filled in.
REPORT = Path(__file__).with_name("report.md").read_text()
# Okabe and Ito's palette (2008), which color-blind readers can tell apart.
_COLORS: dict[Any, Any] = {
    "win": "#56B4E9",
    "tie": "#DDDDDD",
    "lose": "#E69F00",
}
_KEYS = ["policy", "opponent", "temperature"]
_LENGTHS = ["length", "opponent_length"]
# Parts of a win
_OUTCOMES = {
    "win": 1.0,
    "tie": 0.5,
    "lose": 0.0,
    "order": 0.5,
}
# A share of pairs without a verdict that is worth a warning
_MANY = 0.1
# Upper quantile of the normal distribution, for intervals of 95 %
_QUANTILE = 1.959964


def compare(arguments: Sequence[str], program: str) -> None:
    """Compare the policies that the command line names, and write completions, verdicts, table, report and figures.

    :param arguments: command line after ``compare``
    :param program: name of the program in help texts
    :raises ValueError: if an option is invalid, or the judge fails
    """
    remember_arguments(arguments)
    options = _parse(arguments, f"{program} compare")
    # For module:function; only "python -m" looks in the current directory.
    sys.path.append(os.getcwd())
    out = Path(options.out)
    judge = _make_judge(options, out / "verdicts.jsonl")

    # A row per pair of completions
    completions = _completions(options, out / "completions.jsonl")
    rows = pd.DataFrame(_pairs(completions, options))
    verdicts = pd.DataFrame(judge(rows.pop("pair").tolist()))
    verdicts = pd.concat([rows, verdicts], axis=1)

    # A row per pair of policies and temperature
    summaries = []
    for key, group in verdicts.groupby(_KEYS, sort=False):
        summary = dict(zip(_KEYS, key, strict=True))
        summary |= summarize(group)
        summaries.append(summary)
    table = pd.DataFrame(summaries)
    write_file(out / "win_rates.csv", table.to_csv(index=False, float_format="%.6g"))
    draw(table, out / "win_rates.png")

    # The report says how it was made. Options may have keys and passwords.
    given = []
    for name, value in vars(options).items():
        if value is not None:
            given.append(f"{name} {value}")
    packages = versions(("sb3-ano", "transformers", "openai"))
    warning = _unparseable(verdicts["verdict"], options)
    report = REPORT.format(
        date=now(),
        versions=", ".join(map(" ".join, packages.items())),
        options=", ".join(given),
        table=table.set_index(_KEYS).to_string(line_width=120, float_format="{:.3g}".format),
        warning=f"\nWarning: {warning}.\n" if warning else "",
    )
    report = hide(report)
    write_file(out / "report.md", report)
    print(report)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)


def _unparseable(verdicts: "pd.Series[str]", options: argparse.Namespace) -> str:
    """Return a warning if many pairs have no verdict, or an empty text."""
    count = int((verdicts == "unparseable").sum())
    if count <= _MANY * len(verdicts):
        return ""
    pairs = f"{count} of {len(verdicts)} pairs have no verdict"
    if options.judge_model is None:
        return f"{pairs}, because a score is NaN or None"

    file = Path(options.out, "verdicts.jsonl")
    return (
        f"{pairs} that can be read; see the replies in {file}. They should end with A, B or TIE: let --template ask for that, "
        "and --request allow as many tokens as the model needs"
    )


def summarize(rows: pd.DataFrame) -> dict[Any, float]:
    """Count verdicts, and return win rates with their uncertainty.

    :param rows: a row per prompt: ``verdict``, ``length`` and ``opponent_length``, and numbers that are added up
    :return: numbers by name; NaN if there is no verdict that can be parsed
    """
    summary: dict[Any, float] = {"prompts": len(rows)}
    for verdict in (*_OUTCOMES, "unparseable"):
        summary[verdict] = int((rows["verdict"] == verdict).sum())

    # Without those that cannot be parsed
    outcomes = rows["verdict"].map(_OUTCOMES).dropna()
    differences = (rows["length"] - rows["opponent_length"])[outcomes.index]
    summary["win_rate"] = float(outcomes.mean())
    summary["low"], summary["high"] = wilson(outcomes.sum(), len(outcomes))
    summary["equal_length"] = win_rate_at_equal_length(outcomes.to_numpy(), differences.to_numpy(float))

    # Everything else is counted, such as requests and tokens.
    summary |= rows[_LENGTHS].mean().to_dict()
    counted = rows.drop(columns=[*_KEYS, *_LENGTHS, "verdict"], errors="ignore")
    return summary | counted.sum().to_dict()


def wilson(wins: float, number: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion (Wilson, 1927).

    :param wins: number of successes; a tie may count as half of one
    :param number: number of trials
    """
    if number == 0:
        return float("nan"), float("nan")

    # SciPy has it for integers only.
    rate = wins / number
    weight = _QUANTILE**2 / number
    center = (rate + weight / 2) / (1 + weight)
    variance = rate * (1 - rate) + weight / 4
    half = np.sqrt(weight * variance) / (1 + weight)
    return float(center - half), float(center + half)


def win_rate_at_equal_length(outcomes: np.ndarray, differences: np.ndarray) -> float:
    """Return the win rate that a logistic regression predicts for completions of the same length; NaN if it cannot be known.

    Judges tend to prefer long answers. (Dubois et al., 2024, correct win rates by a similar regression.)

    :param outcomes: 1 for a win, 0.5 for a tie, 0 for a loss, shape (prompts,)
    :param differences: differences of lengths, shape (prompts,)
    """
    if len(outcomes) == 0:
        return float("nan")

    # If all differences are the same, they cannot be told from the policies' own difference.
    deviation = np.std(differences)
    if deviation == 0.0 and differences.any():
        return float("nan")
    scaled = differences / (deviation or 1.0)
    features = np.stack([np.ones(len(scaled)), scaled])

    def loss(weights: np.ndarray) -> float:
        logits = weights @ features
        losses = np.logaddexp(0.0, logits) - outcomes * logits
        # The small penalty keeps the weights finite where lengths decide everything.
        return float(losses.sum() + 1e-3 * weights @ weights)

    intercept = minimize(loss, np.zeros(2)).x[0]
    return float(1.0 / (1.0 + np.exp(-intercept)))


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw win, tie and lose as stacked bars, with a panel per temperature.

    :param table: rows of ``win_rates.csv``
    :param path: file of the figure
    """
    parts = list(table.groupby("temperature", sort=False))
    width = 2.0 + 3.0 * len(parts)
    height = 1.5 + 0.4 * len(table) / len(parts)
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]

    for axes, (temperature, part) in zip(panels, parts, strict=True):
        # A verdict that changed with the order is a tie.
        counts = part[["win", "tie", "lose"]].astype(float)
        counts["tie"] += part["order"]
        total = counts.sum(axis=1)
        shares = 100.0 * counts.div(total, axis=0).fillna(0.0)
        shares.index = pd.Index(part["policy"] + " against " + part["opponent"])

        # Bars are drawn from bottom to top.
        shares[::-1].plot.barh(
            ax=axes,
            stacked=True,
            color=_COLORS,
            width=0.8,
            legend=False,
        )
        for bars in axes.containers:
            axes.bar_label(bars, fmt=_percent, label_type="center", fontsize=8)
        axes.axvline(50.0, color="black", linestyle="--", linewidth=0.8)
        axes.set(xlim=(0, 100), xlabel="Percent of prompts")

        # Completions of files have no temperature.
        if temperature:
            axes.set_title(f"T = {temperature!s}")
        axes.label_outer()

    # Next to the last panel
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    write_figure(path, figure, dpi=150)


def _percent(share: float) -> str:
    # A narrow bar has no room for its number.
    return f"{share:.0f}" if share >= 6 else ""


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    # Help that does not fit in a line
    description = "Compare policies pair by pair. The same command resumes; nothing is generated or asked twice."
    timeout = f"time for a request with its repetitions, {REQUEST_SECONDS:g} by default; or for a batch of the function, "
    timeout += f"{FUNCTION_SECONDS:g} by default"
    policies = "two or more models, or JSONL files with prompt and completion"

    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("policies", nargs="+", metavar="NAME=PATH", help=policies)
    parser.add_argument("--out", required=True, help="directory to write, or to resume in")
    judge = parser.add_argument_group("judge (choose one)").add_mutually_exclusive_group(required=True)
    judge.add_argument("--judge_model", help="chat model of an OpenAI-compatible endpoint, whose key is in OPENAI_API_KEY")
    judge.add_argument("--reward_model", help="Hub id or directory of a reward model")
    judge.add_argument("--judge_function", help="module:function, a reward function as in TRL")

    chat = parser.add_argument_group("chat model")
    chat.add_argument("--base_url", help="address of the endpoint, OpenAI's by default")
    chat.add_argument("--template", help="file with the request; {prompt}, {first} and {second} are replaced")
    chat.add_argument("--concurrency", type=int, default=8, help="requests at the same time")
    chat.add_argument("--retries", type=int, default=8, help="repetitions of a failed request, after growing pauses")
    chat.add_argument("--timeout", type=float, metavar="SECONDS", help=timeout)
    chat.add_argument("--request", type=json_object, default=REQUEST, metavar="JSON", help="fields besides model and messages")

    texts = parser.add_argument_group("completions")
    texts.add_argument("--dataset_name", help="Hub id, directory or file; it has a column 'prompt'")
    texts.add_argument("--dataset_config", help="configuration of a data set on the Hub")
    texts.add_argument("--dataset_split", default="test", help="split of the data set")
    texts.add_argument("--samples", type=int, default=1000, help="number of prompts")
    texts.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0 is greedy decoding")
    texts.add_argument("--seed", type=int, default=0, help="seed of the choice of prompts and of sampling")
    texts.add_argument("--max_completion_length", type=int, default=53, help="tokens")
    texts.add_argument("--batch_size", type=int, default=32, help="prompts generated at the same time")
    options = parser.parse_args(list(arguments))

    # Numbers and addresses
    for name in ("concurrency", "retries", "samples", "max_completion_length", "batch_size"):
        check_range(name, getattr(options, name), "positive integers")
    for temperature in options.temperatures:
        check_range("temperatures", temperature, "finite numbers from 0")
    check_range("timeout", options.timeout, "positive finite numbers")
    if options.base_url and not options.base_url.startswith(("http://", "https://")):
        given = hide(options.base_url)
        raise ValueError(f"base_url={given!r} is not allowed; allowed are addresses such as http://host:8000/v1")

    # A policy without a name is called like its file or directory.
    paths: dict[str, str] = {}
    for policy in options.policies:
        name, separator, path = policy.partition("=")
        if not separator:
            path = policy
            name = Path(path).stem if _is_file(path) else Path(path).name
        paths[name] = path
    is_incomplete = "" in paths or "" in paths.values()
    if is_incomplete or len(paths) < max(2, len(options.policies)):
        given = " ".join(options.policies)
        raise ValueError(f"policies {given!r} are not allowed; give two or more, as NAME=PATH with different names")
    options.policies = paths

    # Files, before anything asks the Hub
    check_paths({"dataset_name": options.dataset_name, "reward_model": options.reward_model, **paths})
    for path in paths.values():
        if options.dataset_name is None and not _is_file(path):
            raise ValueError(f"{path!r} is no JSON, CSV or Parquet file, but a model that needs prompts; give --dataset_name")
    return options


def json_object(text: str) -> Row:
    """Parse a JSON object; argparse names this function in its error."""
    return dict(json.loads(text))


def _is_file(path: str) -> bool:
    return Path(path).suffix in FORMATS


def _make_judge(options: argparse.Namespace, verdicts: Path) -> Judge:
    models = []
    for path in options.policies.values():
        if not _is_file(path):
            models.append(path)

    if options.judge_function is not None:
        function = load_reward_function(options.judge_function)
        # The tokens of a model's completions are known.
        given = ["prompts", "completions"]
        if models:
            given.append("completion_ids")
        check_arguments(function, options.judge_function, given)
        return functools.partial(
            judge_by_score,
            score=function,
            name=options.judge_function,
            timeout=options.timeout or FUNCTION_SECONDS,
        )

    if options.reward_model is not None:
        tokenizer = load_tokenizer(options.reward_model)
        vocabulary = tokenizer.get_vocab()
        for path in models:
            # A policy's tokenizer has the chat template that holds.
            tokenizer = load_tokenizer(path)
            if tokenizer.get_vocab() != vocabulary:
                raise ValueError(f"{path!r} has another tokenizer than reward_model={options.reward_model!r}")
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        reward = LearnedReward.load(options.reward_model, tokenizer, device)
        return functools.partial(judge_by_score, score=reward, name=options.reward_model)

    template = Path(options.template).read_text() if options.template else TEMPLATE
    absent = [name for name in ("{prompt}", "{first}", "{second}") if name not in template]
    if absent:
        raise ValueError(f"template={options.template!r} lacks {', '.join(absent)}")

    # A local server needs no key, but the client does.
    key = os.environ.get("OPENAI_API_KEY") or (options.base_url and "none")
    client = openai.OpenAI(
        api_key=key,
        base_url=options.base_url,
        max_retries=options.retries,
        timeout=120.0,
    )
    return functools.partial(
        judge_by_chat,
        client=client,
        model=options.judge_model,
        ledger=Ledger(verdicts, ("verdict", "usage")),
        template=template,
        concurrency=options.concurrency,
        fields=options.request,
        timeout=options.timeout or REQUEST_SECONDS,
    )


def _completions(options: argparse.Namespace, file: Path) -> dict[str, Policies]:
    """Return completions by temperature; files alone have none."""
    files: Policies = {}
    for name, path in options.policies.items():
        if _is_file(path):
            files[name] = read_completions(path)

    # The prompts of the data set, or those of the first file
    if options.dataset_name is None:
        first = next(iter(files.values()))
        candidates = [row["prompt"] for row in first.values()]
    else:
        dataset = load_split(options.dataset_name, options.dataset_config, options.dataset_split)
        candidates = dataset["prompt"]

    # All files must have them.
    unique: dict[str, Prompt] = {plain(prompt): prompt for prompt in candidates}
    texts = list(unique)
    for rows in files.values():
        texts = [text for text in texts if text in rows]
    if not texts:
        raise ValueError("there is no prompt that all files have, and the data set, if one is given")
    random.Random(options.seed).shuffle(texts)
    texts = texts[: options.samples]

    for name, rows in files.items():
        files[name] = {text: rows[text] for text in texts}
    if len(files) == len(options.policies):
        return {"": files}

    # Completions of files are the same at all temperatures.
    ledger = Ledger(file, ("completion", "completion_ids"))
    prompts = [unique[text] for text in texts]
    completions: dict[str, Policies] = {}
    for temperature in options.temperatures:
        policies = dict(files)
        for name, path in options.policies.items():
            if name in files:
                continue
            policies[name] = generate(
                path,
                prompts,
                ledger,
                temperature,
                options.seed,
                options.max_completion_length,
                options.batch_size,
            )
        completions[f"{temperature:g}"] = policies
    return completions


def _pairs(completions: dict[str, Policies], options: argparse.Namespace) -> Iterator[Row]:
    """Yield each pair to judge, with its policies, temperature and lengths."""
    for temperature, policies in completions.items():
        for policy, opponent in itertools.combinations(options.policies, 2):
            for prompt, row in policies[policy].items():
                pair = (row, policies[opponent][prompt])
                length, opponent_length = _lengths(pair)
                yield {
                    "policy": policy,
                    "opponent": opponent,
                    "temperature": temperature,
                    "length": length,
                    "opponent_length": opponent_length,
                    "pair": pair,
                }


def _lengths(pair: Pair) -> list[int]:
    """Return lengths in tokens, or in words if the tokens of one of them are unknown."""
    if any(row.get("completion_ids") is None for row in pair):
        return [len(row["completion"].split()) for row in pair]
    return [len(row["completion_ids"]) for row in pair]
