"""The field's benchmarks: tasks as pure functions of a generator, and the protocols they are used with, by name."""

from fastweights.tasks import mqar, state
from fastweights.tasks.base import Batch, ImageTask, PairTask, Score, SequenceTask, Task, TokenTask
from fastweights.tasks.mqar import MQAR
from fastweights.tasks.protocol import Backbone, Constant, Cosine, Protocol, Segment, Training
from fastweights.tasks.state import Cyclic, Group, ModularArithmetic, Permutations, WordProblem

TASKS: dict[str, Protocol] = {**mqar.PROTOCOLS, **state.PROTOCOLS}

__all__ = [
    "MQAR",
    "TASKS",
    "Backbone",
    "Batch",
    "Constant",
    "Cosine",
    "Cyclic",
    "Group",
    "ImageTask",
    "ModularArithmetic",
    "PairTask",
    "Permutations",
    "Protocol",
    "Score",
    "Segment",
    "SequenceTask",
    "Task",
    "TokenTask",
    "Training",
    "WordProblem",
]
