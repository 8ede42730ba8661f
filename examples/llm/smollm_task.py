"""A task for SmolLM2-135M without downloads: continue a short text about a place, cheerfully.

The *proxy* reward, which policies are trained on, adds up the valences of VADER's lexicon (Hutto and Gilbert, 2014): one more
happy word is one more reward, also if it is the same word again. The *gold* reward, which nothing is trained on, is the
polarity of another lexicon (TextBlob's), which is a mean over words, less penalties for texts that the frozen model finds much
less or much more likely than its own, and for repeated words. Its constants are those of docs/results/smollm/PLAN.md.
"""

import functools
import random
import re
from typing import Any

import torch
from datasets import Dataset
from textblob import TextBlob
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from sb3_ano.llm import model_path

#: Name of the model in sb3_ano.llm.
MODEL = "smollm2-135m"
#: New tokens of a completion.
TOKENS = 24
#: The strongest words of VADER's lexicon have about this valence, so that such a word counts 1.
STRONGEST = 4.0
#: Mean negative log-likelihoods per token, nats, between which 95 % of the frozen model's own texts are.
TYPICAL = (1.2, 2.8)
#: Share of repeated words that 5 % of the frozen model's own texts exceed, and what each unit above it costs.
REPEATED = 0.45
REPEATED_COST = 3.0
# Texts per forward pass, whose logits have 49,152 numbers per token
_BATCH = 16
#: Openings and places of training and evaluation have nothing in common.
OPENINGS = {
    "train": (
        "My day at the {} was",
        "When I walked into the {}, I",
        "People say that the {} is",
        "Last week at the {} we",
        "I wrote about the {} because",
        "On the way to the {} she",
    ),
    "test": (
        "What happened at the {} was",
        "The owner of the {} told me that",
        "If you visit the {}, you will",
        "Yesterday the {} looked",
        "A friend of mine thinks the {}",
    ),
}
PLACES = {
    "train": (
        "airport bakery bank barn beach bookshop bridge bus station castle cinema clinic coffee shop court farm ferry gallery "
        "garage harbor hotel island lake library market mine museum office park prison restaurant school theater zoo"
    ),
    "test": (
        "attic bazaar cabin cafe campus canal canyon cave chapel cliff club concert cottage desert diner dock factory fair "
        "festival forest fountain garden gym hall hospital hostel kitchen laboratory lighthouse mountain palace pier pool "
        "port pub river stadium studio temple tower"
    ),
}


def make_prompts(split: str) -> Dataset:
    """Make the prompts of ``"train"`` (192) or ``"test"`` (200), in a fixed random order."""
    places = PLACES[split].replace("bus station", "bus_station").replace("coffee shop", "coffee_shop").split()
    rows = []
    for place in places:
        for opening in OPENINGS[split]:
            rows.append({"prompt": opening.format(place.replace("_", " "))})
    random.Random(0).shuffle(rows)
    return Dataset.from_list(rows)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z']+", text.lower())


@functools.cache
def _lexicon() -> dict[str, float]:
    return SentimentIntensityAnalyzer().lexicon


@functools.cache
def frozen() -> tuple[Any, Any]:
    """Return the model that all policies start from, and its tokenizer."""
    path = model_path(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokenizer


def proxy_score(completion: str) -> float:
    """Return the sum of the valences of the words that VADER's lexicon has; the strongest happy word counts about 1."""
    lexicon = _lexicon()
    total = 0.0
    for word in words(completion):
        total += lexicon.get(word, 0.0)
    return total / STRONGEST


def proxy(completions: list[str], **_: object) -> list[float]:
    """Score completions with :func:`proxy_score`, as a reward function of TRL."""
    return [proxy_score(completion) for completion in completions]


@torch.inference_mode()
def negative_log_likelihoods(prompts: list[str], completions: list[str]) -> list[float]:
    """Return the frozen model's mean negative log-likelihood of each completion, nats per token; 0 if it is empty."""
    model, tokenizer = frozen()
    rows = []
    starts = []
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt_ids = tokenizer(prompt)["input_ids"]
        rows.append([*prompt_ids, *tokenizer(completion)["input_ids"]])
        starts.append(len(prompt_ids))

    means = []
    for first in range(0, len(rows), _BATCH):
        part = rows[first : first + _BATCH]
        batch = tokenizer.pad({"input_ids": part}, return_tensors="pt").to(model.device)
        logits = model(**batch).logits[:, :-1].float()
        targets = batch["input_ids"][:, 1:]
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")

        for row, start, loss in zip(part, starts[first:], losses, strict=False):
            # The loss of a token is at the position before it.
            own = loss[start - 1 : len(row) - 1]
            means.append(own.mean().item() if len(own) else 0.0)
    return means


def gold_score(completion: str, likelihood: float) -> float:
    """Return TextBlob's polarity, from -1 to 1, less penalties for texts unlike the frozen model's own.

    :param completion: text
    :param likelihood: its mean negative log-likelihood under the frozen model, nats per token
    """
    lowest, highest = TYPICAL
    distance = max(0.0, lowest - likelihood, likelihood - highest)

    said = words(completion)
    repeated = 1.0 - len(set(said)) / max(len(said), 1)
    repetition = REPEATED_COST * max(0.0, repeated - REPEATED)
    return TextBlob(completion).sentiment.polarity - distance - repetition


def gold(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Score completions with :func:`gold_score`, as a reward function of TRL; it never depends on the policy."""
    likelihoods = negative_log_likelihoods(prompts, completions)
    return [gold_score(*pair) for pair in zip(completions, likelihoods, strict=True)]
