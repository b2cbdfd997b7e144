"""Multi-query associative recall (Arora et al., 2024), at the versions of its code that papers
used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastweights.lab.tasks.base import Batch, TokenTask
from fastweights.lab.tasks.protocol import Backbone, Fields, Protocol, Segment, TrainingSettings
from fastweights.lab.tasks.sampling import sample_by_weight, sample_distinct
from fastweights.models import PRESETS
from fastweights.models.loss import IGNORE_INDEX
from fastweights.training.loop.schedules import Constant, CosineAnnealing

FILLER = 0


@dataclass(frozen=True)
class MQAR(TokenTask):
    """Multi-query associative recall: D pairs of a key and a value, then each key again, labelled
    with its value.

    Keys are distinct among 1 … V/2 - 1, values distinct among V/2 … V - 1. Of the (length - 2 D) /
    2 even places after the pairs, the keys take D without replacement with probability ∝ i^(power -
    1): close behind the pairs, as a rule. All else is token 0, or a random token. The value does
    not follow its query.

    Attributes:
        vocabulary: V.
        length: Tokens per sequence.
        pairs: D.
        power: Exponent a of the distribution of places; 0.01 in all published code.
        noise: Whether random tokens take the places of token 0 (`random_non_queries`; they may be
            keys).

    Raises:
        ValueError: If `length` is odd or too short for the pairs, or the vocabulary has too few
            keys.
    """

    vocabulary: int = 8192
    length: int = 64
    pairs: int = 4
    power: float = 0.01
    noise: bool = False

    def __post_init__(self) -> None:
        if self.length % 2 or not 0 < 4 * self.pairs <= self.length:
            raise ValueError(
                f"MQAR(length={self.length}, pairs={self.pairs}): the length is even and at least 4"
                f" · pairs; take pairs between 1 and {self.length // 4}"
            )
        if self.vocabulary // 2 - 1 < self.pairs:
            raise ValueError(
                f"MQAR(vocabulary={self.vocabulary}) has only {self.vocabulary // 2 - 1} keys for"
                f" {self.pairs} pairs; take a vocabulary of at least {2 * self.pairs + 2}"
            )

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        half = self.vocabulary // 2
        keys = 1 + sample_distinct(generator, count, self.pairs, half - 1)
        values = half + sample_distinct(generator, count, self.pairs, self.vocabulary - half)
        slots = sample_by_weight(generator, count, self.pairs, self.places)
        inputs, labels = arrange_pairs(keys, values, slots, self.length)
        if self.noise:
            filler = inputs == FILLER
            inputs[filler] = generator.integers(self.vocabulary, size=int(filler.sum()))
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    @property
    def places(self) -> np.ndarray:
        """Probabilities of the places for queries, nearest first."""
        p = np.arange(1, self.length // 2 - self.pairs + 1) ** (self.power - 1.0)
        return p / p.sum()


def arrange_pairs(
    keys: np.ndarray, values: np.ndarray, slots: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay out ``keys, values, slots [n D]`` as (inputs, labels) ``[n length]``."""
    n, pairs = keys.shape
    inputs = np.full((n, length), FILLER)
    labels = np.full((n, length), IGNORE_INDEX)
    inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values
    queries = 2 * pairs + 2 * slots
    np.put_along_axis(inputs, queries, keys, 1)
    np.put_along_axis(labels, queries, values, 1)
    return inputs, labels


# protocols ----------------------------------------------------------------------------------------

WIDTHS = (64, 128, 256, 512)
SIZES = ((64, 4), (128, 8), (256, 16), (512, 64))
RATES = tuple(float(rate) for rate in np.logspace(-4, -2, 4))
LOW_RATES = tuple(float(rate) for rate in np.logspace(-5, -3, 4))
PER_EPOCH = CosineAnnealing(by_epoch=True)

_GPT2: Fields = {
    "norm": "layer",
    "embedding_scale": 1.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "embedding_dropout": 0.1,
    "mlp": "identity",
    "num_hidden_layers": 2,
}
_SOFTMAX = {"mixers": PRESETS["mqar-softmax"].fields["mixers"]}


def _of(preset: str, length: int) -> Fields:
    """A preset's mixers and MLP, with positions for `length` tokens if it has any."""
    fields = PRESETS[preset].fields
    own = {
        name: fields[name] for name in ("mixers", "mlp", "hidden_act", "mlp_bias") if name in fields
    }
    return {**own, "learnt_positions": fields["learnt_positions"] and length}


def _training(
    batch: int, rates: tuple[float, ...] = RATES, *, shuffled: bool = True
) -> TrainingSettings:
    return TrainingSettings(
        rates, (0.1,), batch, epochs=64, schedule=PER_EPOCH, stop=0.99, best=True, shuffled=shuffled
    )


def _protocol(
    task: MQAR, training: TrainingSettings, backbone: Backbone, source: str, differs: str
) -> Protocol:
    return Protocol(
        (Segment(task, 100_000),), (Segment(task, 3_000),), training, backbone, source, differs
    )


def _zoology_iclr(length: int, pairs: int, batch: int) -> Protocol:
    softmax = {**_SOFTMAX, "learnt_positions": length, "num_hidden_layers": 2}
    return _protocol(
        MQAR(length=length, pairs=pairs),
        _training(batch),
        Backbone({**_GPT2, "num_hidden_layers": 4}, WIDTHS, {"softmax": softmax}),
        "Zoology, Figure 2: HazyResearch/zoology @ de4e258",
        "4 layers for all but attention; batches shuffled; the test set ends training early",
    )


