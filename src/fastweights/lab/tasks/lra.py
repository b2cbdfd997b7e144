"""The Long Range Arena (Tay et al., 2021) and images as sequences: generated tasks and tasks from
files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.lab.tasks import imagenet
from fastweights.lab.tasks.archives import aan, cifar10, grey, imdb, mnist
from fastweights.lab.tasks.images import Images
from fastweights.lab.tasks.listops import ListOps
from fastweights.lab.tasks.pathfinder import Pathfinder
from fastweights.lab.tasks.protocol import Backbone, Fields, Protocol, Segment, TrainingSettings
from fastweights.lab.tasks.stored import Rows, StoredPairs, StoredSequences
from fastweights.models import PRESETS
from fastweights.training.loop.schedules import CosineAnnealing

_A4 = "MetaLA, Table A4 (no code released)"
ARENA = ("ListOps", "Text", "Retrieval", "Image", "Pathfinder", "Path-X")
METALA_7: dict[str, tuple[float, ...]] = {
    "metala": (59.34, 89.27, 91.28, 91.88, 91.66, 96.57),
    "s4": (59.60, 86.82, 90.90, 88.65, 94.20, 96.35),
    "s5": (62.15, 89.31, 91.40, 88.00, 95.33, 98.56),
    "hgrn": (59.95, 88.14, 94.23, 88.69, 92.92, 97.50),
    "mamba": (38.02, 82.98, 72.14, 69.82, 69.26, 67.32),
    "softmax": (38.37, 61.95, 80.69, 40.57, 65.26),
}
"""Accuracies in per cent, by model and task of `ARENA` (MetaLA, Table 7); the Transformer has none
on Path-X."""
PATH_X = Pathfinder(
    side=128,
    distractors=7,
    dash=5.0,
    gap=2.5,
    width=1.5,
    apart=20.0,
    radius=3.0,
)
"""The arena's sizes of Path-X, but for the gap, of which a picture there has 2 or 3 pixels."""


def _printed(task: str) -> dict[str, float]:
    return {model: row[ARENA.index(task)] for model, row in METALA_7.items()}


def _metala(
    name: str, rate: float, batch: int, decay: float, warmup: int, steps: int, examples: int
) -> tuple[TrainingSettings, Backbone]:
    """The training of MetaLA's Table A4, and the shape of its model, with any mixer.

    Its updates are made in the epochs of so many examples that come nearest.
    """
    fields = PRESETS[f"metala-lra-{name}"].fields
    around = {
        key: value
        for key, value in fields.items()
        if key not in ("mixers", "vocab_size", "num_labels")
    }
    epochs = max(1, round(steps / math.ceil(examples / batch)))
    training = TrainingSettings(
        (rate,), (decay,), batch, epochs=epochs, schedule=CosineAnnealing(warmup), best=True
    )
    return training, Backbone(
        around, (fields["hidden_size"],), {"metala": {"mixers": fields["mixers"]}}
    )


def _listops() -> Protocol:
    training, backbone = _metala("listops", 5e-4, 128, 0.01, 5_000, 50_000, 96_000)
    return Protocol(
        train=(Segment(ListOps(), 96_000),),
        test=(Segment(ListOps(), 2_000),),
        training=training,
        backbone=backbone,
        source=f"Long Range Arena, google-research/long-range-arena @ cd31e5c; {_A4}",
        differs=(
            "from a seed, where the reference draws from an unseeded generator and orders by hash"
        ),
        figures=_printed("ListOps"),
    )


def _listops_dsf() -> Protocol:
    fields: Fields = {
        "num_hidden_layers": 10,
        "norm": "layer",
        "mlp": "plain",
        "hidden_act": "gelu",
        "mlp_bias": True,
        "intermediate_size": 512,
        "learnt_positions": 2048,
        "embedding_dropout": 0.1,
        "residual_dropout": 0.1,
    }
    models: dict[str, Fields] = {
        "softmax": {
            "mixers": [{"name": "softmax", "heads": 8, "rope": {"fraction": 0.0}}],
            "num_hidden_layers": 8,
        },
        "linear": {"mixers": [{"name": "linear", "heads": 8}]},
        "normalized": {"mixers": [{"name": "normalized", "heads": 8}]},
    }
    warmup = CosineAnnealing(warmup=0.1, final=5e-6, by_epoch=True)
    return replace(
        _listops(),
        training=TrainingSettings((5e-4,), (0.1,), 32, epochs=50, schedule=warmup, best=True),
        backbone=Backbone(fields, (128,), models),
        source="DSF, Table 3: jsie7/ssm-benchmark @ 3c4337f",
        differs=(
            "the reference puts a softmax on its softmax, pools over padding, has dropout on"
            " attention too, trains softmax attention with batches of 8 and reads the best epoch"
            " from the tests; its S6 is a whole Mamba block"
        ),
        figures={"softmax": 35.72, "linear": 16.12, "normalized": 38.24, "mamba": 38.02},
    )


