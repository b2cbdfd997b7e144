"""MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map (Chou et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastweights.recipes.recipe import Stated, TableRow, TrainingRecipe, rows_of

A4 = "MetaLA, appendix A4, Language Modeling"
SILENT = "ours: the paper is silent"


class _PublishedRun(NamedTuple):
    """What the paper says once for a group of models."""

    batch: Stated[int]
    lr: Stated[float]
    devices: Stated[int]
    hardware: Stated[str]


SMALL = _PublishedRun(
    Stated(256, f"{A4}: 0.5M tokens"), Stated(3e-4, A4), Stated(16, A4), Stated("16 A100", A4)
)
LARGE = _PublishedRun(
    Stated(1024, f"{A4}: 2M tokens"), Stated(2e-4, A4), Stated(32, A4), Stated("32 A100", A4)
)
AS_LARGE = f"{SILENT}; as for 1.4B"
SCALED = _PublishedRun(
    Stated(1024, AS_LARGE), Stated(2e-4, AS_LARGE), Stated(32, AS_LARGE), Stated("not said", SILENT)
)

TRAINING = (
    "the paper trained in fp16; the command has --bf16",
    "the published text of the Pile is no longer distributed whole; the source named here is a part"
    " of it",
    "a token sees its own document; GPT-NeoX, which the paper used, shows it the earlier ones of"
    " its sequence, as --across does",
    "layers and widths are ours: the paper gives the number of parameters",
)
LAYER = (
    "eq. A31's convolution has no activation; here, as in the published code, it has SiLU",
    "eq. A36 normalises the concatenated heads; here, as in the published code, each head alone",
    "α = σ(x W)^(1/16) as in the published code; eq. A32 has no exponent",
)
BASELINE = ("the baseline has MetaLA's blocks around its own layer, where the paper is silent",)


def _recipe(
    name: str, preset: str, billions: float, tokens: int, setting: _PublishedRun, place: str,
    length: int = 2048, gaps: tuple[str, ...] = (),
) -> TrainingRecipe:  # fmt: skip
    said_tokens = f"{SILENT}; as in Table A9" if length > 2048 else place
    return TrainingRecipe(
        name=name,
        paper="MetaLA (Chou et al., 2024)",
        data=Stated("the Pile", "MetaLA, section 6, Language Modeling"),
        source="hub:monology/pile-uncopyrighted",
        hardware=setting.hardware,
        device="a100",
        devices=setting.devices,
        hours=Stated("not said", SILENT),
        tokens=Stated(tokens * 1e9, said_tokens),
        length=Stated(length, place if length > 2048 else A4),
        batch=setting.batch if length == 2048 else Stated(256, f"{SILENT}; 2M tokens"),
        gaps=(*TRAINING, *gaps),
        preset=preset,
        parameters=Stated(billions * 1e9, place),
        tokenizer=Stated("EleutherAI/gpt-neox-20b", f"{SILENT}; {A4} names GPT-NeoX's code"),
        lr=setting.lr,
        schedule=Stated("cosine", f"{SILENT}; the schedule of appendix A4 for LRA"),
        warmup=Stated(2000, SILENT),
        betas=Stated((0.9, 0.95), SILENT),
        weight_decay=Stated(0.1, SILENT),
        clip=Stated(1.0, SILENT),
        precision=Stated("fp16", A4),
    )


def _of_one_size() -> Iterator[TrainingRecipe]:
    """Tables 4, 5, 8 and A5."""
    t5, t8 = "MetaLA, Table 5", "MetaLA, Table 8"
    yield _recipe("metala-360m", "metala-360m", 0.36, 15, SMALL, t5, gaps=LAYER)
    for end in ("without-augmentation", "without-conv", "with-key"):
        yield _recipe(f"metala-360m-{end}", f"metala-360m-{end}", 0.36, 15, SMALL, t8, gaps=LAYER)
    yield _recipe("metala-360m-pythia", "pythia-410m", 0.41, 15, SMALL, t5)
    yield _recipe("metala-360m-mamba", "mamba-370m", 0.37, 15, SMALL, t5)
    yield _recipe("metala-360m-gla", "metala-360m-gla", 0.36, 15, SMALL, t5, gaps=BASELINE)
    yield _recipe("metala-1.4b-mamba", "mamba-1.4b", 1.4, 100, LARGE, t5)
    yield _recipe("metala-1.3b", "metala-1.3b", 1.3, 100, LARGE, t5, gaps=LAYER)
    yield _recipe("metala-1.4b", "metala-1.4b", 1.4, 300, LARGE, t5, gaps=LAYER)


SIZES = {"380m": (0.38, 0.41), "1b": (1.0, 1.0), "3b": (3.0, 3.0)}
"""Billions of parameters in Table A9, of MetaLA and of LLaMA2."""


def _scaled() -> Iterator[TrainingRecipe]:
    """Tables A8 (sequences of 8K) and A9."""
    a8, a9 = "MetaLA, Table A8", "MetaLA, Table A9"
    for size, (own, llama) in SIZES.items():
        name = f"metala-{size}"
        yield _recipe(name, name, own, 300, SCALED, a9, gaps=LAYER)
        yield _recipe(f"{name}-llama", f"{name}-softmax", llama, 300, SCALED, a9, gaps=BASELINE)
        rounded = round(own, 1)
        for end, preset, gaps in (
            ("", name, LAYER),
            ("-llama", f"{name}-softmax", BASELINE),
            ("-hgrn2", f"{name}-hgrn2", BASELINE),
        ):
            yield _recipe(
                f"{name}{end}-8k", preset, rounded, 300, SCALED, a8, length=8192, gaps=gaps
            )


RECIPES = (*_of_one_size(), *_scaled())

IMAGES = "fastweights reproduce metala-table6 --size paper --data FOLDER"
IMAGE_GAPS = (
    "the best of 300 epochs by one training image in 25, which is not trained on; the papers do not"
    " say which epoch counts",
    "of DeiT's training MetaLA's has RandAugment, erasing, stochastic depth, repeated augmentation,"
    " smoothed labels and the warm-up; the paper follows DeiT without mixup and CutMix",
    "repeated augmentation shows an image three times in one batch; DeiT's devices see one each",
    "bfloat16, where DeiT has fp16; MetaLA is silent",
    "weight decay spares DeiT's embedding of patches, which timm's decays",
    "the rate changes with every update, and its cosine begins behind the warm-up",
    "a GLU of 3 d, and one set of weights for both directions, which give the printed numbers of"
    " parameters; the paper is silent",
    "HGRN, GLA and Mamba in MetaLA's blocks and training, where the paper is silent; Mamba's MLPs"
    " are narrower, for the printed number of parameters",
    "DeiT is trained here by its own recipe with mixup and CutMix; the paper cites its numbers",
)
COSFORMER2 = "cosFormer2 is no layer of this library"
LARGE_ROWS = {
    "Pythia 1.4B, 300B": "fastweights eval tasks EleutherAI/pythia-1.4b --data FOLDER",
    "HGRN 1B, 100B": "a published checkpoint, in a format that fastweights import does not read",
    "Mamba 1.4B, 100B": "metala-1.4b-mamba",
    "RetNet 1.3B, 100B": "fastweights import fla-hub/retnet-1.3B-100B --out FOLDER",
    "GLA 1.3B, 100B": "fastweights import fla-hub/gla-1.3B-100B --out FOLDER",
    "MetaLA a 1.3B, 100B": "metala-1.3b",
    "MetaLA b 1.4B, 300B": "metala-1.4b",
}
ALL_ROWS = {
    "Pythia 0.41B, 15B": "metala-360m-pythia",
    "Mamba 0.37B, 15B": "metala-360m-mamba",
    "GLA 0.36B, 15B": "metala-360m-gla",
    "MetaLA 0.36B, 15B": "metala-360m",
    **LARGE_ROWS,
}
ABLATED = {
    "MetaLA": "metala-360m",
    "MetaLA w/o selfaug": "metala-360m-without-augmentation",
    "MetaLA w/o conv": "metala-360m-without-conv",
    "MetaLA w/ key": "metala-360m-with-key",
}
NEEDLES = {
    f"{model} {round(SIZES[size][0], 1):g}B": f"metala-{size}{end}-8k"
    for size in SIZES
    for model, end in (("LLaMA2", "-llama"), ("HGRN2", "-hgrn2"), ("MetaLA", ""))
}
GROWN = {
    f"{model} {billions:g}B, 300B": by
    for size, (own, llama) in SIZES.items()
    for model, billions, by in (
        ("LLaMA2", llama, f"metala-{size}-llama"),
        ("Cosformer2", own, COSFORMER2),
        ("MetaLA", own, f"metala-{size}"),
    )
}
PICTURES = {
    f"{model}, {size}": IMAGES
    for model in ("Deit", "HGRN", "GLA", "Mamba", "MetaLA")
    for size in ("6M", "23M")
}
ROWS: tuple[TableRow, ...] = rows_of(
    RECIPES,
    {
        "MetaLA, Table 4": ALL_ROWS,
        "MetaLA, Table 5": ALL_ROWS,
        "MetaLA, Table 6": PICTURES,
        "MetaLA, Table 8": ABLATED,
        "MetaLA, Table A5": LARGE_ROWS,
        "MetaLA, Table A8": NEEDLES,
        "MetaLA, Table A9": GROWN,
    },
    {"MetaLA, Table 6": IMAGE_GAPS},
)
