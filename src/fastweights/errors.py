"""Errors of a training run that its user can fix."""


class TrainingError(ValueError):
    """A training run cannot continue; the message says what to do."""


class DataError(TrainingError):
    """The text cannot be trained on: it is missing, empty, not UTF-8, or too short."""


class CheckpointError(TrainingError):
    """A checkpoint or run folder is damaged, or belongs to something else."""


class NoSpaceError(TrainingError):
    """A disk, a quota or a limit of files is full; what was written before is whole."""


class OtherProcessError(TrainingError):
    """Another process of the run has failed, and says why itself."""


class LostProcessError(TrainingError):
    """Another process of the run has ended early, does not answer, or never came."""


class NonFiniteError(TrainingError):
    """A loss, gradient or parameter became infinite or NaN, or the loss exploded."""


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop while it prepared its text, and did; it is not an error."""


def reason_of(error: BaseException) -> str:
    """What an error says, in one line; one of a configuration's field says it in the error behind.

    An error that is no ValueError has its type in front.
    """
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    said = " ".join(str(error).split())
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
