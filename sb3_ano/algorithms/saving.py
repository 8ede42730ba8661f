"""The former name of :mod:`sb3_ano.algorithms.loading`."""

from sb3_ano.algorithms.loading import SavedModel as SavedModel
from sb3_ano.algorithms.loading import read_saved_model as read_saved_model
