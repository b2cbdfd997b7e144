"""MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map (Chou et al., 2024)."""

from __future__ import annotations

from fastweights.recipes.recipe import Stated, TrainingRecipe

A4 = "MetaLA, appendix A4, Language Modeling"
A9 = "MetaLA, appendix A5, Table A9"
SILENT = "ours: the paper is silent"
LENGTH = 2048


def _recipe(
    size: str,
    parameters: Stated[float],
    tokens: Stated[float],
    batch: Stated[int],
    lr: Stated[float],
    devices: Stated[int],
    hardware: Stated[str],
) -> TrainingRecipe:
    return TrainingRecipe(
        name=f"metala-{size}",
        paper="MetaLA (Chou et al., 2024)",
        data=Stated("the Pile", "MetaLA, section 6, Language Modeling"),
        source="hub:monology/pile-uncopyrighted",
        hardware=hardware,
        device="a100",
        devices=devices,
        hours=Stated("not said", SILENT),
        tokens=tokens,
        length=Stated(LENGTH, A4),
        batch=batch,
        gaps=(
            "the paper trained in fp16; the command has --bf16",
            "the published text of the Pile is no longer distributed whole; the source named here"
            " is a part of it",
        ),
        preset=f"metala-{size}",
        parameters=parameters,
        tokenizer=Stated("EleutherAI/gpt-neox-20b", f"{SILENT}; {A4} names GPT-NeoX's code"),
        lr=lr,
        schedule=Stated("cosine", f"{SILENT}; the schedule of appendix A4 for LRA"),
        warmup=Stated(2000, SILENT),
        betas=Stated((0.9, 0.95), SILENT),
        weight_decay=Stated(0.1, SILENT),
        clip=Stated(1.0, SILENT),
        precision=Stated("fp16", A4),
    )


RECIPES = (
    _recipe(
        "360m",
        Stated(0.36e9, "MetaLA, Table 4"),
        Stated(15e9, A4),
        Stated(256, f"{A4}: 0.5M tokens"),
        Stated(3e-4, A4),
        Stated(16, A4),
        Stated("16 A100", A4),
    ),
    _recipe(
        "1.4b",
        Stated(1.4e9, "MetaLA, Table 5"),
        Stated(300e9, A4),
        Stated(1024, f"{A4}: 2M tokens"),
        Stated(2e-4, A4),
        Stated(32, A4),
        Stated("32 A100", A4),
    ),
    _recipe(
        "3b",
        Stated(3e9, A9),
        Stated(300e9, A9),
        Stated(1024, f"{SILENT}; as for 1.4B"),
        Stated(2e-4, f"{SILENT}; as for 1.4B"),
        Stated(32, f"{SILENT}; as for 1.4B"),
        Stated("not said", SILENT),
    ),
)
