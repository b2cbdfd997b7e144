"""The field's benchmarks: tasks as pure functions of a generator, and the protocols they are used with, by name."""

from fastweights.tasks import mad, mqar, regbench, state
from fastweights.tasks.base import Batch, ImageTask, PairTask, Score, SequenceTask, Task, TokenTask
from fastweights.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from fastweights.tasks.mqar import MQAR
from fastweights.tasks.protocol import Backbone, Constant, Cosine, Protocol, Segment, Training
from fastweights.tasks.regbench import DFA, RegBench
from fastweights.tasks.state import Cyclic, Group, ModularArithmetic, Permutations, WordProblem

TASKS: dict[str, Protocol] = {**mqar.PROTOCOLS, **state.PROTOCOLS, **mad.PROTOCOLS, **regbench.PROTOCOLS}

__all__ = [
    "DFA",
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
    "RegBench",
    "Score",
    "Segment",
    "SelectiveCopying",
    "SequenceTask",
    "Task",
    "TokenTask",
    "Training",
    "WordProblem",
]
