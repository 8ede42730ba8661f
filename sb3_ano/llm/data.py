"""Data sets, tokenizers and reward functions by name, and the checks of what they contain."""

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import datasets
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sb3_ano.extras import hint
from sb3_ano.llm.smollm import SMOLLM, model_path

#: A text, or a conversation: messages with ``role`` and ``content``.
Prompt = str | list[dict[str, str]]

#: Names of the library's readers, by the ending of a file.
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def check_paths(names: Mapping[str, str | None]) -> None:
    """Check that files and directories exist, before anything asks the Hub.

    :param names: Hub ids or paths of models and data sets by argument; a path has the ending of a data file, begins with ``.``
        or ``/``, has more than two parts, or is in a directory that exists
    :raises ValueError: if a path does not exist
    """
    for argument, name in names.items():
        if not name:
            continue

        # A Hub id has two parts at most, so that it can look like a path in a directory.
        path = Path(name)
        parts = len(path.parts)
        is_local = parts > 2 or (parts == 2 and path.parent.is_dir())
        is_path = is_local or path.suffix in FORMATS or name.startswith((".", "/"))
        if is_path and not path.exists():
            raise ValueError(f"{argument}={name!r} does not exist")


def load_split(
    name: str,
    config: str | None,
    split: str,
    columns: Sequence[str] = ("prompt",),
) -> Dataset:
    """Load one split of a data set, with a prompt in each row.

    :param name: Hub id, JSON, CSV or Parquet file, directory of such files, or directory that ``save_to_disk`` wrote
    :param config: name of the configuration of a data set on the Hub, or None
    :param split: name of the split; a data set without splits is ``"train"``
    :param columns: columns that must not lack a value
    :raises ValueError: if there is no such file or split, or a value is missing
    """
    path = Path(name)
    try:
        if path.suffix == ".csv":
            # Otherwise the text "None" would be a missing value.
            splits = datasets.load_dataset("csv", data_files=name, keep_default_na=False)
        elif path.suffix in FORMATS:
            splits = datasets.load_dataset(FORMATS[path.suffix], data_files=name)
        elif path.is_file():
            raise ValueError(f"data set {name!r} cannot be read; allowed file names end in {', '.join(FORMATS)}")
        # What save_to_disk writes
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name, config)
    except (datasets.exceptions.DatasetGenerationError, StopIteration) as error:
        # Their own messages do not say what is wrong.
        raise ValueError(f"data set {name!r} cannot be read: {error.__cause__ or 'it is empty'}") from error

    # A data set without splits
    if isinstance(splits, Dataset):
        splits = {"train": splits}
    if split not in splits:
        raise ValueError(f"data set {name!r} has no split {split!r}; it has {', '.join(map(repr, splits))}")

    check_columns(splits[split], f"data set {name!r}, split {split!r},", columns)
    return splits[split]


def check_columns(
    dataset: Dataset | IterableDataset,
    name: str,
    columns: Sequence[str] = ("prompt",),
) -> None:
    """Check that a data set has rows and columns, and that no prompt is empty; rows of streams are not read.

    :param dataset: data set of the ``datasets`` library
    :param name: name of the data set in messages
    :param columns: names of the columns
    :raises ValueError: if there are no rows, a column or a value is missing, or a prompt is empty
    """
    # A stream need not know its columns.
    known = dataset.column_names
    for column in columns:
        if known is not None and column not in known:
            raise ValueError(f"{name} has no column {column!r}; it has {', '.join(known) or 'none'}")

    # To read a stream may take hours.
    if isinstance(dataset, IterableDataset):
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")

    for column in columns:
        for row, value in enumerate(dataset[column]):
            # A completion may be empty, a prompt may not.
            is_text = isinstance(value, str) and value.strip() != ""
            is_conversation = isinstance(value, list) and len(value) > 0
            is_empty_prompt = column == "prompt" and not (is_text or is_conversation)
            if value is None or is_empty_prompt:
                raise ValueError(f"{name} has the {column} {value!r} in row {row}; every {column} needs text")


def load_tokenizer(
    name: str,
    revision: str = "main",
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left, with the EOS token if it has no padding token.

    :param name: Hub id or directory of a model, or ``"smollm2-135m"``
    :param revision: branch, tag or commit on the Hub
    :param trust_remote_code: whether code that comes with the tokenizer may run
    :raises ValueError: if there is none, or it cannot be downloaded
    """
    path = model_path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            padding_side="left",
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    except OSError as error:
        # Offline, the message does not say what is missing.
        raise ValueError(f"model {name!r} cannot be loaded{hint(name, [SMOLLM])}: {error}") from error

    # Any token will do, because the attention mask hides it.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
) -> list[list[int]]:
    """Return the tokens of prompts, as TRL gives them to the policy.

    :param prompts: texts, or conversations for the chat template
    :param tokenizer: tokenizer of the policy
    :param chat_template_kwargs: arguments of the chat template
    """
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]

    encoded = tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **chat_template_kwargs,
    )
    return encoded["input_ids"]


def check_arguments(
    function: Callable[..., object],
    name: str,
    given: Iterable[str],
    columns: str = "",
) -> None:
    """Check that a reward function takes the arguments that it will get, before anything is generated.

    :param function: reward function
    :param name: name of the function in messages
    :param given: names of the arguments
    :param columns: where further arguments come from, for the message
    :raises ValueError: if it does not take one of them, or needs another one
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # A function written in C need not say what it takes.
        return

    names = sorted(given)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        gets = f"it gets {', '.join(names)}{columns}"
        raise ValueError(f"reward function {name!r}: {error}; {gets}; **kwargs takes those that it does not need") from error


def load_reward_function(name: str) -> Callable[..., object]:
    """Import a reward function.

    :param name: ``module:function``, a dotted path, or the name of a function of ``trl.rewards``
    :raises ValueError: if it cannot be imported
    """
    is_path = "." in name or ":" in name
    try:
        return pkgutil.resolve_name(name if is_path else f"trl.rewards:{name}")
    except Exception as error:
        # Importing runs the module, which may raise anything.
        raise ValueError(f"reward function {name!r} cannot be imported ({type(error).__name__}: {error})") from error
