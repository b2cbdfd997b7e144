"""The field's benchmarks: tasks as pure functions of a generator, and the protocols they are used with, by name."""

from fastweights.tasks import mad, mqar, state
from fastweights.tasks.base import Batch, ImageTask, PairTask, Score, SequenceTask, Task, TokenTask
from fastweights.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from fastweights.tasks.mqar import MQAR
from fastweights.tasks.protocol import Backbone, Constant, Cosine, Protocol, Segment, Training
from fastweights.tasks.state import Cyclic, Group, ModularArithmetic, Permutations, WordProblem

TASKS: dict[str, Protocol] = {**mqar.PROTOCOLS, **state.PROTOCOLS, **mad.PROTOCOLS}

__all__ = [
    "MQAR",
    "TASKS",
    "Backbone",
    "Batch",
    "Compression",
    "Constant",
    "Cosine",
    "Cyclic",
    "FuzzyRecall",
    "Group",
    "ImageTask",
    "InContextRecall",
    "Memorization",
    "ModularArithmetic",
    "PairTask",
    "Permutations",
    "Protocol",
    "Score",
    "Segment",
    "SelectiveCopying",
    "SequenceTask",
    "Task",
    "TokenTask",
    "Training",
    "WordProblem",
]
