"""MesaNet (von Oswald et al., 2025)."""

from __future__ import annotations

from fastweights.reproduce.claim import Above, Claim, Size, Term
from fastweights.reproduce.pictures import Curves
from fastweights.reproduce.speed import Models, Timed, Token, TrainingSteps

PAPER = "MesaNet"

# Figure 2: the cost of solving ----------------------------------------------------------------------------------------


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

CLAIMS: dict[str, Claim] = {**SPEED}
