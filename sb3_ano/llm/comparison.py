"""The command ``compare``: win rates of policies against each other."""

import argparse
import functools
import itertools
import json
import os
import random
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from sb3_ano.llm.data import FORMATS, check_arguments, check_paths, load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.generation import generate, read_completions
from sb3_ano.llm.judges import (
    FUNCTION_SECONDS,
    REQUEST,
    REQUEST_SECONDS,
    TEMPLATE,
    Judge,
    Ledger,
    judge_by_chat,
    judge_by_score,
    plain,
)
from sb3_ano.llm.rewards import LearnedReward

#: Text of the report, with the names of what is filled in.
REPORT = Path(__file__).with_name("report.md").read_text()
# Okabe and Ito's palette (2008), which color-blind readers can tell apart.
_COLORS: dict[Any, Any] = {"win": "#56B4E9", "tie": "#DDDDDD", "lose": "#E69F00"}
_KEYS = ["policy", "opponent", "temperature"]
_COLUMNS = [*_KEYS, "length", "opponent_length", "pair"]
# A share of pairs without a verdict that is worth a warning
_MANY = 0.1
_OUTCOMES = {"win": 1.0, "tie": 0.5, "lose": 0.0, "order": 0.5}
# Rows by policy and prompt
Policies = dict[str, dict[str, dict[str, Any]]]


