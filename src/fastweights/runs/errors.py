"""Errors of a training run that its user can fix."""


class TrainingError(ValueError):
    """A training run cannot continue; the message says what to do."""


class DataError(TrainingError):
    """The text cannot be trained on: it is missing, empty, not UTF-8, or too short."""


class CheckpointError(TrainingError):
    """A checkpoint or run folder is damaged, or belongs to something else."""


class NonFiniteError(TrainingError):
    """A loss, gradient or parameter became infinite or NaN, or the loss exploded."""


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop while it prepared its text, and did; it is not an error."""
