"""MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.recipes.recipe import Stated, TableRow, TrainingRecipe, rows_of

F1, F3, F4, F6 = (f"MesaNet, appendix F.{part}" for part in (1, 3, 4, 6))
SILENT = "ours: the paper is silent"
MODELS = {
    "Transformer": "-transformer",
    "Mamba2": "-mamba2",
    "GLA": "-gla",
    "xLSTM": "-mlstm",
    "DeltaNet": "-deltanet",
    "Gated DeltaNet": "-gated-deltanet",
    "Hawk": "-hawk",
    "Hawk-Mesa": "-hawk-mesa",
    "Mesa": "",
}
"""The models of Table 7, and the ends of their presets' names."""
TABLE_7 = {
    ("140m", 15): (0.0025, 0.003, 0.002, 0.0025, 0.003, 0.001, 0.002, 0.0025, 0.003),
    ("140m", 50): (0.003, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.00095),
    ("440m", 15): (0.0015, 0.0025, 0.0025, 0.003, 0.003, 0.0025, 0.0025, 0.002, 0.0025),
    ("440m", 50): (0.001, 0.001, 0.00095, 0.0009, 0.00085, 0.00095, 0.0009, 0.0009, 0.001),
    ("940m", 15): (0.002, 0.002, 0.002, 0.0015, 0.0015, 0.002, 0.002, 0.002, 0.002),
    ("940m", 50): (0.0008, 0.0009, 0.00085, 0.0008, 0.0008, 0.0009, 0.0009, 0.00085, 0.00085),
}
"""Peak learning rates by size and billions of tokens, in the order of `MODELS`."""
WINDOWS = (4, 64, 256, 1024)
SWA_RATE = Stated(0.001, f"{F4}: of all sliding windows")
HOURS = {
    ("940m", 50): Stated("about 36 on TPUs of generation 5, their number not said", F6),
    ("440m", 15): Stated("3 to 12, by steps of the solver and devices", F6),
}
GAPS = (
    "the warm-up begins at 1e-6; the command's at the peak / (warm-up + 1)",
    "the separators of documents are predicted; appendix F.1 leaves them out of the loss",
    "a token sees its own document; appendix F.1 fills sequences with several, which --across shows"
    " it",
    "one rate, the one that the paper found best of five (appendix F.4)",
    "blocks of the text are shuffled by the seed; the paper has one order for all models",
)
MAMBA2 = "G decays by γ, as Table 3 has it; appendix D.1 calls Mamba2 non-gated"


def _name(size: str, billions: int, end: str) -> str:
    return f"mesanet-{size}{end}" + ("" if billions == 50 else f"-{billions}b")


def _recipe(size: str, billions: int, end: str, lr: Stated[float]) -> TrainingRecipe:
    return TrainingRecipe(
        name=_name(size, billions, end),
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
        gaps=(*GAPS, *([MAMBA2] if end == "-mamba2" else [])),
        preset=f"mesanet-{size}{end}",
        parameters=Stated(float(size[:-1]) * 1e6, F4),
        tokenizer=Stated("openai-community/gpt2", F1),
        lr=lr,
        schedule=Stated("cosine", f"{F3}: to a tenth"),
        warmup=Stated(2000, F3),
        betas=Stated((0.9, 0.98), F3),
        weight_decay=Stated(0.1, F3),
        clip=Stated(1.0, F3),
        precision=Stated("bf16", f"{F3}: weights in float32"),
    )


def _recipes() -> Iterator[TrainingRecipe]:
    for (size, billions), rates in TABLE_7.items():
        for end, lr in zip(MODELS.values(), rates, strict=True):
            yield _recipe(size, billions, end, Stated(lr, "MesaNet, Table 7"))
        for window in WINDOWS if size != "140m" else ():
            yield _recipe(size, billions, f"-swa-{window}", SWA_RATE)


RECIPES = tuple(_recipes())

MAD = "fastweights reproduce mesanet-table1 --size paper (five of MAD's 66 settings)"
IN_TABLE_2 = (
    *("Hawk", "Mamba2", "GLA", "xLSTM", "DeltaNet", "Gated DeltaNet", "Mesa", "Hawk-Mesa"),
    *("SWA-4", "SWA-64", "SWA-1024", "Transformer"),
)
SIZES = {"140m": "Small", "440m": "Medium", "940m": "Large"}
LAYERS = ("Mamba2", "GLA", "DeltaNet", "Gated DeltaNet", "mLSTM", "Mesa")
ROWS: tuple[TableRow, ...] = rows_of(
    RECIPES,
    {
        "MesaNet, Table 1": dict.fromkeys(MODELS, MAD),
        "MesaNet, Table 2": {
            model: _name("940m", 50, MODELS.get(model, f"-{model.lower()}")) for model in IN_TABLE_2
        },
        "MesaNet, Table 3": dict.fromkeys(LAYERS, "fastweights table mesanet-3"),
        "MesaNet, Table 4": dict.fromkeys(
            ("MHA", "GLMHA", "DN", "MESA"), "fastweights table mesanet-4"
        ),
        "MesaNet, Table 7": {
            f"{SIZES[size]} {billions}: {model}": _name(size, billions, end)
            for size, billions in TABLE_7
            for model, end in MODELS.items()
        },
        "MesaNet, Table 8": {
            f"{size}, {billions}B: SWA-{window}": _name(size, billions, f"-swa-{window}")
            for size, billions in TABLE_7
            if size != "140m"
            for window in WINDOWS
        },
    },
)
