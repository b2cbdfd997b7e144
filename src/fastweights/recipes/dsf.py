"""Understanding the Differences in Foundation Models: the Dynamical Systems Framework (Sieber et
al., 2024)."""

from __future__ import annotations

from fastweights.recipes.recipe import Stated, TableRow, TrainingRecipe, rows_of

J3 = "DSF, appendix J.3"
SILENT = "ours: the paper is silent"
LOST = "ours: the number is missing in the text of the paper at hand"
EPOCH = 118e6
"""Tokens of WikiText-103 in Pythia's vocabulary."""
ATTENTIONS = {"Softmax Attention": "", "Linear Attention": "-linear", "Normalized": "-normalized"}
GAPS = (
    "the rate is Pythia's own; the paper sweeps several and says which was best in a number that is"
    " missing at hand",
    "a token sees its own article; Pythia's see the earlier ones of their sequence, as --across"
    " does",
)
NO_POSITIONS = "no rotary positions and no biases in the attention; appendix J.3 keeps Pythia's"


def _recipe(end: str) -> TrainingRecipe:
    steps = 50 * EPOCH / (256 * 1024)
    return TrainingRecipe(
        name=f"dsf-wikitext{end or '-softmax'}",
        paper="DSF (Sieber et al., 2024)",
        data=Stated("WikiText-103", J3),
        source="hub:Salesforce/wikitext:wikitext-103-raw-v1:train",
        hardware=Stated("one node of 10 A100 (80 GB)", "DSF, appendix K"),
        device="a100",
        devices=Stated(8, f"{SILENT}; of a node's ten"),
        hours=Stated("about 14 for each attention's sweep of rates", "DSF, appendix K"),
        tokens=Stated(50 * EPOCH, f"{J3}: 50 epochs"),
        length=Stated(1024, J3),
        batch=Stated(256, LOST),
        gaps=(*GAPS, *([NO_POSITIONS] if end else [])),
        preset=f"pythia-70m{end}",
        parameters=Stated(70e6, J3),
        tokenizer=Stated("EleutherAI/gpt-neox-20b", f"{SILENT}; Pythia's"),
        lr=Stated(1e-3, LOST),
        schedule=Stated("cosine", f"{SILENT} about what follows the warm-up"),
        warmup=Stated(round(steps / 10), f"{J3}: 10 %"),
        betas=Stated((0.9, 0.95), LOST),
        weight_decay=Stated(0.1, J3),
        clip=Stated(1.0, LOST),
        precision=Stated("bf16", SILENT),
        stream=False,
    )


RECIPES = tuple(map(_recipe, ATTENTIONS.values()))

ARENA = (
    "ListOps by `fastweights reproduce dsf-table3 --size paper`; Image by `dsf-table3-image`, with"
    " MetaLA's model; Text, Retrieval and Pathfinder have no settings of DSF's here"
)
NORMALISERS = ("(22) exp", "(29) softplus", "(30) sigmoid")
ROWS: tuple[TableRow, ...] = rows_of(
    RECIPES,
    {
        "DSF, Table 1, WikiText-103": {
            name: f"dsf-wikitext{end or '-softmax'}" for name, end in ATTENTIONS.items()
        },
        "DSF, Table 1, LRA": dict.fromkeys((*ATTENTIONS, "S6"), "the average of Table 3"),
        "DSF, Table 2": dict.fromkeys(
            NORMALISERS, "fastweights reproduce dsf-table2 --size paper --data FOLDER"
        ),
        "DSF, Table 3": dict.fromkeys((*ATTENTIONS, "S6"), ARENA),
    },
)
