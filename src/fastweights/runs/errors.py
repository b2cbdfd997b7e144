"""What can go wrong in training that its user can put right."""


class TrainingError(ValueError):
    """A training run cannot go on; the message says what to do."""


class DataError(TrainingError):
    """The text cannot be trained on: missing, empty, not UTF-8, too short."""


class CheckpointError(TrainingError):
    """A checkpoint or run folder is damaged, or is not one."""


class NonFiniteError(TrainingError):
    """Loss or gradient became infinite or NaN."""
