"""Errors of a training run that its user can fix."""


class TrainingError(ValueError):
    """A training run cannot continue; the message says what to do."""


class DataError(TrainingError):
    """The text cannot be trained on: it is missing, empty, not UTF-8, or too short."""


class CheckpointError(TrainingError):
    """A checkpoint or run folder is damaged, or belongs to something else."""


class OtherProcessError(TrainingError):
    """Another process of the run has failed, and says why itself."""


class NonFiniteError(TrainingError):
    """A loss, gradient or parameter became infinite or NaN, or the loss exploded."""
