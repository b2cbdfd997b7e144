"""LoLCATs: Low-rank Linearization of Large Language Models (Zhang et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

from fastweights.recipes.recipe import ConversionRecipe, Stated, TableRow, rows_of

S31, S41, S42 = (f"LoLCATs (workshop), section {number}" for number in ("3.1", "4.1", "4.2"))
TABLE_1, TABLE_2 = (f"LoLCATs (workshop), Table {number}" for number in (1, 2))
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
MISTRAL_7B = {**LLAMA_3_8B, "vocab_size": 32_000, "max_position_embeddings": 32_768}
GAPS = (
    "rates fall in a straight line to the end of a stage; the paper names no schedule",
    "tokens of a stage are counted with the padding and packing of our sequences; the paper counts"
    " two epochs",
    "the loss of attention weights is a mean over queries and heads; eq. 7 is of one query",
)
LICENCE = "the model has to be accepted by its licence on the hub first"

WORKSHOP = ConversionRecipe(
    name="lolcats-8b-workshop",
    paper="LoLCATs (workshop, 2024)",
    data=Stated("Alpaca, 50,000 instructions", S41),
    source="hub:tatsu-lab/alpaca",
    hardware=Stated("one GPU of 40 GB is enough", CODE),
    device="a100-40gb",
    devices=Stated(1, CODE),
    hours=Stated("not said", SILENT),
    tokens=Stated(4 * EPOCH, f"{S42}: two epochs of each stage"),
    length=Stated(1024, CODE),
    batch=Stated(8, f"{S42}: by accumulating gradients"),
    gaps=(*GAPS, LICENCE),
    model=Stated("meta-llama/Meta-Llama-3-8B", S41),
    shape=Stated(LLAMA_3_8B, "config.json of the model"),
    recipe="workshop",
    features=Stated("exp-skip", f"{S42}; eq. 6"),
    window=Stated(16, S42),
    rank=Stated(8, S31),
    transfer_lr=Stated(1e-2, S42),
    finetune_lr=Stated(1e-4, S42),
    transfer_tokens=Stated(2 * EPOCH, f"{S42}: two epochs"),
)
LATER = replace(
    WORKSHOP,
    name="lolcats-8b",
    paper="LoLCATs (arXiv 2410.10254)",
    gaps=(GAPS[0], GAPS[1], LICENCE),
    recipe="lolcats",
    features=Stated("hedgehog", CODE),
    window=Stated(64, CODE),
)
LINEAR = replace(WORKSHOP, name="lolcats-8b-exp", window=Stated(0, f"{S42}: LOLCAT-l, no window"))


def _in_table_1(feature: str, transfer: bool) -> ConversionRecipe:
    """The feature map f(x W + x) alone, with attention transfer or without."""
    end = "" if transfer else "-no-transfer"
    found = replace(
        LINEAR,
        name=f"lolcats-8b-{feature}{end}",
        features=Stated(f"{feature}-skip", f"{TABLE_1}; eq. 6"),
    )
    if transfer:
        return found
    none = Stated(0.0, f"{TABLE_1}: Transfer? ×")
    return replace(found, transfer_tokens=none, tokens=Stated(2 * EPOCH, f"{TABLE_1}: PPL@2"))


MAPS = {"1 + ELU(xW + x)": "elu", "ReLU(xW + x)": "relu", "exp(xW + x)": "exp"}
MISTRAL = {
    "paper": "LoLCATs (workshop, 2024)",
    "model": Stated("mistralai/Mistral-7B-v0.1", S42),
    "shape": Stated(MISTRAL_7B, "config.json of the model"),
}
T2R = replace(
    WORKSHOP,
    name="lolcats-mistral-7b-t2r",
    **MISTRAL,
    hardware=Stated("not said", SILENT),
    device="b200",
    tokens=Stated(4 * EPOCH, f"{TABLE_2}: +0.04B"),
    gaps=(
        GAPS[0],
        "features are [relu(x W), relu(-x W)] with W of half a head's channels; T2R's own have a"
        " bias and one sign",
        "the rate, the batch and that all weights are trained are T2R's or ours: the paper trained"
        " it, and says the tokens alone",
    ),
    recipe="t2r",
    features=Stated("relu", "LoLCATs (workshop), section 2, of T2R"),
    window=Stated(0, "LoLCATs (workshop), section 2, of T2R"),
    rank=Stated(0, SILENT),
    finetune_lr=Stated(1e-4, f"{SILENT}; as {S42}"),
    transfer_tokens=Stated(0.0, f"{S42}: no transfer"),
    dtype="float32",
)
RECIPES = (
    LATER,
    WORKSHOP,
    *(_in_table_1(name, transfer) for name in MAPS.values() for transfer in (True, False)),
    replace(WORKSHOP, name="lolcats-mistral-7b-workshop", **MISTRAL),
    replace(LINEAR, name="lolcats-mistral-7b-exp", **MISTRAL),
    T2R,
)

SUPRA = (
    "a published checkpoint (TRI-ML/mistral-supra), in a format that fastweights import does not"
    " read; `fastweights linearize MODEL --recipe supra` trains one"
)
EVALUATED = {
    **dict.fromkeys(
        ("StripedHyena", "RWKV-v5 (EagleX)", "Mamba-7B"),
        "a published checkpoint, in a format that fastweights import does not read",
    ),
    "RWKV-v6 (Finch)": "fastweights import RWKV/v6-Finch-7B-HF --out FOLDER",
    "Llama 2 7B": "fastweights eval tasks meta-llama/Llama-2-7b-hf --data FOLDER",
    "Mistral 7B": "fastweights eval tasks mistralai/Mistral-7B-v0.1 --data FOLDER",
    "Llama 3 8B": "fastweights eval tasks meta-llama/Meta-Llama-3-8B --data FOLDER",
}
ROWS: tuple[TableRow, ...] = rows_of(
    RECIPES,
    {
        TABLE_1: {
            **{
                f"{name}, transfer {mark}": f"lolcats-8b-{feature}{end}"
                for mark, end in (("×", "-no-transfer"), ("✓", ""))
                for name, feature in MAPS.items()
            },
            "Softmax": "PPL@0 is in each conversion's evaluation.json; PPL@2: `fastweights train"
            " --from MODEL --lora 8`",
        },
        TABLE_2: {
            "Mistral 7B T2R, +0.04B": "lolcats-mistral-7b-t2r",
            "Mistral 7B SUPRA, +20B": SUPRA,
            "Mistral 7B SUPRA, +100B": SUPRA,
            "Llama 3 8B LOLCAT-l, +0.04B": "lolcats-8b-exp",
            "Llama 3 8B LOLCAT-w, +0.04B": "lolcats-8b-workshop",
            "Mistral 7B LOLCAT-l, +0.04B": "lolcats-mistral-7b-exp",
            "Mistral 7B LOLCAT-w, +0.04B": "lolcats-mistral-7b-workshop",
            **EVALUATED,
        },
        "LoLCATs (arXiv 2410.10254)": {"Llama 3 8B": "lolcats-8b"},
    },
)