def _small(full: Protocol, task: ListOps | Pathfinder, differs: str, **fields: Any) -> Protocol:
    return replace(
        full,
        train=(Segment(task, 20_000),),
        test=(Segment(task, 1_000),),
        training=TrainingSettings(
            (1e-3, 3e-3), (0.01,), 64, epochs=10, schedule=CosineAnnealing(0.1), best=True
        ),
        backbone=Backbone({"num_hidden_layers": 2, **fields}, (64,)),
        source="this library",
        differs=differs,
        figures={},
    )


def _pathfinder(name: str, task: Pathfinder, rate: float, warmup: int) -> Protocol:
    training, backbone = _metala(name, rate, 256, 0.0, warmup, 500_000, 160_000)
    return Protocol(
        train=(Segment(task, 160_000),),
        test=(Segment(task, 20_000),),
        training=training,
        backbone=backbone,
        source=f"Long Range Arena; pictures after drewlinsley/pathfinder @ 7b53886; {_A4}",
        differs=(
            "a generator of our own with the sizes and turns of the reference, so that figures are"
            " not comparable"
        ),
    )


PATHFINDER = _pathfinder("pathfinder", Pathfinder(), 2e-3, 50_000)
PROTOCOLS: dict[str, Protocol] = {
    "lra-listops": _listops(),
    "lra-listops-dsf": _listops_dsf(),
    "lra-listops-small": _small(
        _listops(), ListOps(shortest=50, longest=200), "trees of 50 to 200 tokens: minutes on a CPU"
    ),
    "lra-pathfinder": PATHFINDER,
    "lra-path-x": _pathfinder("path-x", PATH_X, 7.5e-4, 15_000),
    "lra-pathfinder-small": _small(
        PATHFINDER,
        Pathfinder(side=16, dashes=4, distractors=1, distractor_dashes=2, apart=4.0),
        "curves of 4 dashes on 16 pixels: minutes on a CPU",
        bidirectional=True,
    ),
}


# of files -----------------------------------------------------------------------------------------


def lra_text(archive: Path) -> Protocol:
    """Return the protocol of LRA's text task: the sentiment of film reviews by characters.

    Reads aclImdb_v1.tar.gz. The tests decide when to stop, as in all published code.
    """
    train, test, vocabulary = imdb(archive)
    training, backbone = _metala("text", 4e-3, 64, 0.0, 10_000, 50_000, len(train))
    return _protocol_of_files(
        StoredSequences(train, vocabulary),
        StoredSequences(test, vocabulary),
        None,
        (training, backbone),
        _A4,
        _printed("Text"),
    )


def lra_retrieval(folder: Path) -> Protocol:
    """Return the protocol of LRA's retrieval task: whether one paper cites another, by characters.

    Reads new_aan_pairs.*.tsv of lra_release.
    """
    train, validation, test, vocabulary = aan(folder)
    train, validation, test = (StoredPairs(rows, vocabulary) for rows in (train, validation, test))
    settings = _metala("retrieval", 8e-4, 128, 1e-4, 312, 50_000, len(train.rows))
    return _protocol_of_files(train, test, validation, settings, _A4, _printed("Retrieval"))


