"""LoLCATs (Zhang et al., 2024)."""

from __future__ import annotations

from fastweights.reproduce.claim import Above, Claim, Near, Size, Term
from fastweights.reproduce.pictures import Curves
from fastweights.reproduce.speed import Generation, Models, Stretch, Timed

PAPER = "LoLCATs"

# Figure 2: decoding --------------------------------------------------------------------------------------------------


def _models(width: int, layers: int, heads: int, window: int, dtype: str = "float32") -> Models:
    fields = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": layers}
    windowed = {"name": "lolcats", "heads": heads, "window": window}
    return Models(fields, {"lolcats": (windowed,), "softmax": ({"name": "softmax", "heads": heads},)}, dtype)


def _decoding(
    models: Models, batches: tuple[int, ...], prompt: int, new: int, tokens: int, stretches: int, repeats: int
) -> Timed:
    batched = (Generation(models, batch, prompt, new, repeats) for batch in batches)
    along = (Stretch(models, series, tokens, stretches) for series in models.mixers)
    return Timed((*batched, *along), kept=tuple(models.mixers))


SPEED = {
    "lolcats-fig2": Claim(
        paper=PAPER,
        place="Figure 2",
        statement="Linearized models generate faster at large batches and past some length; speed and memory stay.",
        statements=(
            Above(Term("lolcats"), Term("softmax")),
            Above(Term("lolcats", quantity="along one sequence"), Term("softmax", quantity="along one sequence")),
            Above(Term("lolcats", quantity="kept, along one sequence"), 0.8),
            Near(Term("lolcats", 0, "state [MB]"), Term("lolcats", -1, "state [MB]"), 0),
            Above(Term("softmax", -1, "state [MB]"), Term("lolcats", -1, "state [MB]")),
        ),
        unit="thousand tokens per second",
        cpu=Size(_decoding(_models(128, 2, 2, 16), (1, 8, 32), 1024, 64, 8192, 8, 5), 4),
        gpu=Size(_decoding(_models(1024, 8, 8, 64, "bfloat16"), (1, 8, 32, 128), 2048, 128, 32_768, 16, 5), 9),
        paper_size=Size(
            _decoding(_models(4096, 32, 32, 64, "bfloat16"), (1, 4, 8, 16, 32), 2048, 128, 131_072, 32, 3), 180
        ),
        picture=Curves("batch, or tokens generated", "thousand tokens / s", "x"),
        remark="Mistral 7B beside FlashAttention-2 on an A100: 2.5 to 4 times as fast at large batches, up to twice "
        "beyond 16k tokens, slower below; memory × 1.1 from 512 to 131k tokens. The cost of a layer does not depend "
        "on its weights: these are new ones.",
    )
}

CLAIMS: dict[str, Claim] = {**SPEED}
