r"""A summarization task without downloads: generated posts in TL;DR format, and a rule that scores summaries.

A post is a few sentences of a town's gossip. The verb decides whether a sentence is news (``anna sold boat .``) or not
(``ben likes rain .``). A summary is a list of sentences; a good one contains the news, each once, and ends::

    SUBREDDIT: r/harbour
    TITLE: anna ben
    POST: anna sold boat . ben likes rain . carl lost keys .
    TL;DR: anna sold boat . carl lost keys .

The summaries of the data omit, invent and repeat, so that a model that imitates them can improve.
"""

import random

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

PLACES = ("harbour", "market", "school", "station")
NAMES = ("anna", "ben", "carl", "dora", "emil", "fay")
NEWS = ("sold", "lost", "won", "broke")
GOSSIP = ("likes", "sees", "wants", "keeps")
THINGS = ("boat", "keys", "rain", "bread", "lamp", "song")
#: Maximum number of tokens of a summary, EOS included.
MAX_SUMMARY = 20
_EOS_ID = 0
_EOS, _PAD, _UNKNOWN = "<|endoftext|>", "<|padding|>", "<|unknown|>"

Sentence = tuple[str, ...]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token per word (with its space), mark and line break; decoding restores the text exactly."""
    words = [_EOS, _PAD, _UNKNOWN, "SUBREDDIT:", "TITLE:", "POST:", "TL;DR:", "\n", " ."]
    for place in PLACES:
        words.append(f" r/{place}")
    for word in (*NAMES, *NEWS, *GOSSIP, *THINGS):
        words.append(f" {word}")
    vocabulary = {word: index for index, word in enumerate(words)}

    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"\n| ?[^ \n]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_EOS,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 64, layers: int = 2) -> GPTNeoXForCausalLM:
    """Make a GPT-NeoX, which is Pythia's architecture, with random parameters."""
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=128,
        rotary_pct=1.0,  # a quarter of such small heads encodes positions badly
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return GPTNeoXForCausalLM(config)


def make_posts(count: int, seed: int) -> Dataset:
    """Make posts with summaries: columns ``prompt`` and ``completion``."""
    rng = random.Random(seed)
    posts = [_post(rng) for _ in range(count)]

    rows = []
    for post in posts:
        rows.append({"prompt": _prompt(post, rng), "completion": _summary(post, rng)})
    return Dataset.from_list(rows)


def make_comparisons(count: int, seed: int, mistakes: float = 0.1) -> Dataset:
    """Make pairs of summaries of a post, ranked by a judge: columns ``prompt``, ``chosen`` and ``rejected``.

    :param count: number of pairs
    :param seed: seed of posts, summaries and judge
    :param mistakes: probability that the judge prefers the summary with the lower :func:`gold_score`
    """
    rng = random.Random(seed)
    pairs: list[dict[str, str]] = []
    while len(pairs) < count:
        post = _post(rng)
        prompt = _prompt(post, rng)
        one = _summary(post, rng)
        other = _summary(post, rng)

        # Summaries of the same quality teach a judge nothing.
        difference = gold_score(prompt, one) - gold_score(prompt, other)
        if difference == 0.0:
            continue
        is_mistaken = rng.random() < mistakes
        if (difference > 0.0) == is_mistaken:
            one, other = other, one
        pairs.append({"prompt": prompt, "chosen": one, "rejected": other})
    return Dataset.from_list(pairs)


def gold_score(prompt: str, completion: str, ended: bool = True) -> float:
    """Score a summary: 1 for exactly the news, 0 for an empty one.

    Each piece of news counts 1. Subtracted are 0.5 for each sentence that is repeated or is no news, 1 for each that is not
    in the post or is no sentence, and 1 for a summary without end. The sum is divided by the number of pieces of news.

    :param prompt: prompt from :func:`make_posts`
    :param completion: summary
    :param ended: whether the summary ended with EOS
    """
    text = prompt.partition("POST:")[2].partition("\n")[0]
    post = _sentences(text)
    news = [sentence for sentence in post if sentence[1] in NEWS]

    score = 0.0 if ended else -1.0
    said: set[Sentence] = set()
    for sentence in _sentences(completion):
        if sentence not in post:
            score -= 1.0
        elif sentence in said or sentence not in news:
            score -= 0.5
        else:
            score += 1.0
        said.add(sentence)
    return score / len(news)


def gold(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """Score completions with :func:`gold_score`, as a reward function of TRL."""
    scores = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        scores.append(gold_score(prompt, completion, _EOS_ID in ids))
    return scores


def _post(rng: random.Random) -> list[Sentence]:
    count = rng.choice((3, 4))
    verbs = rng.sample(NEWS, rng.choice((1, 2)))
    verbs += rng.sample(GOSSIP, count - len(verbs))
    rng.shuffle(verbs)

    # Nobody and nothing occurs twice in a post.
    names = rng.sample(NAMES, count)
    things = rng.sample(THINGS, count)
    return list(zip(names, verbs, things, strict=True))


def _prompt(post: list[Sentence], rng: random.Random) -> str:
    title = " ".join(name for name, _, _ in post[:2])
    place = rng.choice(PLACES)
    return f"SUBREDDIT: r/{place}\nTITLE: {title}\nPOST:{_text(post)}\nTL;DR:"


def _summary(post: list[Sentence], rng: random.Random) -> str:
    said: list[Sentence] = []
    for name, verb, thing in post:
        # It omits some of the news, and tells some of the gossip.
        probability = 0.75 if verb in NEWS else 0.3
        if rng.random() >= probability:
            continue

        # It invents a thing, or repeats itself.
        if rng.random() < 0.1:
            thing = rng.choice(THINGS)
        said.append((name, verb, thing))
        if rng.random() < 0.1:
            said.append(said[-1])
    return _text(said or post[:1])


def _text(sentences: list[Sentence]) -> str:
    return "".join(f" {' '.join(sentence)} ." for sentence in sentences)


def _sentences(text: str) -> list[Sentence]:
    sentences = []
    for part in text.split(" ."):
        if part.strip():
            sentences.append(tuple(part.split()))
    return sentences
