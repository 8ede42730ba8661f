"""Checkpoints from which training resumes as if it had not been interrupted."""

from sb3_ano.checkpoints.callback import TrainingCheckpoints
from sb3_ano.checkpoints.files import Checkpoint, newest_checkpoint, read_checkpoint

__all__ = ["Checkpoint", "TrainingCheckpoints", "newest_checkpoint", "read_checkpoint"]
