"""The field's benchmarks: tasks as pure functions of a generator, and the protocols they are used with, by name."""

from fastweights.tasks import mqar
from fastweights.tasks.base import Batch, ImageTask, PairTask, Score, SequenceTask, Task, TokenTask
from fastweights.tasks.mqar import MQAR
from fastweights.tasks.protocol import Backbone, Constant, Cosine, Protocol, Segment, Training

TASKS: dict[str, Protocol] = {**mqar.PROTOCOLS}

__all__ = [
    "MQAR",
    "TASKS",
    "Backbone",
    "Batch",
    "Constant",
    "Cosine",
    "ImageTask",
    "PairTask",
    "Protocol",
    "Score",
    "Segment",
    "SequenceTask",
    "Task",
    "TokenTask",
    "Training",
]
