"""The field's benchmarks: tasks as pure functions of a generator, and the protocols they are used with, by name."""

from fastweights.tasks import lra, mad, mqar, needle, regbench, state
from fastweights.tasks.base import Batch, ImageTask, Score, SequenceTask, Task, TokenTask
from fastweights.tasks.images import Crop, ImageFolder, Images
from fastweights.tasks.listops import ListOps
from fastweights.tasks.lra import FILES
from fastweights.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from fastweights.tasks.mqar import MQAR
from fastweights.tasks.needle import Needle, haystack
from fastweights.tasks.pathfinder import Pathfinder
from fastweights.tasks.protocol import Backbone, Constant, Cosine, Protocol, Segment, Training
from fastweights.tasks.questions import Answering, Question
from fastweights.tasks.regbench import DFA, RegBench
from fastweights.tasks.state import Cyclic, Group, ModularArithmetic, Permutations, WordProblem
from fastweights.tasks.stored import Rows, StoredPairs, StoredSequences

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
    "MQAR",
    "TASKS",
    "Answering",
    "Backbone",
    "Batch",
    "Compression",
    "Constant",
    "Cosine",
    "Crop",
    "Cyclic",
    "FuzzyRecall",
    "Group",
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
    "Training",
    "WordProblem",
    "haystack",
]
