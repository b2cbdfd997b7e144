"""MesaNet (von Oswald et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from fastweights.reproduce.accuracy import Effort, Training, Trainings
from fastweights.reproduce.claim import Above, Claim, Near, Size, Term
from fastweights.reproduce.pictures import Bars, Curves
from fastweights.reproduce.small import mad
from fastweights.reproduce.speed import Models, Timed, Token, TrainingSteps
from fastweights.tasks import TASKS, Protocol, Segment

PAPER = "MesaNet"

# Figure 2: the cost of solving ---------------------------------------------------------------------------------------


def _layers(width: int, heads: int, dtype: str = "float32") -> Models:
    """One layer and the loss, as in the figure."""
    fields = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": 1, "mlp": None}
    mesa = {f"mesa, {n} steps": ({"name": "mesa", "heads": heads, "steps": n},) for n in (5, 15, 30)}
    gla = {"gla": ({"name": "mesanet", "heads": heads, "rule": "gla"},)}
    return Models(fields, {**mesa, **gla, "softmax": ({"name": "softmax", "heads": heads},)}, dtype)


def _times(
    models: Models, tokens: int, lengths: tuple[int, ...], batch: int, contexts: tuple[int, ...], repeats: int
) -> Timed:
    training = (TrainingSteps(models, tokens, length, repeats) for length in lengths)
    decoding = (Token(models, batch, context, repeats) for context in contexts)
    return Timed((*training, *decoding), kept=tuple(models.mixers))


SPEED = {
    "mesanet-fig2": Claim(
        paper=PAPER,
        place="Figure 2",
        statement="Time grows with the solver's steps, not with the length; past some length Mesa beats softmax.",
        statements=(
            Above(Term("gla"), Term("mesa, 5 steps")),
            Above(Term("mesa, 5 steps"), Term("mesa, 15 steps")),
            Above(Term("mesa, 15 steps"), Term("mesa, 30 steps")),
            Above(Term("mesa, 30 steps", quantity="kept"), 0.8),
            Above(Term("mesa, 30 steps"), Term("softmax")),
            Above(Term("mesa, 30 steps", quantity="kept, decoding"), 0.8),
            Above(Term("mesa, 30 steps", quantity="decoding"), Term("softmax", quantity="decoding")),
        ),
        unit="thousand tokens per second",
        cpu=Size(_times(_layers(128, 2), 8192, (512, 2048, 8192), 4, (1024, 4096, 16_384), 5), 3),
        gpu=Size(_times(_layers(1024, 8), 32_768, (2048, 8192, 32_768), 4, (2048, 8192, 32_768), 7), 6),
        paper_size=Size(
            _times(_layers(1024, 8), 131_072, (2048, 8192, 32_768, 131_072), 4, (2048, 8192, 32_768, 131_072), 15), 30
        ),
        picture=Curves("tokens per sequence, or of context", "thousand tokens / s", "xy"),
        remark="One layer with 8 heads of 128, 4 sequences, on a TPUv5; the figure prints no numbers.",
    )
}

# Figure 8: parity ----------------------------------------------------------------------------------------------------

GATES = {"γ in (-1, 1)": "mesa_signed", "γ in (0, 1)": "mesa"}


def _parity(protocol: Protocol, effort: Effort) -> Trainings:
    """Trained as the protocol says, tested on each of its lengths alone."""
    lengths = {segment.task.length: replace(protocol, test=(segment,)) for segment in protocol.test}
    cells = product(lengths.items(), GATES.items())
    return Trainings(tuple(Training(s, x, one, name, {}, effort) for (x, one), (s, name) in cells))


def _at_lengths(protocol: Protocol, *lengths: int) -> Protocol:
    segment = protocol.test[-1]
    task: Any = segment.task
    return replace(protocol, test=tuple(Segment(replace(task, length=n), segment.examples) for n in lengths))


FIG8 = {
    "mesanet-fig8": Claim(
        paper=PAPER,
        place="Figure 8",
        statement="Mesa with γ in (-1, 1) and Λ = 50 solves parity beyond the trained length; with γ in (0, 1) not.",
        statements=(
            Above(Term("γ in (-1, 1)", -1), 99),
            Near(Term("γ in (0, 1)", -1), 50, 15),
            Above(Term("γ in (-1, 1)", -1), Term("γ in (0, 1)", -1), 20),
        ),
        unit="accuracy [%]",
        cpu=Size(_parity(_at_lengths(TASKS["parity-small"], 256), Effort(rates=(3e-3,), training={"steps": 600})), 4),
        gpu=Size(
            _parity(_at_lengths(TASKS["parity-mesanet"], 40, 256), Effort(training={"steps": 2000})),
            8,
            "2,000 of 10,000 batches.",
        ),
        paper_size=Size(_parity(_at_lengths(TASKS["parity-mesanet"], 40, 64, 128, 256), Effort()), 120),
        picture=Bars("accuracy [%]"),
        figures={"γ in (-1, 1)": {"256": 100.0}},
        remark="Curves only: perfect up to 256 bits with negative γ, failure without.",
    )
}

# Table 1: MAD --------------------------------------------------------------------------------------------------------

RULES = ("mamba2", "gla", "mlstm", "deltanet", "gated_deltanet")
COLUMNS = ("recall", "fuzzy-recall", "memorization", "copying", "compression")
SMALL_MAD = {
    "recall": mad("recall", 300, length=32),
    "fuzzy-recall": mad("fuzzy-recall", 300, length=32, motif=2),
    "memorization": mad("memorization", 300, vocabulary=64),
    "copying": mad("copying", 300, length=32, tokens=4),
    "compression": mad("compression", 300, length=8),
}


def _rules(heads: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """MesaNet's layers on its own parametrisation (Table 3), and the Transformer."""
    baselines = {rule: {"mixers": [{"name": "mesanet", "heads": heads, "rule": rule}]} for rule in names}
    others = {name: {"mixers": [{"name": name, "heads": heads}]} for name in ("mesa", "softmax")}
    return {**others, **baselines}


