"""LoLCATs: Low-rank Linearization of Large Language Models (Zhang et al., 2024)."""

from __future__ import annotations

from fastweights.recipes.recipe import ConversionRecipe, Stated

S4 = "LoLCATs (workshop), section 4.2"
CODE = "LoLCATs' code, its configurations; the workshop paper is silent"
SILENT = "ours: the paper is silent"
EPOCH = 10e6
"""Tokens of Alpaca."""
LLAMA_3_8B: dict[str, int | bool | float] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _recipe(name: str, paper: str, recipe: str, window: Stated[int]) -> ConversionRecipe:
    return ConversionRecipe(
        name=name,
        paper=paper,
        data=Stated("Alpaca, 50,000 instructions", "LoLCATs (workshop), section 4.1"),
        source="hub:tatsu-lab/alpaca",
        hardware=Stated("one GPU of 40 GB is enough", CODE),
        device="a100-40gb",
        devices=Stated(1, CODE),
        hours=Stated("not said", SILENT),
        tokens=Stated(4 * EPOCH, f"{S4}: two epochs of each stage"),
        length=Stated(1024, CODE),
        batch=Stated(8, f"{S4}: by accumulating gradients"),
        gaps=("the model has to be accepted by its licence on the hub first",),
        model=Stated("meta-llama/Meta-Llama-3-8B", "LoLCATs (workshop), section 4.1"),
        shape=Stated(LLAMA_3_8B, "config.json of the model"),
        recipe=recipe,
        window=window,
        rank=Stated(8, "LoLCATs (workshop), section 3.1"),
        transfer_lr=Stated(1e-2, S4),
        finetune_lr=Stated(1e-4, S4),
        transfer_tokens=Stated(2 * EPOCH, f"{S4}: two epochs"),
    )


RECIPES = (
    _recipe("lolcats-8b", "LoLCATs (arXiv 2410.10254)", "lolcats", Stated(64, CODE)),
    _recipe("lolcats-8b-workshop", "LoLCATs (workshop, 2024)", "workshop", Stated(16, S4)),
)
