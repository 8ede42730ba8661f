"""Data, tokenizers and models by Hub id or folder, and one line for each thing that can be wrong with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import datasets
    from transformers import AutoConfig, AutoTokenizer
except ImportError as error:
    raise missing_extra("llm", error.name or "datasets") from error

#: Columns of the TL;DR format, for each kind of training.
COLUMNS = {"sft": ("prompt", "completion"), "reward": ("prompt", "chosen", "rejected"), "train": ("prompt",)}
_FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_split(name: str, split: str) -> Any:
    """One split of a dataset.

    :param name: Hub id; a folder that ``save_to_disk`` wrote, or that holds JSON, CSV or Parquet files; or such a file
    :param split: name of the split; a dataset without splits is ``"train"``
    :return: a ``datasets.Dataset``
    :raises ValueError: if there is no such dataset or split, or it cannot be had offline
    """
    try:
        found = _load(name)
    except Exception as error:  # the library raises many kinds, of files and of the network
        where = "cannot be read" if Path(name).exists() else "is no local file or folder, and cannot be downloaded"
        raise ValueError(f"dataset={name!r} {where} ({_first_line(error)})") from error
    if isinstance(found, datasets.Dataset):
        found = datasets.DatasetDict(train=found)
    if split not in found:
        raise ValueError(f"dataset={name!r} has no split {split!r}; it has {', '.join(map(repr, found))}")
    return found[split]


def _load(name: str) -> Any:
    path = Path(name)
    if path.is_file():
        if path.suffix not in _FILES:
            raise ValueError(f"files may end in {', '.join(_FILES)}")
        return datasets.load_dataset(_FILES[path.suffix], data_files=name)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name)


def check_columns(dataset: Any, needed: Sequence[str], name: str) -> None:
    """Insist on columns.

    :raises ValueError: naming those that are missing
    """
    columns = dataset.column_names
    missing = [column for column in needed if columns is not None and column not in columns]
    if missing:
        raise ValueError(
            f"{name} has no column {', '.join(map(repr, missing))}; needed are {', '.join(needed)}, "
            f"it has {', '.join(columns) or 'none'}"
        )


def check_not_empty(dataset: Any, columns: Sequence[str], name: str) -> None:
    """Insist that there are rows, and that none of ``columns`` is empty in any of them; streams are not read.

    :raises ValueError: naming the first empty row
    """
    if isinstance(dataset, datasets.IterableDataset):
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    for column in columns:
        for row, value in enumerate(dataset[column]):
            if not value or (isinstance(value, str) and not value.strip()):
                raise ValueError(f"{name} has an empty {column} in row {row}; every {column} needs text")


def check_prompts(dataset: Any, name: str) -> None:
    """Insist on prompts, none of them empty.

    :raises ValueError: if there are none, or one is empty
    """
    check_columns(dataset, COLUMNS["train"], name)
    check_not_empty(dataset, COLUMNS["train"], name)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, padded on the left, with its end as padding where it has none.

    :param name: Hub id or folder
    :raises ValueError: if there is none, or it has no end-of-sequence token
    """
    check_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # of files, of the network, of a class that is not known
        raise ValueError(f"model={name!r} has no tokenizer that can be loaded ({_first_line(error)})") from error
    check_tokenizer(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """Insist on an end-of-sequence token, without which no completion ends.

    :raises ValueError: if there is none
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor for images and text
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'!r} has no eos_token, without which no completion ends; "
            "set tokenizer.eos_token"
        )


def check_model(name: str, argument: str = "model") -> None:
    """Insist that a model is there, before anything else takes time.

    :param name: Hub id or folder
    :param argument: what it was given as
    :raises ValueError: if it is neither, or cannot be had offline
    """
    try:
        AutoConfig.from_pretrained(name)
    except Exception as error:  # of files, of the network, of an architecture that is not known
        where = "holds no model" if Path(name).exists() else "is no local folder, and cannot be downloaded"
        raise ValueError(f"{argument}={name!r} {where} ({_first_line(error)})") from error


def check_same_tokenizer(tokenizer: Any, other: Any, name: str) -> None:
    """Insist that a reward model reads text as the policy writes it.

    :param tokenizer: the policy's
    :param other: the reward model's
    :param name: what the reward model was given as
    :raises ValueError: if the vocabularies differ
    """
    if tokenizer.get_vocab() != other.get_vocab():
        raise ValueError(
            f"reward_model={name!r} has another tokenizer ({len(other)} tokens) than the policy ({len(tokenizer)} tokens); "
            "allowed are reward models that were trained from the same tokenizer"
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
