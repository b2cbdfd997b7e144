"""The Dynamical Systems Framework (Sieber et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import log
from typing import Any

from fastweights.lab.reproduce.accuracy import (
    ProtocolOnFile,
    TaskExperiment,
    TaskTrial,
    TrainingBudget,
    train_each,
)
from fastweights.lab.reproduce.claim import FIVE, Above, Claim, ClaimSize, Near, Term
from fastweights.lab.reproduce.computed import theorem
from fastweights.lab.reproduce.pictures import Bars, Curves
from fastweights.lab.reproduce.published import with_second_softmax
from fastweights.lab.reproduce.recall import RecallTraining
from fastweights.lab.reproduce.small import (
    DIGITS,
    DIGITS_TUNED,
    IN_16_PATCHES,
    IN_49_PATCHES,
    LOCAL,
    TUNED,
    TUNED_EIGHT,
    behind_local_mixer,
    epochs,
    long_range,
    mqar,
    recall,
)
from fastweights.lab.reproduce.text import (
    LARGE,
    LEARNT,
    MEDIUM,
    LanguageModels,
    LanguageTraining,
    Positions,
    Tuning,
)
from fastweights.lab.tasks import TASKS, InContextRecall

PAPER = "DSF"
_of_accuracy = partial(Claim, PAPER, unit="accuracy [%]", picture=Bars("accuracy [%]"))
_of_loss = partial(
    Claim, PAPER, unit="nats per token (lower is better)", picture=Bars("nats per token")
)


def _error_of_map(order: int) -> Term:
    return Term("Taylor features", order, "error of the map")


THEORY = {
    "dsf-lemma1": theorem(
        PAPER,
        "Lemma 1",
        "Softmax attention is a linear system only with infinitely many state rows.",
        Above(_error_of_map(-1), 0),
        *(Above(_error_of_map(place), _error_of_map(place + 1)) for place in range(8)),
        *(Near(Term("rank of e^(x y)", place, "rank / points"), 1, 0) for place in range(4)),
    ),
    "dsf-lemma2": theorem(
        PAPER,
        "Lemma 2",
        "A system with a larger state reproduces every system with a smaller one.",
        *(Near(Term("larger state", place, "difference"), 0, 1e-12) for place in range(4)),
    ),
    "dsf-appendix-i": theorem(
        PAPER,
        "appendix I, eq. 23",
        "S6's transition is a reversed sigmoid to a power: a forget gate.",
        *(Near(Term("σ(-x)^a", place, "difference"), 0, 1e-12) for place in range(4)),
    ),
}

# Figure 1: state expansion ------------------------------------------------------------------------

Fields = Mapping[str, Any]
MQAR_8, MQAR_SMALL = mqar(32, 8, 32, 600), mqar(64, 16, 32, 900)
MQAR_16, MQAR_WHOLE = TASKS["mqar-dsf-256x16"], TASKS["mqar-dsf-512x64"]
WIDTHS = (64, 128, 256, 512)
SHORT = epochs(2)
RECALL = recall(InContextRecall(vocabulary=16, length=64))
NOISY = recall(InContextRecall(vocabulary=20, length=64, noise_tokens=4, noise=0.2))


def _beside_softmax(name: str, n: int) -> dict[str, Fields]:
    return {name: {"name": name, "heads": 1, "keys": n}, "softmax": {"name": "softmax", "heads": 1}}


_LINEAR, _NORMALIZED = partial(_beside_softmax, "linear"), partial(_beside_softmax, "normalized")


def _systems(n: int) -> dict[str, Fields]:
    inner = {"conv": 1, "expand": 1, "state": n}
    return {
        **_NORMALIZED(n),
        "S6": {"name": "mamba", **inner},
        "SSD": {"name": "mamba2", **inner, "heads": 1},
    }


def _expansions(
    protocol: Any,
    width: int,
    sizes: tuple[int, ...],
    start: list[Fields],
    effort: TrainingBudget,
    mixers: Callable[[int], Mapping[str, Fields]] = _LINEAR,
) -> TaskExperiment:
    """One head, with n features per key in all but softmax: the state has N = n d numbers."""
    runs = []
    for n in sizes:
        for series, mixer in mixers(n).items():
            fields = {"hidden_size": width, "mixers": [*start, mixer]}
            runs.append(TaskTrial(series, n, protocol, mixer["name"], fields, effort))
    return TaskExperiment(tuple(runs))


_LOCAL = behind_local_mixer()["mixers"]

FIG1 = {
    "dsf-fig1": _of_accuracy(
        "Figure 1",
        "Linear attention comes nearer to softmax attention as the state expansion n grows.",
        statements=(
            Above(Term("linear", -1), Term("linear", 0)),
            Above(Term("softmax", 0), Term("linear", 0)),
            Near(Term("linear", -1), Term("softmax", -1), 5),
        ),
        reference=(Above(Term("softmax", -1), 99),),
        controls=(Term("linear", 0),),
        cpu=ClaimSize(_expansions(MQAR_8, 32, (4, 32), _LOCAL, TUNED), 3),
        gpu=ClaimSize(
            _expansions(MQAR_16, 256, (32, 256), [], SHORT), 10, "2 of 64 epochs, width 256."
        ),
        paper_size=ClaimSize(
            _expansions(MQAR_WHOLE, 512, (32, 64, 128, 256), [], TrainingBudget()), 6000
        ),
        picture=Curves("state expansion n", "accuracy [%]", "x"),
        remark="Softmax attention has d-dimensional keys throughout.",
    ),
    "dsf-fig7-n": _of_accuracy(
        "Figure 7, state expansion",
        "A larger state expansion n helps normalized attention, as linear attention.",
        statements=(Above(Term("normalized", -1), Term("normalized", 0)),),
        reference=(Above(Term("softmax", -1), 99),),
        cpu=ClaimSize(
            _expansions(MQAR_8, 32, (4, 32), _LOCAL, TUNED, _NORMALIZED),
            2,
            "Without S6 and SSD, which learn nothing of this task in 600 updates.",
        ),
        gpu=ClaimSize(
            _expansions(MQAR_16, 256, (32, 256), [], SHORT, _systems),
            10,
            "2 of 64 epochs, width 256.",
        ),
        paper_size=ClaimSize(
            _expansions(MQAR_WHOLE, 512, (32, 64, 128, 256), [], TrainingBudget(), _systems), 9000
        ),
        picture=Curves("state expansion n", "accuracy [%]", "x"),
        remark=(
            "Curves only; the paper also sweeps four widths and four tasks, and sees the"
            " same of S6 and SSD, which the larger sizes measure."
        ),
    ),
}

SECOND = "A second protocol, fixed before it was measured: MAD's recall"
FIG1["dsf-fig1-recall"] = replace(
    FIG1["dsf-fig1"],
    cpu=ClaimSize(
        _expansions(RECALL, 32, (4, 32), _LOCAL, TUNED), 7, f"{SECOND} of 8 keys in 64 tokens."
    ),
)
FIG1["dsf-fig7-n-recall"] = replace(
    FIG1["dsf-fig7-n"],
    cpu=ClaimSize(
        _expansions(RECALL, 32, (4, 32), _LOCAL, TUNED, _NORMALIZED),
        6,
        f"{SECOND} of 8 keys in 64 tokens. Without S6 and SSD.",
    ),
)

# Figures 2 and 7: normalisation -------------------------------------------------------------------

MLP: Fields = {"mlp": "plain", "hidden_act": "gelu", "mlp_bias": True}
DESTROYED = "fastweights.lab.reproduce.published:Destroyed"


def _with_mlp_variants(models: Mapping[str, Fields]) -> dict[str, Fields]:
    """Both versions of the comparison: with and without the MLP that the code gave to one model
    only.
    """
    with_mlp = {f"{name} + MLP": {**models[name], **MLP} for name in ("normalized", "linear")}
    return {**models, **with_mlp}


WIDTH_128 = "2 of 64 epochs, 16 pairs, width 128."
SHORT_ATTENTION: dict[str, Fields] = {
    "softmax": behind_local_mixer({"name": "softmax", "heads": 1}),
    "linear": behind_local_mixer({"name": "linear", "heads": 1}),
    "normalized": behind_local_mixer({"name": "normalized", "heads": 1}),
}
SHORT_SYSTEMS: dict[str, Fields] = {
    **{name: SHORT_ATTENTION[name] for name in ("softmax", "normalized")},
    "S6": behind_local_mixer({"name": "mamba", "conv": 1, "expand": 1}),
    "SSD": behind_local_mixer({"name": "mamba2", "conv": 1, "expand": 1, "heads": 1, "state": 16}),
    "S6, start destroyed": behind_local_mixer({"name": DESTROYED, "conv": 1, "expand": 1}),
}
ATTENTION: dict[str, Fields] = {
    "softmax": {
        "mixers": [{"name": "softmax", "heads": 1, "bias": True, "rope": {"fraction": 0.0}}]
    },
    "linear": {"mixers": [{"name": "linear", "heads": 1, "keys": 128}]},
    "normalized": {"mixers": [{"name": "normalized", "heads": 1, "keys": 128}]},
}
SYSTEMS: dict[str, Fields] = {
    **{name: ATTENTION[name] for name in ("softmax", "normalized")},
    "S6": {"mixers": [{"name": "mamba", "conv": 1, "state": 128}]},
    "SSD": {"mixers": [{"name": "mamba2", "conv": 1, "state": 128}]},
    "S6, start destroyed": {"mixers": [{"name": DESTROYED, "conv": 1, "state": 128}]},
}


def _at_widths(
    protocol: Any,
    models: Mapping[str, Fields],
    widths: tuple[int, ...],
    effort: TrainingBudget,
    contender: str = "softmax",
) -> TaskExperiment:
    cells = product(widths, models.items())
    return TaskExperiment(
        tuple(
            TaskTrial(s, d, protocol, contender, {"hidden_size": d, **own}, effort)
            for d, (s, own) in cells
        )
    )


FIG2 = {
    "dsf-fig2": _of_accuracy(
        "Figure 2",
        "Normalized attention beats linear attention.",
        statements=(Above(Term("normalized"), Term("linear")),),
        reference=(Above(Term("softmax"), 99),),
        cpu=ClaimSize(_at_widths(MQAR_SMALL, SHORT_ATTENTION, (32,), TUNED), 4),
        gpu=ClaimSize(_at_widths(MQAR_16, ATTENTION, (128,), SHORT), 5, WIDTH_128),
        paper_size=ClaimSize(_at_widths(MQAR_WHOLE, ATTENTION, WIDTHS, TrainingBudget()), 5000),
        remark=(
            "The models alone and alike, as the paper describes them; its code compares others"
            " (dsf-fig2-mlp)."
        ),
    ),
    "dsf-fig2-mlp": _of_accuracy(
        "Figure 2, as its code compares",
        "Normalized attention with an MLP beats linear attention without one, and with one.",
        statements=(
            Above(Term("normalized + MLP"), Term("linear")),
            Above(Term("normalized + MLP"), Term("linear + MLP")),
        ),
        reference=(Above(Term("softmax"), 99),),
        cpu=ClaimSize(
            _at_widths(MQAR_SMALL, _with_mlp_variants(SHORT_ATTENTION), (32,), TUNED), 10
        ),
        gpu=ClaimSize(
            _at_widths(MQAR_16, _with_mlp_variants(ATTENTION), (128,), SHORT), 8, WIDTH_128
        ),
        paper_size=ClaimSize(
            _at_widths(MQAR_WHOLE, _with_mlp_variants(ATTENTION), WIDTHS, TrainingBudget()), 8000
        ),
        remark="In the paper's code normalized attention alone has an MLP.",
    ),
    "dsf-fig7": _of_accuracy(
        "Figure 7",
        "Normalized attention equals S6; SSD beats S6.",
        statements=(
            Above(Term("SSD"), Term("S6, start destroyed")),
            Above(Term("SSD"), Term("S6")),
            Near(Term("normalized"), Term("S6"), 5),
        ),
        reference=(Above(Term("softmax"), 99),),
        cpu=ClaimSize(
            _at_widths(MQAR_SMALL, SHORT_SYSTEMS, (32,), TUNED),
            9,
            "S6 and SSD take 1,000 to 2,500 updates for 4 pairs in 16 tokens, and not on"
            " every seed; normalized attention 100.",
        ),
        gpu=ClaimSize(_at_widths(MQAR_16, SYSTEMS, (128,), SHORT), 8, WIDTH_128),
        paper_size=ClaimSize(_at_widths(MQAR_WHOLE, SYSTEMS, WIDTHS, TrainingBudget()), 8000),
        remark=(
            "In the paper's code S6 and SSD lose Mamba's initial step sizes (dt = 0.69 instead of"
            " 0.001 to 0.1)."
        ),
    ),
}

FIG2["dsf-fig2-noisy"] = replace(
    FIG2["dsf-fig2"],
    cpu=ClaimSize(
        _at_widths(NOISY, SHORT_ATTENTION, (32,), TUNED),
        5,
        f"{SECOND} of 8 keys in 64 tokens, a fifth of whose pairs are noise.",
    ),
)

# Figure 3: the reversed sigmoid -------------------------------------------------------------------


def _lstms(
    protocol: Any, widths: tuple[int, ...], start: list[Fields], effort: TrainingBudget
) -> TaskExperiment:
    cells = {"qLSTM": {"name": "qlstm"}, "reversed qLSTM": {"name": "qlstm", "reversed": True}}
    models = {series: {"mixers": [*start, cell]} for series, cell in cells.items()}
    return _at_widths(protocol, models, widths, effort, "qlstm")


FIG3 = {
    "dsf-fig3": _of_accuracy(
        "Figure 3",
        "A qLSTM with the reversed sigmoid of S6 beats the plain one at every width.",
        statements=(
            Above(Term("reversed qLSTM", 0), Term("qLSTM", 0), 1),
            Above(Term("reversed qLSTM", -1), Term("qLSTM", -1), 1),
        ),
        cpu=ClaimSize(
            _lstms(mqar(16, 4, 64, 600, vocabulary=16), (64, 96), _LOCAL, TUNED),
            6,
            "4 pairs of 8 keys and 8 values in 16 tokens: a cell without state expansion learns a"
            " little of more.",
        ),
        gpu=ClaimSize(
            _lstms(
                TASKS["mqar-dsf-64x4"],
                (64, 256),
                [],
                TrainingBudget(rates=(2e-3,), training={"epochs": 16}),
            ),
            8,
        ),
        paper_size=ClaimSize(_lstms(MQAR_16, WIDTHS, [], TrainingBudget()), 3000),
        picture=Curves("model width d", "accuracy [%]", "x"),
        remark=(
            "The paper's code has a convolution, a gate and an expansion around the cell;"
            " here is the cell alone. σ(-(x W + b)) is σ of negated weights: but for the"
            " learnt exponent both are one family."
        ),
    )
}

# Table 2: other normalisers -----------------------------------------------------------------------

ETAS = ("exp", "softplus", "sigmoid")


def _etas(
    protocol: Any, width: int, start: list[Fields], own: Fields, effort: TrainingBudget
) -> TaskExperiment:
    """And linear attention, which has no normaliser that is learnt."""
    mixers = {eta: {"name": "normalized", "heads": 1, "eta": eta} for eta in ETAS}
    mixers["linear"] = {"name": "linear", "heads": 1}
    models = {
        series: {**own, "hidden_size": width, "mixers": [*start, mixer]}
        for series, mixer in mixers.items()
    }
    return train_each(models, {None: protocol}, effort, contender="normalized")


TABLE2 = {
    "dsf-table2": _of_accuracy(
        "Table 2",
        "The normalisers exp, softplus and sigmoid perform alike; exp is the best.",
        statements=(
            Near(Term("exp"), Term("softplus"), 5),
            Near(Term("exp"), Term("sigmoid"), 5),
            Above(Term("exp"), Term("softplus")),
            Above(Term("exp"), Term("sigmoid")),
        ),
        controls=(Term("linear"),),
        cpu=ClaimSize(
            _etas(MQAR_SMALL, 24, _LOCAL, {}, TUNED_EIGHT), 9, "MQAR alone, without LRA Image."
        ),
        gpu=ClaimSize(_etas(MQAR_16, 128, [], MLP, SHORT), 6, "MQAR alone, 2 of 64 epochs."),
        paper_size=ClaimSize(
            _etas(MQAR_WHOLE, 128, [], MLP, TrainingBudget()), 1500, "MQAR alone."
        ),
        remark="The table's numbers are lost in the text at hand.",
    )
}

LARGE_START = {"bias": log(16)}
"""Of η, which has a bias as in the published code: a sum over all tokens drowns what else is in the
stream."""

# Table 1: language --------------------------------------------------------------------------------


def _language(
    pretraining: LanguageTraining,
    heads: int,
    seeds: tuple[int, ...],
    reading: Positions,
    tuning: Tuning = Tuning(),
    before: tuple[Fields, ...] = (),
    start: Fields = LARGE_START,
) -> LanguageModels:
    models = {
        name: (*before, {"name": name, "heads": heads, **own})
        for name, own in (("softmax", {}), ("normalized", start), ("linear", {}))
    }
    return LanguageModels(models, pretraining, (reading,), seeds, tuning=tuning)


def _recall_language(
    vocabulary: int, length: int, width: int, steps: int, seeds: tuple[int, ...], tuning: Tuning
) -> LanguageModels:
    """One head, whose η has no bias, behind a layer that mixes neighbours."""
    task = InContextRecall(vocabulary=vocabulary, length=length)
    training = RecallTraining(task, 2, width, 3e-3, steps)
    reading = Positions(32_768, length + 1)
    return _language(training, 1, seeds, reading, tuning, (LOCAL,), start={})


TABLE1 = {
    "dsf-table1": _of_loss(
        "Table 1, language",
        "Normalized attention closes a part of the gap between linear and softmax attention.",
        statements=(
            Above(Term("linear"), Term("normalized")),
            Above(Term("normalized"), Term("softmax")),
        ),
        cpu=ClaimSize(
            _language(
                replace(LEARNT, steps=2400, warmup=240),
                2,
                FIVE,
                Positions(32_768, 257),
                Tuning((6e-3, 1.2e-2, 2.4e-2)),
                (LOCAL,),
            ),
            25,
            "One layer behind one that mixes neighbours: without that layer, linear and normalized"
            " attention stay above 3-grams.",
        ),
        gpu=ClaimSize(_language(MEDIUM, 8, FIVE, Positions(262_144, 513)), 8),
        paper_size=ClaimSize(
            _language(LARGE, 8, (0,), Positions(2_000_000, 2049)),
            3000,
            "MesaNet's backbone, not Pythia's.",
        ),
        remark=(
            "The paper: a quarter of the gap, on WikiText-103 with Pythia-70M; its"
            " numbers are lost in the text at hand. The other column is Table 3's average."
            " η has a bias, as in the published code; here it starts at log 16, as a sum"
            " over all tokens drowns the rest of the stream."
        ),
    ),
    "dsf-table1-recall": _of_loss(
        "Table 1, language of recall",
        "Normalized attention closes a part of the gap between linear and softmax attention, or"
        " all of it.",
        statements=(
            Above(Term("linear"), Term("softmax")),
            Above(Term("linear"), Term("normalized")),
        ),
        cpu=ClaimSize(
            _recall_language(16, 64, 32, 900, FIVE, Tuning((1e-3, 3e-3, 1e-2))),
            6,
            "Recall of 8 keys in 64 tokens, one layer behind one that mixes neighbours.",
        ),
        gpu=ClaimSize(
            _recall_language(64, 256, 64, 2000, FIVE, Tuning((1e-3, 3e-3))),
            10,
            "Recall of 32 keys in 256 tokens.",
        ),
        paper_size=ClaimSize(
            _recall_language(256, 1024, 128, 20_000, FIVE, Tuning((3e-4, 1e-3, 3e-3))),
            600,
            "Recall of 128 keys in 1,024 tokens: not the paper's text.",
        ),
        remark=(
            "A second protocol of the claim, of memory alone. On text n-grams tell most,"
            " and η's effect does not show (dsf-table1)."
        ),
    ),
}

# Table 3: Long Range Arena ------------------------------------------------------------------------


def _arena(
    protocols: Mapping[str, Any], effort: TrainingBudget, own: Mapping[str, Fields]
) -> TaskExperiment:
    """The tasks, and ListOps as the paper's code trains it, which the average leaves out."""
    models = {"softmax": "softmax", "linear": "linear", "normalized": "normalized", "S6": "mamba"}
    columns = {**protocols, "ListOps, softmax twice": with_second_softmax(protocols["ListOps"])}
    cells = product(columns.items(), models.items())
    runs = (TaskTrial(s, x, one, name, own.get(s, {}), effort) for (x, one), (s, name) in cells)
    return TaskExperiment(tuple(runs), tuple(protocols))


