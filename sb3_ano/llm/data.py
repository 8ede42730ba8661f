"""Data sets, tokenizers and reward functions by name, and the checks of what they contain."""

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer

#: Names of the library's readers, by the ending of a file.
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_split(name: str, config: str | None, split: str) -> Any:
    """Load one split of a data set, with a prompt in each row.

    :param name: Hub id, JSON, CSV or Parquet file, directory of such files, or directory that ``save_to_disk`` wrote
    :param config: name of the configuration of a data set on the Hub, or None
    :param split: name of the split; a data set without splits is ``"train"``
    :return: a ``datasets.Dataset``
    :raises ValueError: if there is no such file or split, or a prompt is missing
    """
    path = Path(name)
    if path.suffix in FORMATS:
        loaded = datasets.load_dataset(FORMATS[path.suffix], data_files=name)
    elif path.is_file():
        raise ValueError(f"dataset_name={name!r} cannot be read; allowed file names end in {', '.join(FORMATS)}")
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(name)
    else:
        loaded = datasets.load_dataset(name, config)
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded
    if split not in splits:
        raise ValueError(f"dataset_name={name!r} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    check_prompts(splits[split], f"dataset_name={name!r}, split {split!r},")
    return splits[split]


def check_prompts(dataset: Any, name: str) -> None:
    """Check that a data set has prompts, and that none is empty; rows of streams are not read.

    :param dataset: data set of the ``datasets`` library
    :param name: name of the data set in messages
    :raises ValueError: if there are no rows, no column ``prompt``, or a prompt is empty
    """
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no column 'prompt'; it has {', '.join(columns) or 'none'}")
    if isinstance(dataset, datasets.IterableDataset):
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    for row, prompt in enumerate(dataset["prompt"]):
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise ValueError(f"{name} has an empty prompt in row {row}; every prompt needs text")


def load_tokenizer(name: str, **options: Any) -> Any:
    """Load a tokenizer that pads on the left, with the EOS token if it has no padding token.

    :param name: Hub id or directory of a model
    :param options: arguments of ``AutoTokenizer.from_pretrained``
    :raises ValueError: if there is none, or it cannot be downloaded
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    except OSError as error:  # offline, the message does not say what is missing
        raise ValueError(f"model {name!r} cannot be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_reward_function(name: str) -> Callable[..., list[float]]:
    """Import a reward function.

    :param name: ``module:function``, a dotted path, or the name of a function of ``trl.rewards``
    :raises ValueError: if it cannot be imported
    """
    try:
        return pkgutil.resolve_name(name if "." in name or ":" in name else f"trl.rewards:{name}")
    except Exception as error:  # importing runs the module, which may raise anything
        raise ValueError(
            f"reward_funcs={name!r} cannot be imported ({type(error).__name__}: {error}); allowed are module:function "
            "and names from trl.rewards"
        ) from error
