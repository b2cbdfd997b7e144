"""MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald et al., 2025)."""

from __future__ import annotations

from fastweights.recipes.recipe import Stated, TrainingRecipe

F1, F3, F4, F6 = (f"MesaNet, appendix F.{part}" for part in (1, 3, 4, 6))
TABLE_7 = "MesaNet, Table 7"
SILENT = "ours: the paper is silent"
RATES = {
    ("140m", 15): 0.003,
    ("140m", 50): 0.00095,
    ("440m", 15): 0.0025,
    ("440m", 50): 0.001,
    ("940m", 15): 0.002,
    ("940m", 50): 0.00085,
}
"""Peak learning rates of Mesa, by size and billions of tokens."""
HOURS = {
    ("940m", 50): Stated("about 36 on TPUs of generation 5, their number not said", F6),
    ("440m", 15): Stated("3 to 12, by steps of the solver and devices", F6),
}


def _recipe(size: str, billions: int) -> TrainingRecipe:
    return TrainingRecipe(
        name=f"mesanet-{size}" if billions == 50 else f"mesanet-{size}-{billions}b",
        paper="MesaNet (von Oswald et al., 2025)",
        data=Stated("SlimPajama", F1),
        source="hub:cerebras/SlimPajama-627B",
        hardware=Stated("TPUv5, batch divided, the model whole on each", F6),
        device="h100",
        devices=Stated(8, f"{SILENT}: the number of TPUs is not said"),
        hours=HOURS.get((size, billions), Stated("not said", SILENT)),
        tokens=Stated(billions * 1e9, F1),
        length=Stated(2048, F1),
        batch=Stated(256, F3),
        gaps=(
            "betas of (0.9, 0.98); the command has (0.9, 0.95), Python's AdamW(betas=…) any",
            "the warm-up begins at 1e-6; the command's at the peak / (warm-up + 1)",
        ),
        preset=f"mesanet-{size}",
        parameters=Stated(float(size[:-1]) * 1e6, F4),
        tokenizer=Stated("openai-community/gpt2", F1),
        lr=Stated(RATES[size, billions], TABLE_7),
        schedule=Stated("cosine", f"{F3}: to a tenth"),
        warmup=Stated(2000, F3),
        betas=Stated((0.9, 0.98), F3),
        weight_decay=Stated(0.1, F3),
        clip=Stated(1.0, F3),
        precision=Stated("bf16", f"{F3}: weights in float32"),
    )


RECIPES = tuple(_recipe(size, billions) for size, billions in RATES)
