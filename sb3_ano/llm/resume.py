"""Resumption from checkpoints: complete ones, all of their parameters, and the completions in use."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler


def last_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, or None.

    The trainer's state is written last, so a checkpoint without a readable state was interrupted.

    :param directory: output directory of a training
    """
    complete: dict[int, Path] = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            complete[int(json.loads((path / TRAINER_STATE_NAME).read_text())["global_step"])] = path
    return complete[max(complete)] if complete else None


def load_weights(model: Any, directory: Path) -> None:
    """Load the parameters of a model that ``save_pretrained`` wrote.

    It writes some parameters under names of earlier versions, such as ``embed_out`` for the output layer of GPT-NeoX (Pythia),
    which only ``from_pretrained`` knows. The trainer of transformers 5.23 warns, and resumes with the output layer of the
    untrained model.

    :param model: model of transformers
    :param directory: directory of the checkpoint
    :raises ValueError: if the file lacks parameters, which would stay random
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # to which all others convert without loss
    loaded, report = type(model).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if missing := report["missing_keys"]:
        raise ValueError(f"{directory} is damaged: it lacks {min(missing)}")
    model.load_state_dict(loaded.state_dict())


class EpochSampler(RepeatSampler):
    """Draw prompts in TRL's order, also in a training that resumes in a later epoch.

    TRL draws the order of an epoch after those of the epochs before it, but a new process starts with the first one.

    :param sampler: TRL's sampler
    :param epoch: function that returns the number of the epoch that starts, from 0
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]) -> None:
        self.__dict__.update(sampler.__dict__)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self._epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def save_rollout(trainer: Any, checkpoint: Path) -> None:
    """Save what TRL's checkpoints lack: the completions in use, and how often they have been used.

    Without them, a training that resumes in the middle of ``num_iterations`` would generate completions with a newer policy,
    and no longer change them at the same steps as the prompts.

    :param trainer: a ``GRPOTrainer``
    :param checkpoint: directory of the checkpoint, which is made
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    in_use = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
    inputs = trainer._buffered_inputs if in_use else None
    content = {"step": trainer._step, "inputs": inputs, "settings": _settings(trainer)}
    torch.save(content, checkpoint / f"rollout_{trainer.accelerator.process_index}.pt")


def load_rollout(trainer: Any, checkpoint: Path) -> None:
    """Restore what :func:`save_rollout` saved; checkpoints of TRL's own trainer have nothing to restore.

    :param trainer: a ``GRPOTrainer``
    :param checkpoint: directory of the checkpoint
    :raises ValueError: if the file is damaged
    """
    path = checkpoint / f"rollout_{trainer.accelerator.process_index}.pt"
    if not path.is_file():
        return
    try:
        # With several processes, a CPU is called cpu:0, which torch.load does not know.
        content = torch.load(path, map_location=trainer.accelerator.device.type, weights_only=True)
    except Exception as error:  # torch's messages have many lines
        raise ValueError(f"{path} is damaged, or holds more than tensors; remove it to resume without it") from error
    stored = content.get("settings", {})
    # Parts of a batch fit no other batch, and advantages no other objective. Every process decides alike: those without a file
    # have been added since, so the others find another number of processes.
    if changed := [name for name, value in _settings(trainer).items() if stored.get(name) != value]:
        then = ", ".join(f"{name}={stored.get(name)}" for name in changed)
        warnings.warn(f"{checkpoint} was written with {then}; completions are generated again", stacklevel=2)
        return
    trainer._step, trainer._buffered_inputs = content["step"], content["inputs"]


def _settings(trainer: Any) -> dict[str, Any]:
    args = trainer.args
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    names = (*batches, "shaping", "kl_in", "beta")
    return {"num_processes": trainer.accelerator.num_processes, **{name: getattr(args, name) for name in names}}
