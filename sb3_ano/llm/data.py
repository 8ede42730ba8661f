"""Data sets, tokenizers and reward functions by name, and the checks of what they contain."""

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
from transformers import AutoTokenizer

#: Names of the library's readers, by the ending of a file.
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_NEEDED = (*_BY_NAME, Parameter.POSITIONAL_ONLY)


def check_paths(names: Mapping[str, str | None]) -> None:
    """Check that files and directories exist, before anything asks the Hub.

    :param names: Hub ids or paths of models and data sets by argument; a path has the ending of a data file, begins with ``.``
        or ``/``, has more than two parts, or is in a directory that exists
    :raises ValueError: if a path does not exist
    """
    for argument, name in names.items():
        path = Path(name or ".")
        parts = len(path.parts)
        is_path = path.suffix in FORMATS or str(name)[:1] in "./" or parts > 2 or (parts == 2 and path.parent.is_dir())
        if is_path and not path.exists():
            raise ValueError(f"{argument}={name!r} does not exist")


def load_split(name: str, config: str | None, split: str, columns: Sequence[str] = ("prompt",)) -> Any:
    """Load one split of a data set, with a prompt in each row.

    :param name: Hub id, JSON, CSV or Parquet file, directory of such files, or directory that ``save_to_disk`` wrote
    :param config: name of the configuration of a data set on the Hub, or None
    :param split: name of the split; a data set without splits is ``"train"``
    :param columns: columns that must not lack a value
    :return: a ``datasets.Dataset``
    :raises ValueError: if there is no such file or split, or a value is missing
    """
    path = Path(name)
    try:
        if path.suffix in FORMATS:
            texts = {"keep_default_na": False} if path.suffix == ".csv" else {}  # "None" is a text, too
            loaded = datasets.load_dataset(FORMATS[path.suffix], data_files=name, **texts)
        elif path.is_file():
            raise ValueError(f"data set {name!r} cannot be read; allowed file names end in {', '.join(FORMATS)}")
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config)
    except (datasets.exceptions.DatasetGenerationError, StopIteration) as error:  # which do not say what is wrong
        raise ValueError(f"data set {name!r} cannot be read: {error.__cause__ or 'it is empty'}") from error
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded
    if split not in splits:
        raise ValueError(f"data set {name!r} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    check_columns(splits[split], f"data set {name!r}, split {split!r},", columns)
    return splits[split]


def check_columns(dataset: Any, name: str, columns: Sequence[str] = ("prompt",)) -> None:
    """Check that a data set has rows and columns, and that no prompt is empty; rows of streams are not read.

    :param dataset: data set of the ``datasets`` library
    :param name: name of the data set in messages
    :param columns: names of the columns
    :raises ValueError: if there are no rows, a column or a value is missing, or a prompt is empty
    """
    known = dataset.column_names
    if absent := [column for column in columns if known is not None and column not in known]:
        raise ValueError(f"{name} has no column {absent[0]!r}; it has {', '.join(known) or 'none'}")
    if isinstance(dataset, datasets.IterableDataset):
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    for column in columns:
        for row, value in enumerate(dataset[column]):
            text = value.strip() if isinstance(value, str) else isinstance(value, list) and value
            if value is None or (column == "prompt" and not text):
                raise ValueError(f"{name} has the {column} {value!r} in row {row}; every {column} needs text")


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


def tokenize_prompts(
    prompts: list[Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] = MappingProxyType({})
) -> list[list[int]]:
    """Return the tokens of prompts, as TRL gives them to the policy.

    :param prompts: texts, or conversations for the chat template
    :param tokenizer: tokenizer of the policy
    :param chat_template_kwargs: arguments of the chat template
    """
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return tokenizer.apply_chat_template(prompts, **options, **chat_template_kwargs)["input_ids"]


def check_arguments(function: Callable[..., Any], name: str, given: Iterable[str], columns: str = "") -> None:
    """Check that a reward function takes the arguments that it will get, before anything is generated.

    :param function: reward function
    :param name: name of the function in messages
    :param given: names of the arguments
    :param columns: where further arguments come from, for the message
    :raises ValueError: if it does not take one of them, or needs another one
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, which does not say
        return
    given = set(given)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    required = {
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in _NEEDED
    }
    if lacking := sorted(required - given):
        raise ValueError(f"reward function {name!r} needs {lacking[0]!r}; it gets {', '.join(sorted(given))}{columns}")
    if not takes_all and (unknown := sorted(given - by_name)):
        raise ValueError(f"reward function {name!r} does not take {unknown[0]!r}; add **kwargs to its arguments")


def load_reward_function(name: str) -> Callable[..., list[float]]:
    """Import a reward function.

    :param name: ``module:function``, a dotted path, or the name of a function of ``trl.rewards``
    :raises ValueError: if it cannot be imported
    """
    try:
        return pkgutil.resolve_name(name if "." in name or ":" in name else f"trl.rewards:{name}")
    except Exception as error:  # importing runs the module, which may raise anything
        raise ValueError(f"reward function {name!r} cannot be imported ({type(error).__name__}: {error})") from error
