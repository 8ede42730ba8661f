"""Resumption from checkpoints: complete ones, all of their parameters, and the completions in use."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

# Settings that decide whether completions fit the batches and the objective of a training.
_DECISIVE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "shaping",
    "kl_in",
    "beta",
)


def last_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, or None.

    The trainer's state is written last, so a checkpoint without a readable state was interrupted.

    :param directory: output directory of a training
    """
    complete: dict[int, Path] = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            state = json.loads((path / TRAINER_STATE_NAME).read_text())
            complete[int(state["global_step"])] = path

    if not complete:
        return None
    return complete[max(complete)]


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Load the parameters of a model that ``save_pretrained`` wrote.

    It writes some parameters under names of earlier versions, such as ``embed_out`` for the output layer of GPT-NeoX (Pythia),
    which only ``from_pretrained`` knows. The trainer of transformers 5.23 warns, and resumes with the output layer of the
    untrained model.

    :param model: model of transformers
    :param directory: directory of the checkpoint
    :raises ValueError: if the file lacks parameters, which would stay random
    """
    # All others convert to float32 without loss.
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32

    loaded, report = type(model).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(f"{directory} is damaged: it lacks {min(report['missing_keys'])}")
    model.load_state_dict(loaded.state_dict())


class EpochSampler(Sampler[int]):
    """Draw prompts in TRL's order, also in a training that resumes in a later epoch.

    TRL draws the order of an epoch after those of the epochs before it, but a new process starts with the first one.

    :param sampler: TRL's sampler
    :param epoch: function that returns the number of the epoch that starts, from 0
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]) -> None:
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            # Draw what the epochs before this one drew.
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)

        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def save_rollout(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Save what TRL's checkpoints lack: the completions in use, and how often they have been used.

    Without them, a training that resumes in the middle of ``num_iterations`` would generate completions with a newer policy,
    and no longer change them at the same steps as the prompts.

    :param trainer: trainer
    :param checkpoint: directory of the checkpoint, which is made
    """
    # Completions that have had their last use are not needed.
    passes = trainer.args.steps_per_generation * trainer.num_iterations
    in_use = trainer._step % passes != 0
    content = {
        "step": trainer._step,
        "inputs": trainer._buffered_inputs if in_use else None,
        "settings": _settings(trainer),
    }

    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(content, _path(trainer, checkpoint))


def load_rollout(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Restore what :func:`save_rollout` saved; checkpoints of TRL's own trainer have nothing to restore.

    :param trainer: trainer
    :param checkpoint: directory of the checkpoint
    :raises ValueError: if the file is damaged
    """
    path = _path(trainer, checkpoint)
    if not path.is_file():
        return

    try:
        # With several processes, a CPU is called cpu:0, which torch.load does not know.
        content = torch.load(path, map_location=trainer.accelerator.device.type, weights_only=True)
    except Exception as error:
        # torch's own messages have many lines.
        raise ValueError(f"{path} is damaged, or holds more than tensors; remove it to resume without it") from error

    # Parts of a batch fit no other batch, and advantages no other objective. Every process decides alike: those without a file
    # have been added since, so the others find another number of processes.
    stored = content.get("settings", {})
    changed = []
    for name, value in _settings(trainer).items():
        if stored.get(name) != value:
            changed.append(f"{name}={stored.get(name)}")
    if changed:
        then = ", ".join(changed)
        warnings.warn(f"{checkpoint} was written with {then}; completions are generated again", stacklevel=2)
        return

    trainer._step = content["step"]
    trainer._buffered_inputs = content["inputs"]


def _path(trainer: GRPOTrainer, checkpoint: Path) -> Path:
    # Each process has completions of its own.
    return checkpoint / f"rollout_{trainer.accelerator.process_index}.pt"


def _settings(trainer: GRPOTrainer) -> dict[str, object]:
    settings: dict[str, object] = {"num_processes": trainer.accelerator.num_processes}
    for name in _DECISIVE:
        settings[name] = getattr(trainer.args, name)
    return settings
