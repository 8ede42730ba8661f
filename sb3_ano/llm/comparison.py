"""The command ``compare``: win rates of policies against each other."""

import argparse
import itertools
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.stats import binomtest

from sb3_ano._io import now, versions, write_file
from sb3_ano.cli import Parser
from sb3_ano.llm.data import load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.generation import generate, plain, read_completions
from sb3_ano.llm.judges import TEMPLATE, ChatJudge, Judge, Ledger, Pair, ScoreJudge, Verdict
from sb3_ano.llm.rewards import LearnedReward

_EXAMPLE = """\
examples:
  {program} ano=outputs/ano/final ppo=outputs/ppo/final --dataset_name trl-lib/tldr \\
      --judge_model deepseek-chat --base_url https://api.deepseek.com --samples 200 --out comparison
  {program} ano.jsonl ppo.jsonl --judge_function my_rewards:gold --out comparison

A policy is NAME=PATH: a model's directory or Hub id, which completes the prompts of the data set, or a JSONL file with the
columns prompt and completion. The same command resumes; nothing is generated or asked twice.
"""
REPORT = """\
# Win rates

{settings}

{date}; {versions}.

A win rate counts a tie as half a win; its 95 % interval is Wilson's. A pair whose verdict depends on the order in which the
completions are shown is a tie, and counted under "order". "First" is the fraction of the single verdicts that prefer
the completion that is shown first: 0.5 without bias. "Equal length" is the win rate that a logistic regression on the
difference of lengths predicts for completions of the same length. p is that of the exact sign test.

{table}

Mean lengths of completions, in {unit}: {lengths}.{usage}
"""
# Okabe and Ito's palette (2008), which color-blind readers can tell apart.
_COLORS = {"win": "#0072B2", "tie": "#BBBBBB", "lose": "#D55E00"}


def compare(arguments: Sequence[str], program: str) -> None:
    """Compare the policies that the command line names, and write verdicts, table, report and figures.

    :param arguments: command line after ``compare``
    :param program: name of the program in help texts
    :raises ValueError: if an option is invalid, or the judge fails
    """
    options = _parse(arguments, f"{program} compare")
    sys.path.append(os.getcwd())  # for module:function; only "python -m" looks in the current directory
    out = Path(options.out)
    judge = _make_judge(options, out / "verdicts.jsonl")
    completions = _completions(options, out)
    pairs_of_names = list(itertools.combinations(options.policies, 2))
    if options.against_first:
        pairs_of_names = [pair for pair in pairs_of_names if pair[0] == next(iter(options.policies))]
    rows = []
    for temperature, policies in completions.items():
        for first, second in pairs_of_names:
            a, b = policies[first], policies[second]
            common = [prompt for prompt in a if prompt in b][: options.samples]
            if not common:
                raise ValueError(f"{first} and {second} have no prompt in common")
            pairs: list[Pair] = [(prompt, a[prompt], b[prompt]) for prompt in common]
            verdicts, facts = judge(pairs)
            lengths = np.array([_length(one) - _length(other) for _, one, other in pairs], dtype=float)
            names = {"policy": first, "opponent": second, "temperature": temperature}
            rows.append({**names, **summarize(verdicts, lengths), **facts})
    table = pd.DataFrame(rows)
    write_file(out / "win_rates.csv", table.to_csv(index=False, float_format="%.6g"))
    report = _report(table, completions, options)
    write_file(out / "report.md", report)
    draw(table, out)
    print(report)


