"""Protocols for a CPU: the part of a benchmark that all models can learn in seconds.

New examples in every batch, a constant rate, initial weights of 0.1 and no dropout, since small
budgets do not get off the first plateau otherwise. MQAR models have one layer that mixes neighbours
(RWKV's token shift) and one of the mixer in question: all find the next token's neighbour equally
easily, and what differs is how much is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastweights.lab.reproduce.accuracy import ProtocolOnFile, TrainingBudget
from fastweights.lab.tasks import (
    MQAR,
    TASKS,
    Backbone,
    Constant,
    InContextRecall,
    ListOps,
    Protocol,
    Segment,
    Task,
    TrainingSettings,
)
from fastweights.lab.tasks.mqar import SMALL

LOCAL = {"name": "rwkv4_channel"}
TUNED = TrainingBudget(rates=(1e-3, 3e-3, 1e-2), tuning=(100, 101), every=50)
"""Three rates, of which two seeds of their own choose one for every model."""
EIGHT = tuple(range(5, 13))
"""Seeds for differences that five do not show, none of which an earlier test has looked at."""
TUNED_EIGHT = replace(TUNED, seeds=EIGHT)


def epochs(count: int, *decays: float) -> TrainingBudget:
    """Return the budget of so many epochs with one learning rate: what fits into ten minutes."""
    return TrainingBudget(rates=(1e-3,), decays=decays, training={"epochs": count})


def small(
    train: Task, test: Task, steps: int, width: int, rate: float = 1e-2, **fields: Any
) -> Protocol:
    """Return a protocol of `steps` updates of 64 sequences, tested on 500."""
    return Protocol(
        train=(Segment(train, None),),
        test=(Segment(test, 500),),
        training=TrainingSettings(
            (rate,), (0.1,), 64, steps=steps, schedule=Constant(), stop=0.99, best=True
        ),
        backbone=Backbone({**SMALL, **fields}, (width,)),
        source="this library",
    )


def mqar(length: int, pairs: int, width: int, steps: int, vocabulary: int = 64) -> Protocol:
    """Return a protocol of MQAR with so many tokens."""
    task = MQAR(vocabulary=vocabulary, length=length, pairs=pairs)
    return small(task, task, steps, width)


def recall(task: InContextRecall) -> Protocol:
    """Return a protocol of MAD's recall, which is tested where the key was seen before."""
    return small(task, replace(task, known=True), 900, 32)


def behind_local_mixer(*mixers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with these mixers behind the layer that mixes neighbours."""
    return {"mixers": [LOCAL, *mixers]}


def mad(name: str, steps: int, **sizes: int) -> Protocol:
    """Return a protocol of MAD's task of this name with other `sizes`, on MesaNet's blocks."""
    found = TASKS[f"mad-mesanet-{name}"]
    tasks: tuple[Any, Any] = found.train[0].task, found.test[0].task
    train, test = (replace(task, **sizes) for task in tasks)
    return small(train, test, steps, 32, 3e-3, norm="rms", mlp="gated", tie_word_embeddings=False)


SMALL_MAD = {
    "compression": mad("compression", 1000, length=8),
    "fuzzy-recall": mad("fuzzy-recall", 1500, length=32, motif=2, vocabulary=10),
    "noisy-recall": mad("noisy-recall", 1000, length=32),
}
"""The three of MAD's tasks that small models do not all solve."""


SHORT_LISTOPS = ListOps(shortest=15, longest=40, depth=5, arguments=3)
"""Trees of four levels of operators with few arguments: one operator on all digits says little."""


def long_range(steps: int) -> dict[str, Protocol]:
    """Return protocols of ListOps with 15 to 40 tokens."""
    fields = {
        "norm": "layer",
        "mlp": "gated",
        "tie_word_embeddings": False,
        "initializer_range": None,
    }
    return {"ListOps": small(SHORT_LISTOPS, SHORT_LISTOPS, steps, 32, 3e-3, **fields)}


DIGITS = ProtocolOnFile("mnist", "mnist")
DIGITS_TUNED = replace(TUNED, training={"steps": 1200, "batch": 64}, every=1200)
"""Long enough that all models learn the digits."""
IN_16_PATCHES = {"hidden_size": 32, "patch_size": 7}
"""Fields of a model of MNIST's digits in a few large patches."""
IN_49_PATCHES = {"hidden_size": 32, "patch_size": 4}
"""Fields of one in more and smaller patches, so that more of them have to be remembered."""