def lra_image(archive: Path) -> Protocol:
    """Return the protocol of LRA's image task: CIFAR-10 in grey, pixel by pixel.

    Reads cifar-10-binary.tar.gz, whose last 5,000 training images are for validation.
    """
    images, labels, tests, test_labels = cifar10(archive)
    rows = Rows(grey(images).reshape(len(images), -1), labels)
    test = StoredSequences(Rows(grey(tests).reshape(len(tests), -1), test_labels), 256, 10)
    train, validation = (StoredSequences(part, 256, 10) for part in _split(rows, 5_000))
    settings = _metala("image", 3e-3, 128, 0.0, 30_000, 50_000, len(train.rows))
    return _protocol_of_files(train, test, validation, settings, _A4, _printed("Image"))


def smnist(folder: Path) -> Protocol:
    """Return the protocol of sequential MNIST: the 784 pixels of a digit one after the other, as
    tokens.

    Reads MNIST's four IDX files.
    """
    return _mnist_sequence(folder, np.arange(784), "pixels in order")


def pmnist(folder: Path) -> Protocol:
    """Return the protocol of permuted MNIST: as `smnist`, with the pixels in one random order.

    The order is that of numpy's default_rng(0).
    """
    return _mnist_sequence(
        folder, np.random.default_rng(0).permutation(784), "pixels in one random order"
    )


def _mnist_sequence(folder: Path, order: np.ndarray, differs: str) -> Protocol:
    images, labels, tests, test_labels = mnist(folder)
    train, validation = _split(Rows(images.reshape(-1, 784)[:, order], labels), 5_000)
    test = Rows(tests.reshape(-1, 784)[:, order], test_labels)
    train, validation, test = (StoredSequences(rows, 256, 10) for rows in (train, validation, test))
    training = TrainingSettings(
        (1e-3, 3e-3), (0.01,), 64, epochs=20, schedule=CosineAnnealing(0.1), best=True, clip=1.0
    )
    backbone = Backbone({"num_hidden_layers": 4, "bidirectional": False}, (128,))
    return _protocol_of_files(train, test, validation, (training, backbone), "MNIST", {}, differs)


def mnist_images(folder: Path) -> Protocol:
    """Return the protocol of MNIST as images in patches of 4 pixels, read in both directions.

    Reads MNIST's four IDX files.
    """
    images, labels, tests, test_labels = mnist(folder)
    train, validation, test = (
        Images(pixels[:, None], y, 0.1307, 0.3081)
        for pixels, y in (
            (images[:-5_000], labels[:-5_000]),
            (images[-5_000:], labels[-5_000:]),
            (tests, test_labels),
        )
    )
    fields: Fields = {
        "num_hidden_layers": 2,
        "patch_size": 4,
        "class_token": True,
        "pooling": "last",
    }
    training = TrainingSettings(
        (1e-3, 3e-3), (0.05,), 128, epochs=10, schedule=CosineAnnealing(0.1), best=True, clip=1.0
    )
    return Protocol(
        train=(Segment(train, len(train.pixels)),),
        test=(Segment(test, len(test.pixels)),),
        validation=(Segment(validation, len(validation.pixels)),),
        training=training,
        backbone=Backbone(fields, (64,)),
        source="this library",
    )


FILES: dict[str, Callable[[Path], Protocol]] = {
    "lra-text": lra_text,
    "lra-retrieval": lra_retrieval,
    "lra-image": lra_image,
    "smnist": smnist,
    "pmnist": pmnist,
    "mnist": mnist_images,
    "image-folder": imagenet.metala,
    "image-folder-23m": partial(imagenet.metala, size=imagenet.SMALL),
    "image-folder-deit": imagenet.deit,
    "image-folder-deit-23m": partial(imagenet.deit, size=imagenet.SMALL),
}
"""Protocols of data that users have: what to call with the path of it."""


def _split(rows: Rows, validation: int) -> tuple[Rows, Rows]:
    return rows.part(slice(None, -validation)), rows.part(slice(-validation, None))


def _protocol_of_files(
    train: StoredSequences,
    test: StoredSequences,
    validation: StoredSequences | None,
    settings: tuple[TrainingSettings, Backbone],
    source: str,
    figures: dict[str, float],
    differs: str = "",
) -> Protocol:
    return Protocol(
        train=(Segment(train, len(train.rows)),),
        test=(Segment(test, len(test.rows)),),
        validation=None if validation is None else (Segment(validation, len(validation.rows)),),
        training=settings[0],
        backbone=settings[1],
        source=source,
        differs=differs,
        figures=figures,
    )