def summarize(verdicts: Sequence[Verdict], length_differences: np.ndarray) -> dict[str, float]:
    """Count verdicts, and return win rates with their uncertainty.

    :param verdicts: one per prompt
    :param length_differences: length of the first completion less that of the second, shape (prompts,)
    :return: numbers by name; NaN if there is no verdict that can be parsed
    """
    counts = {name: list(verdicts).count(name) for name in ("first", "second", "tie", "order", "unparseable")}
    valid = len(verdicts) - counts["unparseable"]
    score = counts["first"] + 0.5 * (counts["tie"] + counts["order"])
    rate = score / valid if valid else float("nan")
    low, high = wilson(score, valid)
    decided = counts["first"] + counts["second"]
    result: dict[str, float] = {
        "prompts": len(verdicts),
        "win": counts["first"],
        "tie": counts["tie"],
        "lose": counts["second"],
    }
    result |= {"order": counts["order"], "unparseable": counts["unparseable"], "win_rate": rate, "low": low, "high": high}
    result["p"] = binomtest(counts["first"], decided).pvalue if decided else 1.0
    outcomes = {"first": 1.0, "second": 0.0, "tie": 0.5, "order": 0.5}
    known = np.array([verdict in outcomes for verdict in verdicts], dtype=bool)
    values = np.array([outcomes[verdict] for verdict in verdicts if verdict in outcomes])
    result["equal_length"] = win_rate_at_equal_length(values, length_differences[known]) if valid else float("nan")
    return result


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
    """Return the win rate that a logistic regression predicts for completions of the same length.

    Judges tend to prefer long answers. (Dubois et al., 2024, correct win rates by a similar regression.)

    :param outcomes: 1 for a win, 0.5 for a tie, 0 for a loss, shape (prompts,)
    :param differences: differences of lengths, shape (prompts,)
    """
    scale = float(np.std(differences)) or 1.0
    features = np.stack([np.ones(len(differences)), differences / scale])

    def loss(weights: np.ndarray) -> float:
        logits = weights @ features
        # The small penalty keeps the weights finite where lengths decide everything.
        return float(np.sum(np.logaddexp(0.0, logits) - outcomes * logits) + 1e-3 * weights @ weights)

    return float(1.0 / (1.0 + np.exp(-minimize(loss, np.zeros(2)).x[0])))