def compare(arguments: Sequence[str], program: str) -> None:
    """Compare the policies that the command line names, and write completions, verdicts, table, report and figures.

    :param arguments: command line after ``compare``
    :param program: name of the program in help texts
    :raises ValueError: if an option is invalid, or the judge fails
    """
    remember_arguments(arguments)
    options = _parse(arguments, f"{program} compare")
    sys.path.append(os.getcwd())  # for module:function; only "python -m" looks in the current directory
    out = Path(options.out)
    judge = _make_judge(options, out / "verdicts.jsonl")
    rows = pd.DataFrame(_pairs(_completions(options, out / "completions.jsonl"), options))
    verdicts = pd.concat([rows, pd.DataFrame(judge(rows.pop("pair").tolist()))], axis=1)
    groups = verdicts.groupby(_KEYS, sort=False)
    table = pd.DataFrame([{**dict(zip(_KEYS, key, strict=True)), **summarize(part)} for key, part in groups])
    write_file(out / "win_rates.csv", table.to_csv(index=False, float_format="%.6g"))
    draw(table, out)
    warning = _unparseable(verdicts["verdict"], options)
    report = REPORT.format(
        date=now(),
        versions=", ".join(" ".join(pair) for pair in versions(("sb3-ano", "transformers", "openai")).items()),
        options=", ".join(f"{name} {value}" for name, value in vars(options).items() if value is not None),
        table=table.set_index(_KEYS).to_string(line_width=120, float_format=lambda number: f"{number:.3g}"),
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
    if options.judge_model is None:
        return f"{count} of {len(verdicts)} pairs have no verdict, because a score is NaN or None"
    file = Path(options.out, "verdicts.jsonl")
    return (
        f"{count} of {len(verdicts)} pairs have no verdict that can be read; see the replies in {file}. They should end "
        "with A, B or TIE: let --template ask for that, and --request allow as many tokens as the model needs"
    )


def summarize(rows: pd.DataFrame) -> dict[Any, float]:
    """Count verdicts, and return win rates with their uncertainty.

    :param rows: a row per prompt: ``verdict``, ``length`` and ``opponent_length``, and numbers that are added up
    :return: numbers by name; NaN if there is no verdict that can be parsed
    """
    counts = {name: int((rows["verdict"] == name).sum()) for name in (*_OUTCOMES, "unparseable")}
    outcomes = rows["verdict"].map(_OUTCOMES).dropna()
    differences = (rows["length"] - rows["opponent_length"])[outcomes.index]
    return {
        "prompts": len(rows),
        **counts,
        "win_rate": float(outcomes.mean()),
        **dict(zip(("low", "high"), wilson(outcomes.sum(), len(outcomes)), strict=True)),
        "equal_length": win_rate_at_equal_length(outcomes.to_numpy(), differences.to_numpy(float)),
        **rows[["length", "opponent_length"]].mean().to_dict(),
        **rows.drop(columns=[*_KEYS, "verdict", "length", "opponent_length"], errors="ignore").sum().to_dict(),
    }


def wilson(wins: float, number: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's interval of a proportion (Wilson, 1927).

    :param wins: number of successes; a tie may count as half of one
    :param number: number of trials
    :param z: quantile of the normal distribution; by default that of 95 %
    """
    if number == 0:
        return float("nan"), float("nan")
    rate, weight = wins / number, z * z / number
    center = (rate + weight / 2) / (1 + weight)
    half = np.sqrt(weight * (rate * (1 - rate) + weight / 4)) / (1 + weight)
    return float(center - half), float(center + half)


def win_rate_at_equal_length(outcomes: np.ndarray, differences: np.ndarray) -> float:
    """Return the win rate that a logistic regression predicts for completions of the same length; NaN if it cannot be known.

    Judges tend to prefer long answers. (Dubois et al., 2024, correct win rates by a similar regression.)

    :param outcomes: 1 for a win, 0.5 for a tie, 0 for a loss, shape (prompts,)
    :param differences: differences of lengths, shape (prompts,)
    """
    if len(outcomes) == 0 or (np.std(differences) == 0.0 and differences.any()):
        return float("nan")
    features = np.stack([np.ones(len(differences)), differences / (np.std(differences) or 1.0)])

    def loss(weights: np.ndarray) -> float:
        logits = weights @ features
        # The small penalty keeps the weights finite where lengths decide everything.
        return float(np.sum(np.logaddexp(0.0, logits) - outcomes * logits) + 1e-3 * weights @ weights)

    return float(1.0 / (1.0 + np.exp(-minimize(loss, np.zeros(2)).x[0])))


def draw(table: pd.DataFrame, out: Path) -> None:
    """Draw win, tie and lose as stacked bars, and a matrix of win rates if there are more than two policies.

    :param table: rows of ``win_rates.csv``
    :param out: directory of ``win_rates.png`` and ``matrix.png``, which have a panel per temperature
    """
    parts = table.groupby("temperature", sort=False)
    pairs = len(table) / len(parts)
    for draw_panel, name in ((_draw_bars, "win_rates.png"), (_draw_matrix, "matrix.png"))[: 1 + (pairs > 1)]:
        figure = Figure(figsize=(2.0 + 3.0 * len(parts), 1.5 + 0.4 * pairs), layout="constrained")
        panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
        for axes, (temperature, part) in zip(panels, parts, strict=True):
            draw_panel(axes, part)
            axes.set_title(f"T = {temperature!s}" if temperature else "")
            axes.label_outer()
        write_figure(out / name, figure, dpi=150)


def _draw_bars(axes: Any, table: pd.DataFrame) -> None:
    counts = pd.DataFrame({"win": table["win"], "tie": table["tie"] + table["order"], "lose": table["lose"]})
    shares = (100.0 * counts.div(counts.sum(axis=1), axis=0)).fillna(0.0)
    shares.index = pd.Index(table["policy"] + " against " + table["opponent"])
    shares[::-1].plot.barh(ax=axes, stacked=True, color=_COLORS, width=0.8, legend=False)  # from bottom to top
    if axes.get_subplotspec().is_last_col():
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for bars in axes.containers:
        axes.bar_label(bars, fmt=lambda share: f"{share:.0f}" if share >= 6 else "", label_type="center", fontsize=8)
    axes.axvline(50.0, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlim=(0, 100), xlabel="Percent of prompts")


def _draw_matrix(axes: Any, table: pd.DataFrame) -> None:
    names = list(dict.fromkeys([*table["policy"], *table["opponent"]]))
    rates = 100.0 * table.pivot(index="policy", columns="opponent", values="win_rate").reindex(index=names, columns=names)
    rates = rates.fillna(100.0 - rates.T)
    axes.imshow(rates, cmap="PuOr", vmin=0, vmax=100, alpha=0.6)
    for i, j in np.argwhere(rates.notna().to_numpy()):
        axes.text(j, i, f"{rates.to_numpy()[i, j]:.0f}", ha="center", va="center")
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="Opponent", ylabel="Win rate of the policy, %")


_TIMEOUT = f"time for a request with its repetitions, {REQUEST_SECONDS:g} by default; or for a batch of the function, "
_TIMEOUT += f"{FUNCTION_SECONDS:g} by default"


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    description = "Compare policies pair by pair. The same command resumes; nothing is generated or asked twice."
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument(
        "policies", nargs="+", metavar="NAME=PATH", help="two or more models, or JSONL files with prompt and completion"
    )
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
    chat.add_argument("--timeout", type=float, metavar="SECONDS", help=_TIMEOUT)
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
    names, options.policies = options.policies, dict(map(_policy, options.policies))
    if len(options.policies) < max(2, len(names)) or "" in {*options.policies, *options.policies.values()}:
        raise ValueError(f"policies {' '.join(names)!r} are not allowed; give two or more, as NAME=PATH with different names")
    for name in ("concurrency", "retries", "samples", "max_completion_length", "batch_size"):
        check_range(name, getattr(options, name), "positive integers")
    check_range("timeout", options.timeout, "positive finite numbers")
    address = urllib.parse.urlsplit(options.base_url or "http://host")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(
            f"base_url={hide(options.base_url)!r} is not allowed; allowed are addresses such as http://host:8000/v1"
        )
    for temperature in options.temperatures:
        check_range("temperatures", temperature, "finite numbers from 0")
    check_paths({"dataset_name": options.dataset_name, "reward_model": options.reward_model, **options.policies})
    if options.dataset_name is None and (models := [path for path in options.policies.values() if not _is_file(path)]):
        raise ValueError(f"{models[0]!r} is no JSON, CSV or Parquet file, but a model that needs prompts; give --dataset_name")
    return options


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; argparse names this function in its error."""
    return dict(json.loads(text))


def _is_file(path: str) -> bool:
    return Path(path).suffix in FORMATS


def _policy(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    return (name, path) if separator else (Path(text).stem if _is_file(text) else Path(text).name, text)


def _make_judge(options: argparse.Namespace, verdicts: Path) -> Judge:
    if options.judge_function is not None:
        function = load_reward_function(options.judge_function)
        given = ["prompts", "completions"]
        if not all(map(_is_file, options.policies.values())):  # a model's tokens are known
            given.append("completion_ids")
        check_arguments(function, options.judge_function, given)
        seconds = options.timeout or FUNCTION_SECONDS
        return functools.partial(judge_by_score, score=function, name=options.judge_function, timeout=seconds)
    if options.reward_model is not None:
        own, device = load_tokenizer(options.reward_model), torch.accelerator.current_accelerator(check_available=True)
        # One of a policy comes last: its chat template holds.
        tokenizers = {path: load_tokenizer(path) for path in options.policies.values() if not _is_file(path)}
        for path, tokenizer in tokenizers.items():
            if tokenizer.get_vocab() != own.get_vocab():
                raise ValueError(f"{path!r} has another tokenizer than reward_model={options.reward_model!r}")
        reward = LearnedReward.load(options.reward_model, [own, *tokenizers.values()][-1], device or "cpu")
        return functools.partial(judge_by_score, score=reward, name=options.reward_model)
    template = Path(options.template).read_text() if options.template else TEMPLATE
    if absent := [name for name in ("{prompt}", "{first}", "{second}") if name not in template]:
        raise ValueError(f"template={options.template!r} lacks {', '.join(absent)}")
    # A local server needs no key, but the client does.
    key = os.environ.get("OPENAI_API_KEY") or (options.base_url and "none")
    client = openai.OpenAI(api_key=key, base_url=options.base_url, max_retries=options.retries, timeout=120.0)
    settings = {"template": template, "concurrency": options.concurrency, "fields": options.request}
    settings |= {"timeout": options.timeout or REQUEST_SECONDS, "ledger": Ledger(verdicts, ("verdict", "usage"))}
    return functools.partial(judge_by_chat, client=client, model=options.judge_model, **settings)


def _completions(options: argparse.Namespace, file: Path) -> dict[str, Policies]:
    """Return completions by temperature; files alone have none."""
    files = {name: read_completions(path) for name, path in options.policies.items() if _is_file(path)}
    if options.dataset_name is None:
        unique = {text: row["prompt"] for text, row in next(iter(files.values())).items()}
    else:
        dataset = load_split(options.dataset_name, options.dataset_config, options.dataset_split)
        unique = {plain(prompt): prompt for prompt in dataset["prompt"]}
    prompts = [prompt for text, prompt in unique.items() if all(text in file for file in files.values())]
    if not prompts:
        raise ValueError("there is no prompt that all files have, and the data set, if one is given")
    random.Random(options.seed).shuffle(prompts)
    prompts = prompts[: options.samples]
    files = {name: {text: file[text] for text in map(plain, prompts)} for name, file in files.items()}
    if len(files) == len(options.policies):
        return {"": files}
    ledger, sampling = (
        Ledger(file, ("completion", "completion_ids")),
        (options.seed, options.max_completion_length, options.batch_size),
    )
    return {
        f"{temperature:g}": {
            name: files.get(name) or generate(path, prompts, ledger, temperature, *sampling)
            for name, path in options.policies.items()
        }
        for temperature in options.temperatures
    }


def _pairs(completions: dict[str, Policies], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each pair to judge, with its policies, temperature and lengths."""
    for temperature, (first, second) in itertools.product(completions, itertools.combinations(options.policies, 2)):
        a, b = completions[temperature][first], completions[temperature][second]
        for pair in [(row, b[prompt]) for prompt, row in a.items()]:
            # In tokens, or in words if the tokens of one of them are unknown
            are_known = all(row.get("completion_ids") is not None for row in pair)
            lengths = [len(row["completion_ids"] if are_known else row["completion"].split()) for row in pair]
            yield dict(zip(_COLUMNS, (first, second, temperature, *lengths, pair), strict=True))