def _mad(protocols: Mapping[str, Protocol], models: Mapping[str, dict[str, Any]], effort: Effort) -> Trainings:
    cells = product(protocols.items(), models.items())
    runs = tuple(Training(s, x, one, "softmax", own, effort, macro=True) for (x, one), (s, own) in cells)
    return Trainings(runs, tuple(protocols))


def _published() -> dict[str, Protocol]:
    return {column: TASKS[f"mad-mesanet-{column}"] for column in COLUMNS}


TABLE1 = {
    "mesanet-table1": Claim(
        paper=PAPER,
        place="Table 1",
        statement="On MAD MesaNet has the best average of the recurrent models, and that of the Transformer.",
        statements=(
            *(Above(Term("mesa", "average"), Term(rule, "average")) for rule in ("mamba2", "gla", "gated_deltanet")),
            Near(Term("mesa", "average"), Term("softmax", "average"), 3),
        ),
        unit="macro accuracy [%]",
        cpu=Size(
            _mad(SMALL_MAD, _rules(4, ("mamba2", "gla", "gated_deltanet")), Effort()),
            20,
            "Short sequences, 300 updates; not all baselines.",
        ),
        gpu=Size(
            _mad(
                _published(),
                _rules(8, ("mamba2", "gla", "gated_deltanet")),
                Effort(rates=(1e-3,), decays=(0.1,), training={"epochs": 2}),
            ),
            10,
            "The five base settings, 2 of 200 epochs, one learning rate; not all baselines.",
        ),
        paper_size=Size(
            _mad(_published(), _rules(8, RULES), Effort()), 20_000, "The five base settings; the paper averages 66."
        ),
        picture=Bars("macro accuracy [%]"),
        figures={
            name: dict(zip((*COLUMNS, "average"), row, strict=True))
            for name, row in {
                "mamba2": (100, 51.2, 42.0, 95.4, 41.3, 66.0),
                "gla": (100, 39.0, 82.5, 96.1, 42.3, 72.0),
                "mlstm": (100, 47.6, 79.8, 95.4, 43.4, 73.2),
                "deltanet": (100, 55.5, 40.8, 98.8, 43.3, 67.7),
                "gated_deltanet": (100, 32.7, 81.7, 95.7, 45.0, 71.0),
                "mesa": (100, 58.5, 77.2, 99.2, 45.4, 76.1),
                "softmax": (100, 48.6, 84.7, 96.0, 49.5, 75.8),
            }.items()
        },
        remark="The paper's settings are not those of MAD's code, which it names as their source.",
    )
}

CLAIMS: dict[str, Claim] = {**SPEED, **FIG8, **TABLE1}