def draw(table: pd.DataFrame, out: Path) -> None:
    """Draw win, tie and lose as stacked bars, and a matrix of win rates if there are more than two policies.

    :param table: rows of ``win_rates.csv``
    :param out: directory of ``win_rates.png`` and ``matrix_TEMPERATURE.png``
    """
    column = table["temperature"]
    parts = [(value, table[column.isna() if pd.isna(value) else column == value]) for value in column.unique()]
    pairs = len(parts[0][1])
    figure = Figure(figsize=(2.2 + 2.6 * len(parts), 0.36 * pairs + 1.2), layout="constrained")
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, (temperature, part) in zip(panels, parts, strict=True):
        valid = (part["prompts"] - part["unparseable"]).clip(lower=1)
        left = np.zeros(pairs)
        for name, counts in {"win": part["win"], "tie": part["tie"] + part["order"], "lose": part["lose"]}.items():
            width = (100.0 * counts / valid).to_numpy()
            bars = axes.barh(range(pairs), width, left=left, color=_COLORS[name], label=name)
            texts = [f"{value:.0f}" if value >= 6 else "" for value in width]
            axes.bar_label(bars, texts, label_type="center", color="black" if name == "tie" else "white", fontsize=8)
            left += width
        axes.axvline(50.0, color="black", linestyle="--", linewidth=0.8)
        axes.set(
            xlim=(0, 100), ylim=(pairs - 0.5, -0.5), xlabel="Percent of prompts", title=_at(temperature).removeprefix(" at ")
        )
    panels[0].set_yticks(
        range(pairs), [f"{row['policy']} against {row['opponent']}" for row in parts[0][1].to_dict("records")]
    )
    figure.legend(*panels[0].get_legend_handles_labels(), ncols=3, loc="outside upper center", frameon=False)
    figure.savefig(out / "win_rates.png", dpi=150)
    names = list(dict.fromkeys([*table["policy"], *table["opponent"]]))
    for temperature, part in parts if len(names) > 2 else ():
        rates = np.full((len(names), len(names)), np.nan)
        for row in part.to_dict("records"):
            i, j = names.index(row["policy"]), names.index(row["opponent"])
            rates[i, j], rates[j, i] = 100.0 * row["win_rate"], 100.0 * (1.0 - row["win_rate"])
        figure = Figure(figsize=(0.8 * len(names) + 1.6, 0.7 * len(names) + 1.2), layout="constrained")
        axes = figure.subplots()
        colors = LinearSegmentedColormap.from_list("", [_COLORS["lose"], "white", _COLORS["win"]])
        axes.imshow(rates, cmap=colors, vmin=0, vmax=100)
        for i, j in np.argwhere(~np.isnan(rates)):
            color = "white" if abs(rates[i, j] - 50) > 30 else "black"
            axes.text(j, i, f"{rates[i, j]:.0f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"Win rate in percent{_at(temperature)}", xlabel="Opponent", ylabel="Policy")
        figure.savefig(out / ("matrix.png" if pd.isna(temperature) else f"matrix_{temperature:g}.png"), dpi=150)


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = Parser(
        prog=program,
        description="Compare policies pair by pair: win rates by a chat model, a reward model, or a Python function.",
        epilog=_EXAMPLE.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("policies", nargs="+", metavar="NAME=PATH", help="two or more policies")
    parser.add_argument("--out", required=True, help="directory to write, or to resume in")
    judge = parser.add_argument_group("judge (choose one)").add_mutually_exclusive_group(required=True)
    judge.add_argument("--judge_model", help="chat model of an OpenAI-compatible endpoint")
    judge.add_argument("--reward_model", help="Hub id or directory of a reward model")
    judge.add_argument("--judge_function", help="module:function, a reward function as in TRL")
    chat = parser.add_argument_group("chat model")
    chat.add_argument("--base_url", help="address of the endpoint, OpenAI's by default")
    chat.add_argument("--api_key_variable", default="OPENAI_API_KEY", help="environment variable with the key")
    chat.add_argument("--template", help="file with the request; {prompt}, {first} and {second} are replaced")
    chat.add_argument("--concurrency", type=_positive, default=8, help="requests at the same time")
    chat.add_argument("--retries", type=int, default=8, help="repetitions of a failed request, after growing pauses")
    chat.add_argument("--max_tokens", type=_positive, default=512, help="length of a reply; reasoning models need more")
    texts = parser.add_argument_group("completions")
    texts.add_argument("--dataset_name", help="Hub id, directory or file; it has a column 'prompt'")
    texts.add_argument("--dataset_config", help="configuration of a data set on the Hub")
    texts.add_argument("--dataset_split", default="test", help="split of the data set")
    texts.add_argument("--samples", type=_positive, default=1000, help="number of prompts")
    texts.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0 is greedy decoding")
    texts.add_argument("--seed", type=int, default=0, help="seed of the choice of prompts and of sampling")
    texts.add_argument("--max_completion_length", type=_positive, default=53, help="tokens")
    texts.add_argument("--batch_size", type=_positive, default=32, help="prompts generated at the same time")
    parser.add_argument("--against_first", action="store_true", help="compare the first policy with the others only")
    options = parser.parse_args(list(arguments))
    options.policies = _policies(options.policies)
    generated = [path for path in options.policies.values() if not _is_file(path)]
    if generated and options.dataset_name is None:
        raise ValueError(f"{generated[0]!r} is no JSONL file, but a model that needs prompts; give --dataset_name")
    for path in options.policies.values():
        if _is_file(path) and not Path(path).is_file():
            raise ValueError(f"{path!r} does not exist")
    if bad := [value for value in options.temperatures if not 0.0 <= value < float("inf")]:
        raise ValueError(f"temperature {bad[0]} is not allowed; allowed are numbers from 0")
    if len(set(options.temperatures)) < len(options.temperatures):
        raise ValueError("a temperature is given twice")
    return options


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def _is_file(path: str) -> bool:
    return path.endswith(".jsonl")


def _policies(texts: Sequence[str]) -> dict[str, str]:
    policies: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        name, path = (name, path) if separator else (Path(text).stem, text)
        if not name or not path or "/" in name:
            raise ValueError(f"policy {text!r} is not NAME=PATH")
        if name in policies:
            raise ValueError(f"two policies are called {name!r}; give each a name as NAME=PATH")
        policies[name] = path
    if len(policies) < 2:
        raise ValueError("one policy cannot be compared; give two or more")
    return policies


def _make_judge(options: argparse.Namespace, verdicts: Path) -> Judge:
    if options.judge_model is not None:
        try:
            template = Path(options.template).read_text() if options.template else TEMPLATE
        except OSError as error:
            raise ValueError(f"template={options.template!r} cannot be read: {error.strerror}") from error
        key = os.environ.get(options.api_key_variable)
        if key is None and options.base_url is None:
            raise ValueError(f"OpenAI asks for a key; set {options.api_key_variable}, or give --base_url")
        settings = {name: getattr(options, name) for name in ("base_url", "concurrency", "retries", "max_tokens")}
        return ChatJudge(options.judge_model, Ledger(verdicts), api_key=key, template=template, **settings)
    if options.judge_function is not None:
        return ScoreJudge(load_reward_function(options.judge_function), options.judge_function)
    tokenizer = load_tokenizer(options.reward_model)
    reward = LearnedReward.load(options.reward_model, tokenizer, torch.accelerator.current_accelerator() or "cpu")

    def score(prompts: list[str], completions: list[str], completion_ids: list[list[int]] | None = None) -> list[float]:
        # A completion from a file ends where its text ends.
        end = [tokenizer.eos_token_id]
        ids = completion_ids or [[*tokenizer(text)["input_ids"], *end] for text in completions]
        return reward(prompts, ids)

    return ScoreJudge(score, options.reward_model)


def _completions(options: argparse.Namespace, out: Path) -> dict[float, dict[str, dict[str, dict[str, Any]]]]:
    """Return rows by temperature, policy and prompt; files alone have one temperature, NaN."""
    files = {name: read_completions(Path(path)) for name, path in options.policies.items() if _is_file(path)}
    if len(files) == len(options.policies):
        return {float("nan"): files}
    dataset = load_split(options.dataset_name, options.dataset_config, options.dataset_split)
    prompts = list({plain(prompt): prompt for prompt in dataset["prompt"]}.values())
    random.Random(options.seed).shuffle(prompts)
    lengths = {"max_completion_length": options.max_completion_length, "batch_size": options.batch_size}
    completions: dict[float, dict[str, dict[str, dict[str, Any]]]] = {}
    for temperature in options.temperatures:
        for name, path in options.policies.items():
            file = out / "completions" / f"{name}_{temperature:g}.jsonl"
            rows = files.get(name) or generate(path, prompts[: options.samples], file, temperature, options.seed, **lengths)
            completions.setdefault(temperature, {})[name] = rows
    return completions


def _length(row: dict[str, Any]) -> int:
    """Return the number of tokens, or of words if the tokens are unknown."""
    return len(row.get("completion_ids") or row["completion"].split())


def _report(table: pd.DataFrame, completions: dict[float, Any], options: argparse.Namespace) -> str:
    columns = ["policy", "opponent", "T", "prompts", "win", "tie", "lose", "order", "unparseable", "win rate, % (95 %)"]
    lines = [f"| {' | '.join([*columns, 'p', 'equal length, %', 'first'])} |", "|---|---|" + "--:|" * 11]
    for row in table.to_dict("records"):
        temperature = "" if pd.isna(row["temperature"]) else f"{row['temperature']:g}"
        rate = f"{100 * row['win_rate']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
        counts = [str(row[name]) for name in ("prompts", "win", "tie", "lose", "order", "unparseable")]
        bias = row.get("first_preferred", float("nan"))
        last = [rate, f"{row['p']:.2g}", f"{100 * row['equal_length']:.1f}", "" if pd.isna(bias) else f"{bias:.2f}"]
        lines.append(f"| {' | '.join([row['policy'], row['opponent'], temperature, *counts, *last])} |")
    lengths = []
    words = False
    for value, policies in completions.items():
        for name, rows in policies.items():
            words |= not all(row.get("completion_ids") for row in rows.values())
            lengths.append(f"{name}{_at(value)} {np.mean([_length(row) for row in rows.values()]):.1f}")
    judge = options.judge_model or options.reward_model or options.judge_function
    usage = ""
    if "requests" in table:
        totals = {name: int(table[name].sum()) for name in ("requests", "prompt_tokens", "completion_tokens")}
        usage = f"\n\nThe judge has read {totals['prompt_tokens']:,} and written {totals['completion_tokens']:,} tokens in "
        usage += f"{totals['requests']:,} requests."
    return REPORT.format(
        settings=f"Judge: {judge}. Data set: {options.dataset_name or 'of the files'}, seed {options.seed}.",
        date=now(),
        versions=", ".join(f"{name} {number}" for name, number in versions(("sb3-ano", "transformers", "openai")).items()),
        table="\n".join(lines),
        unit="words" if words else "tokens",
        lengths=", ".join(lengths),
        usage=usage,
    )


def _at(temperature: float) -> str:
    return "" if pd.isna(temperature) else f" at T = {temperature:g}"