def _zoology_2layer(length: int, pairs: int, batch: int) -> Protocol:
    return _protocol(
        MQAR(length=length, pairs=pairs),
        _training(batch, shuffled=False),
        Backbone(_GPT2, WIDTHS, {"softmax": {**_SOFTMAX, "learnt_positions": length}}),
        "Zoology, Figure 2 since fcc6af7: HazyResearch/zoology @ dbcb60d (the last that trains on"
        " tokens)",
        "2 layers for all; batches fixed and in order",
    )


def _dsf(length: int, pairs: int, batch: int) -> Protocol:
    names = ("softmax", "linear", "normalized", "normalized-mlp", "qlstm", "qlstm-reversed")
    contenders = {name: _of(f"mqar-{name}", length) for name in names}
    return _protocol(
        MQAR(length=length, pairs=pairs),
        _training(batch, shuffled=False),
        Backbone(_GPT2, WIDTHS, contenders),
        "DSF, Figures 1-3: IntelligentControlSystems/dsf-mqar @ 7c5aff8",
        "the code's normalized attention alone has an MLP (normalized-mlp), the paper's has none"
        " (normalized); d_qk in 32, 64, 128, 256 besides the width; qLSTM trains with half the"
        " batch; no warm-up, where the paper says 10 %",
    )


def _metala(length: int, pairs: int, rates: tuple[float, ...]) -> Protocol:
    own = {name: _of(f"mqar-{name}", length) for name in ("metala", "softmax")}
    batch = 256 if length == 256 else 128
    return _protocol(
        MQAR(length=length, pairs=pairs),
        _training(batch, rates),
        Backbone({**_GPT2, "mlp": "gated"}, (64, 128), own),
        "MetaLA, Figure 3 and Table A7 (no code released; what the paper leaves open as in Zoology"
        " @ de4e258)",
        "token and channel mixers alternate; H = 2, convolutions of 2",
    )


_BASED_TRAIN = (
    (64, 4, 100_000),
    (128, 8, 20_000),
    (256, 16, 20_000),
    (256, 32, 20_000),
    (256, 64, 20_000),
)
_BASED_TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))


def _protocol_in_based_paper() -> Protocol:
    return Protocol(
        train=tuple(Segment(MQAR(length=t, pairs=d, noise=True), n) for t, d, n in _BASED_TRAIN),
        test=tuple(Segment(MQAR(length=t, pairs=d, noise=True), 1_000) for t, d in _BASED_TEST),
        training=TrainingSettings(
            rates=tuple(float(rate) for rate in np.logspace(-3, -1.5, 4)),
            decays=(0.1,),
            batch=256,
            epochs=32,
            schedule=PER_EPOCH,
            shuffled=False,
            stop=0.99,
            best=True,
        ),
        backbone=Backbone(_GPT2, (64, 128), {"softmax": {**_SOFTMAX, "learnt_positions": 1024}}),
        source="Based, Figure 2: HazyResearch/zoology @ dbcb60d",
        differs=(
            "random tokens between the queries; segments one after the other, never mixed in a"
            " batch; its models have a gated convolution before every mixer, ours have what the"
            " mixer has"
        ),
    )


SMALL: Fields = {
    "norm": "layer",
    "embedding_scale": 1.0,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "mlp": None,
    "num_hidden_layers": 2,
}
"""A model that learns recall in seconds on a CPU: large initial weights, and nothing between its
mixers.
"""


def _small(length: int, pairs: int, steps: int) -> Protocol:
    task = MQAR(vocabulary=256, length=length, pairs=pairs)
    return Protocol(
        train=(Segment(task, None),),
        test=(Segment(task, 1_000),),
        training=TrainingSettings(
            (3e-3, 1e-2), (0.1,), 64, steps=steps, schedule=Constant(), stop=0.99, best=True
        ),
        backbone=Backbone(SMALL, (64,), {"softmax": {**_SOFTMAX, "learnt_positions": length}}),
        source="this library",
        differs=(
            "256 tokens, initial weights of 0.1, no dropout, a constant rate, new examples in every"
            " batch: a minute on a CPU, where a rate that falls stops on the first plateau"
        ),
    )


def _protocols_by_size(
    name: str, make: Callable[[int, int, int], Protocol], batches: tuple[int, ...]
) -> dict[str, Protocol]:
    return {
        f"{name}-{t}x{d}": make(t, d, batch) for (t, d), batch in zip(SIZES, batches, strict=True)
    }


_TABLE_A7 = {
    "metala, width 64": 28.5,
    "metala, width 128": 90.4,
    "mamba, width 64": 0.0,
    "mamba, width 128": 0.0,
    "softmax, width 64": 99.0,
    "softmax, width 128": 99.0,
}

PROTOCOLS: dict[str, Protocol] = {
    **_protocols_by_size("mqar-zoology-iclr", _zoology_iclr, (512, 512, 256, 128)),
    **_protocols_by_size("mqar-zoology-2layer", _zoology_2layer, (512, 512, 256, 128)),
    **_protocols_by_size("mqar-dsf", _dsf, (512, 256, 128, 64)),
    "mqar-metala-256x16": _metala(256, 16, RATES),
    "mqar-metala-512x64": _metala(512, 64, (*LOW_RATES, *RATES)),
    "mqar-metala-512x80": replace(_metala(512, 80, (*LOW_RATES, *RATES)), figures=_TABLE_A7),
    "mqar-based": _protocol_in_based_paper(),
    "mqar-small-32x4": _small(32, 4, 1_500),
    "mqar-small-64x8": _small(64, 8, 3_000),
}
