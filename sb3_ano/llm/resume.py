"""Going on from a checkpoint: which one is complete, all of its parameters, and the completions that were still in use."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sb3_ano.extras import missing_extra

try:
    from safetensors import safe_open
    from transformers import PreTrainedModel
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl.trainer.utils import RepeatSampler
except ImportError as error:
    raise missing_extra("llm", error.name or "transformers") from error


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder`` that was written to its end, or None.

    The trainer's state is written last, so that a checkpoint without it, or with half of it, was interrupted.
    """
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if number and _is_complete(path):
            found.append((int(number[1]), path))
    return max(found)[1] if found else None


def _is_complete(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and "global_step" in state


class RestoresRenamedParameters:
    """For a trainer of transformers: restore parameters that checkpoints hold under older names.

    ``save_pretrained`` writes some parameters under the names of earlier versions, such as ``embed_out`` for the output layer
    of GPT-NeoX, and so of Pythia. The trainer of transformers 5.23 looks for them under their new names, warns, and goes on
    with the output layer of the untrained model.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target = self.model if model is None else model  # type: ignore[attr-defined]
        if isinstance(target, PreTrainedModel) and _holds_other_names(Path(resume_from_checkpoint), target):
            restored = type(target).from_pretrained(resume_from_checkpoint, dtype=target.dtype)
            target.load_state_dict(restored.state_dict())
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]


def _holds_other_names(checkpoint: Path, model: PreTrainedModel) -> bool:
    stored: set[str] = set()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    return not stored <= model.state_dict().keys()


class EpochSampler(RepeatSampler):
    """TRL's order of the prompts, also in a training that goes on in a later epoch.

    TRL's own draws the order of an epoch after those of the epochs before, and begins with the first one in each process.

    :param sampler: TRL's
    :param epoch: the number of the epoch that begins, from 0
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]) -> None:
        super().__init__(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self._epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def _rollout_file(checkpoint: Path, process: int) -> Path:
    return checkpoint / f"rollout_{process}.pt"


def save_rollout(trainer: Any, checkpoint: Path) -> None:
    """Keep what TRL's checkpoints leave out: how far the completions in use have been used, and these completions.

    Without them, a training that goes on in the middle of ``num_iterations`` would generate anew, with a newer policy, and
    keep another rhythm than the prompts.

    :param trainer: a ``GRPOTrainer``
    :param checkpoint: folder of the checkpoint, which is made
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    in_use = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
    content = {"step": trainer._step, "inputs": trainer._buffered_inputs if in_use else None}
    torch.save(content, _rollout_file(checkpoint, trainer.accelerator.process_index))


def load_rollout(trainer: Any, checkpoint: Path) -> None:
    """Take up what :func:`save_rollout` kept; checkpoints of TRL's own trainer have none of it, and nothing changes."""
    path = _rollout_file(checkpoint, trainer.accelerator.process_index)
    if path.is_file():
        try:
            content = torch.load(path, map_location=trainer.accelerator.device, weights_only=True)
        except Exception as error:  # torch's messages have many lines
            raise ValueError(f"{path} is damaged, or holds more than tensors; remove it to go on without it") from error
        trainer._step, trainer._buffered_inputs = content["step"], content["inputs"]