_ALONE: dict[str, Fields] = {
    "normalized": {"mixers": [{"name": "normalized", **LARGE_START}]},
    "S6": {"mixers": [{"name": "mamba", "conv": 1, "expand": 1}]},
}


def _images(
    protocol: ProtocolOnFile, effort: TrainingBudget, around: Mapping[str, Any]
) -> TaskExperiment:
    plain = {name: {"mixers": [{"name": name, "heads": 2}]} for name in ("softmax", "linear")}
    normalized = {"name": "normalized", "heads": 2, **LARGE_START}
    models: dict[str, Any] = {**plain, "normalized": {"mixers": [normalized]}, "S6": _ALONE["S6"]}
    runs = tuple(
        TaskTrial(s, "Image", protocol, own["mixers"][0]["name"], {**around, **own}, effort)
        for s, own in models.items()
    )
    return TaskExperiment(runs, ("Image",))


ON_LISTOPS = _of_accuracy(
    "Table 3, ListOps",
    "Normalized attention beats softmax and linear attention on ListOps, and equals S6.",
    statements=(
        Above(Term("normalized", "average"), Term("softmax", "average")),
        Above(Term("normalized", "average"), Term("linear", "average")),
        Near(Term("normalized", "average"), Term("S6", "average"), 2),
    ),
    cpu=ClaimSize(
        _arena(long_range(500), TUNED, _ALONE),
        11,
        "ListOps alone, of 15 to 40 tokens.",
        "not long range",
    ),
    gpu=ClaimSize(
        _arena({"ListOps": TASKS["lra-listops-small"]}, epochs(3), _ALONE),
        5,
        "ListOps of short sequences, 3 of 10 epochs.",
    ),
    paper_size=ClaimSize(
        _arena({"ListOps": TASKS["lra-listops-dsf"]}, TrainingBudget(), {}), 5000, "ListOps alone."
    ),
    figures={
        "softmax": {"ListOps": 35.72, "Pathfinder": 69.32, "Image": 34.22},
        "linear": {"ListOps": 16.12, "Pathfinder": 72.64, "Image": 37.97},
        "normalized": {"ListOps": 38.24, "Pathfinder": 71.56, "Image": 35.96},
        "S6": {"ListOps": 38.02, "Pathfinder": 69.26, "Image": 65.08},
    },
    remark=(
        "The paper's code trains on the softmax of a softmax, pools over padding,"
        " differs in model sizes and tests a whole Mamba block as S6; here the models"
        " are alone and alike, with one softmax, and beside it two. η has a bias from"
        " log 16 on. Judged by the paper's column, not its average of five tasks."
    ),
)
ON_IMAGES = replace(
    ON_LISTOPS,
    place="Table 3, Image",
    statement=(
        "On images normalized attention beats softmax attention, linear attention beats both,"
        " and S6 all three."
    ),
    statements=(
        Above(Term("normalized", "average"), Term("softmax", "average")),
        Above(Term("linear", "average"), Term("normalized", "average")),
        Above(Term("S6", "average"), Term("linear", "average")),
    ),
    cpu=ClaimSize(
        _images(DIGITS, DIGITS_TUNED, IN_16_PATCHES),
        8,
        "Images alone: MNIST in 16 patches, where the arena has CIFAR-10 by pixels.",
    ),
    gpu=ClaimSize(
        _images(DIGITS, TrainingBudget(rates=(1e-3, 3e-3, 1e-2), training={"steps": 500}), {}),
        10,
        "MNIST in 49 patches.",
    ),
    paper_size=ClaimSize(
        _images(ProtocolOnFile("lra-image", "cifar-10-binary.tar.gz"), TrainingBudget(), {}),
        5000,
        "Images alone, with MetaLA's model and rates of Table A4 around DSF's layers.",
    ),
    remark=(
        "The models are alone and alike, η with its bias. Judged by the paper's"
        " column, where linear is above normalized attention."
    ),
)

TABLE3 = {
    "dsf-table3": ON_LISTOPS,
    "dsf-table3-image": ON_IMAGES,
    "dsf-table3-image-patches": replace(
        ON_IMAGES,
        cpu=ClaimSize(
            _images(DIGITS, DIGITS_TUNED, IN_49_PATCHES),
            18,
            "Images alone: MNIST in 49 patches, where the arena has CIFAR-10 by pixels.",
        ),
    ),
}

CLAIMS: dict[str, Claim] = {**THEORY, **FIG1, **FIG2, **FIG3, **TABLE1, **TABLE2, **TABLE3}
