"""Benchmarks from the literature: tasks as pure functions of a generator, and protocols by name."""

from fastweights.lab.tasks import lra, mad, mqar, needle, regbench, state
from fastweights.lab.tasks.augmentation import Crop, DeiTAugmentation
from fastweights.lab.tasks.base import Batch, ImageTask, Score, SequenceTask, Task, TokenTask
from fastweights.lab.tasks.images import ImageFolder, Images
from fastweights.lab.tasks.listops import ListOps
from fastweights.lab.tasks.lra import FILES
from fastweights.lab.tasks.mad import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    SelectiveCopying,
)
from fastweights.lab.tasks.mqar import MQAR
from fastweights.lab.tasks.needle import HAY, HiddenNumber, Needle
from fastweights.lab.tasks.pathfinder import Pathfinder
from fastweights.lab.tasks.protocol import Backbone, Protocol, Segment, TrainingSettings
from fastweights.lab.tasks.questions import Answering, Question
from fastweights.lab.tasks.regbench import DFA, RegBench
from fastweights.lab.tasks.state import Cyclic, Group, ModularArithmetic, Permutations, WordProblem
from fastweights.lab.tasks.stored import Rows, StoredPairs, StoredSequences
from fastweights.training.loop.schedules import Constant, CosineAnnealing

TASKS: dict[str, Protocol] = {
    **mqar.PROTOCOLS,
    **state.PROTOCOLS,
    **mad.PROTOCOLS,
    **regbench.PROTOCOLS,
    **lra.PROTOCOLS,
    **needle.PROTOCOLS,
}

__all__ = [
    "DFA",
    "FILES",
    "HAY",
    "MQAR",
    "TASKS",
    "Answering",
    "Backbone",
    "Batch",
    "Compression",
    "Constant",
    "CosineAnnealing",
    "Crop",
    "Cyclic",
    "DeiTAugmentation",
    "FuzzyRecall",
    "Group",
    "HiddenNumber",
    "ImageFolder",
    "ImageTask",
    "Images",
    "InContextRecall",
    "ListOps",
    "Memorization",
    "ModularArithmetic",
    "Needle",
    "Pathfinder",
    "Permutations",
    "Protocol",
    "Question",
    "RegBench",
    "Rows",
    "Score",
    "Segment",
    "SelectiveCopying",
    "SequenceTask",
    "StoredPairs",
    "StoredSequences",
    "Task",
    "TokenTask",
    "TrainingSettings",
    "WordProblem",
]
