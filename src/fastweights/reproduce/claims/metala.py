"""MetaLA (Chou et al., 2024)."""

from __future__ import annotations

from fastweights.reproduce.claim import Above, Claim, Near, Size, Term
from fastweights.reproduce.pictures import Curves
from fastweights.reproduce.speed import Models, Timed, TrainingSteps
from fastweights.reproduce.theory import Drawn, Theorem

PAPER = "MetaLA"


def _theorem(place: str, source: str, statement: str, *statements: Above | Near) -> Claim:
    size = Size(Theorem(source), 0.1)
    return Claim(PAPER, place, statement, statements, "", size, size, size, Drawn(source))


THEORY = {
    "metala-a2.1": _theorem(
        "Proposition A2.1",
        "MetaLA Proposition A2.1",
        "Only a dynamic decay can replace row 1 of a full state by a new value (C1).",
        Above(Term("no decay", quantity="error of row 1"), 0.1),
        Above(Term("fixed decay", quantity="error of row 1"), 0.1),
        Near(Term("dynamic decay", quantity="error of row 1"), 0, 1e-12),
        Near(Term("tied key 1 - α", quantity="error of row 1"), 0, 1e-12),
    ),
    "metala-a2.2": _theorem(
        "Proposition A2.2",
        "MetaLA Proposition A2.2",
        "(Q, K, Λ_t), (Q, K) and (Q, Λ_t) draw any attention map with bounded parameters; a fixed decay does not.",
        *(
            Near(Term(groups, quantity="error of the map"), 0, 1e-12)
            for groups in ("(Q, K)", "(Q, K, Λ_t)", "(Q, Λ_t)")
        ),
        Near(Term("(Q, Λ_t)", quantity="largest key"), 1, 1e-12),
        Above(Term("fixed decay", -1, "largest key"), 1e6),
    ),
    "metala-a2.3": _theorem(
        "Proposition A2.3",
        "MetaLA Proposition A2.3",
        "(Q, Λ_t) alone is the least choice of parameter groups with C1 and C2 (C3).",
        Near(Term("Q, Λ_t", quantity="meets C1 and C2"), 1, 0),
        Near(Term("fewest that suffice", quantity="groups"), Term("Q, Λ_t", quantity="groups"), 0),
        Near(Term("choices with so few", quantity="groups"), 1, 0),
    ),
}

# Figure A2: throughput against length ---------------------------------------------------------------------------------


def _steps(models: Models, tokens: int, lengths: tuple[int, ...], repeats: int) -> Timed:
    runs = tuple(TrainingSteps(models, tokens, length, repeats) for length in lengths)
    return Timed(runs, kept=tuple(models.mixers), over=(("metala", "gla"), ("metala", "mamba")))


def _models(width: int, layers: int, heads: int, dtype: str = "float32") -> Models:
    """The paper's four, all with a SwiGLU; Mamba alone in its own block, as its code has it."""
    fields = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": layers}
    mixers = {name: ({"name": name, "heads": heads},) for name in ("metala", "gla", "softmax")}
    return Models(fields, {**mixers, "mamba": ({"name": "mamba"},)}, dtype)


SPEED = {
    "metala-figa2": Claim(
        paper=PAPER,
        place="Figure A2",
        statement="Training speed stays as sequences grow, unlike the Transformer's; it is that of GLA, above Mamba's.",
        statements=(
            Above(Term("metala", quantity="kept"), 0.8),
            Above(Term("metala", quantity="kept"), Term("softmax", quantity="kept")),
            Above(Term("metala"), Term("softmax")),
            Near(Term("metala / gla", quantity="quotient"), 1, 0.25),
            Above(Term("metala"), Term("mamba")),
        ),
        unit="thousand tokens per second",
        cpu=Size(_steps(_models(128, 2, 2), 8192, (256, 1024, 4096, 8192), 5), 3),
        gpu=Size(_steps(_models(1024, 8, 8, "bfloat16"), 32_768, (1024, 4096, 16_384, 32_768), 5), 5),
        paper_size=Size(_steps(_models(2048, 24, 16, "bfloat16"), 32_768, (2048, 4096, 8192, 16_384, 32_768), 10), 20),
        picture=Curves("tokens per sequence", "thousand tokens / s", "x"),
        remark="The figure prints no numbers. Models of 1.3B parameters on an A800.",
    )
}

CLAIMS: dict[str, Claim] = {**THEORY, **SPEED}
