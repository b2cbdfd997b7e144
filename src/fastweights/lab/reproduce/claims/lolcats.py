"""LoLCATs (Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from fastweights.lab.reproduce.claim import Above, Claim, ClaimSize, Near, Term
from fastweights.lab.reproduce.computed import BATCHES, SHARE, computed
from fastweights.lab.reproduce.conversion import (
    AFTER,
    APART,
    BEFORE,
    ERROR,
    Conversions,
    ProvidedTeacher,
    TrainedTeacher,
    Updates,
    with_updates,
)
from fastweights.lab.reproduce.pictures import Bars, Curves
from fastweights.lab.reproduce.speed import Generation, GenerationSegments, Models, SpeedExperiment
from fastweights.lab.reproduce.text import Tuning
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.training.data.corpus import Text
from fastweights.training.data.tokenizers import BPE

PAPER = "LoLCATs"


def _above(first: str, second: str, quantity: str) -> Above:
    return Above(Term(first, quantity=quantity), Term(second, quantity=quantity))


# Figure 2: decoding -------------------------------------------------------------------------------


def _models(width: int, layers: int, heads: int, window: int, dtype: str = "float32") -> Models:
    fields = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": layers}
    windowed = {"name": "lolcats", "heads": heads, "window": window}
    return Models(
        fields, {"lolcats": (windowed,), "softmax": ({"name": "softmax", "heads": heads},)}, dtype
    )


def _decoding(
    models: Models,
    batches: tuple[int, ...],
    prompt: int,
    new: int,
    tokens: int,
    stretches: int,
    repeats: int,
) -> SpeedExperiment:
    batched = (Generation(models, batch, prompt, new, repeats) for batch in batches)
    return SpeedExperiment(
        (*batched, GenerationSegments(models, tokens, stretches)), kept=tuple(models.mixers)
    )


SPEED = {
    "lolcats-fig2": Claim(
        paper=PAPER,
        place="Figure 2",
        statement=(
            "Linearized models generate faster at large batches and past some length; speed and"
            " memory stay."
        ),
        statements=(
            Above(Term("lolcats"), Term("softmax")),
            _above("lolcats", "softmax", "along one sequence"),
            _above("lolcats", "softmax", "kept, along one sequence"),
            Near(Term("lolcats", 0, "state [MB]"), Term("lolcats", -1, "state [MB]"), 0),
            Above(Term("softmax", -1, "state [MB]"), Term("lolcats", -1, "state [MB]")),
        ),
        unit="thousand tokens per second",
        cpu=ClaimSize(
            _decoding(_models(128, 2, 2, 16), (1, 8, 32), 1024, 64, 32_768, 8, 5),
            4,
            little="measured with the windowed layer, and the figure is of LOLCAT-l",
        ),
        gpu=ClaimSize(
            _decoding(
                _models(1024, 8, 8, 64, "bfloat16"), (1, 8, 32, 128), 2048, 128, 32_768, 16, 5
            ),
            9,
        ),
        paper_size=ClaimSize(
            _decoding(
                _models(4096, 32, 32, 64, "bfloat16"), (1, 4, 8, 16, 32), 2048, 128, 131_072, 32, 3
            ),
            180,
        ),
        picture=Curves("batch, or tokens generated", "thousand tokens / s", "x"),
        remark=(
            "The paper: Mistral 7B beside FlashAttention-2 on an A100, 2.5 to 4 times as"
            " fast at large batches, up to twice beyond 16k tokens, slower below; memory ×"
            " 1.1 from 512 to 131k tokens. Here weights are random."
        ),
    )
}

# Table 1, Figures 3-6: attention transfer ---------------------------------------------------------

MAPS = ("elu", "relu", "exp")
SMALL = TrainedTeacher(
    "llama",
    {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
    Text(("shakespeare",), tokenization=BPE(512)),
    rate=3e-3,
    steps=300,
    batch=8,
    length=128,
)
TRAINED = replace(SMALL, steps=1500)
"""After 300 steps, whoever trains all weights gains from the training alone."""
MEDIUM = replace(
    SMALL,
    fields={**SMALL.fields, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
    steps=1500,
    batch=32,
    length=256,
)
LLAMA = ProvidedTeacher("model", "alpaca.json")
"""Llama 3 8B and Alpaca, in the paper's case."""
SMOLLM2 = ProvidedTeacher("smollm2", "alpaca.json")
"""A teacher that has been trained out."""
RATES = (3e-4, 1e-3, 3e-3)
"""Of adaptation: larger ones than the paper's 1e-4, since there are few updates."""
SEARCHED = (
    "Each method adapts at its best of three rates, 3e-4 to 3e-3, by a seed that is not judged; its"
    " transfer's is a hundred times as large, as the paper's."
)
PAPERS = (Updates(2500, 1e-2), Updates(2500, 1e-4))
"""Two epochs of 10 million tokens in each stage."""


def _linear(features: str) -> LinearizationRecipe:
    """The workshop's transfer, without its window."""
    return replace(RECIPES["workshop"], analog=LinearAttentionConfig(features, window=0))


def _without_transfer(recipe: LinearizationRecipe) -> LinearizationRecipe:
    return recipe.with_stages(recipe.whole)


def _table1(end: str = "") -> dict[str, LinearizationRecipe]:
    """Every feature map with and without transfer; `end` ends the names of the maps."""
    recipes = {}
    for name in MAPS:
        recipe = _linear(f"{name}{end}")
        recipes |= {f"{name}, transfer": recipe, name: _without_transfer(recipe)}
    return recipes


def _short(
    recipes: Mapping[str, LinearizationRecipe], transfer: Updates, adapt: Updates, batch: int = 8
) -> dict[str, LinearizationRecipe]:
    return {name: with_updates(recipe, transfer, adapt, batch) for name, recipe in recipes.items()}


def _tuned(
    recipes: Mapping[str, LinearizationRecipe],
    teacher: TrainedTeacher | ProvidedTeacher,
    steps: int,
    batch: int,
    length: int,
    held_out: int = 8192,
) -> Conversions:
    """Each stage by as many updates."""
    stage = Updates(steps, RATES[0])
    short = _short(recipes, stage, stage, batch)
    return Conversions(short, teacher, length, held_out, tuning=Tuning(RATES, (100,)))


def _transfers(quantity: str) -> tuple[Above, ...]:
    return tuple(_above(name, f"{name}, transfer", quantity) for name in MAPS)


def _best(quantity: str) -> tuple[Above, ...]:
    others = ("elu, transfer", "relu, transfer")
    return tuple(_above(name, "exp, transfer", quantity) for name in others)


PUBLISHED = {
    "elu": (6.58e4, 555.99, 17.13, 3.20),
    "relu": (6.20e4, 1420.72, 17.25, 3.31),
    "exp": (1.02e4, 6.78, 11.88, 1.76),
    "elu, transfer": (386.92, 3.38, 1.89, 0.28),
    "relu, transfer": (414.18, 3.52, 1.76, 0.21),
    "exp, transfer": (10.42, 3.11, 0.98, 0.12),
    "softmax": (20.51, 2.15, 0.0, 0.0),
}

MAPS_CPU = _tuned(_table1(), SMALL, 60, 8, 128)
MAPS_GPU = _tuned(_table1(), MEDIUM, 120, 8, 256)
MAPS_SMOLLM2 = _tuned(_table1(), SMOLLM2, 32, 1, 256, 2048)
MAPS_PAPER = Conversions(_short(_table1("-skip"), *PAPERS), LLAMA, 1024, 65_536, (0,))

TRANSFER = {
    "lolcats-table1": Claim(
        paper=PAPER,
        place="Table 1",
        statement=(
            "Attention transfer lowers perplexity before and after adapting, for all feature maps;"
            " exp is best."
        ),
        statements=(*_transfers(BEFORE), *_transfers(AFTER), *_best(BEFORE), *_best(AFTER)),
        unit="",
        cpu=ClaimSize(MAPS_CPU, 14, SEARCHED),
        gpu=ClaimSize(MAPS_GPU, 10, SEARCHED),
        paper_size=ClaimSize(MAPS_PAPER, 1500, "With eq. 6's features."),
        picture=Bars("perplexity, or distance", log=True),
        figures={
            name: dict(zip((BEFORE, AFTER, ERROR, APART), row, strict=True))
            for name, row in PUBLISHED.items()
        },
        remark=(
            "The paper's MSE is in its own units; here the error of outputs is relative."
            " Features are [f(x W), f(-x W)] with W of half a head's channels; the paper's"
            " eq. 6 has f(x W + x), W of d x d."
        ),
    ),
    "lolcats-fig3": Claim(
        paper=PAPER,
        place="Figures 3 to 6",
        statement=(
            "With attention transfer the weights of linear attention look like softmax's; without,"
            " they do not."
        ),
        statements=(*_transfers(APART), *_transfers(ERROR)),
        unit="",
        cpu=ClaimSize(MAPS_CPU, 0.2, "After Table 1."),
        gpu=ClaimSize(MAPS_GPU, 1, "After Table 1."),
        paper_size=ClaimSize(MAPS_PAPER, 10, "After Table 1."),
        picture=Bars("distance from softmax"),
        remark="The figures are pictures of maps.",
    ),
}

# Table 2: methods ---------------------------------------------------------------------------------


def _table2() -> dict[str, LinearizationRecipe]:
    return {
        "LOLCAT-w": RECIPES["workshop"],
        "LOLCAT-w, arXiv": replace(
            RECIPES["lolcats"],
            analog=LinearAttentionConfig(window=RECIPES["workshop"].analog.window),
        ),
        "LOLCAT-l": _linear("exp-skip"),
        "T2R": RECIPES["t2r"],
        "SUPRA": RECIPES["supra"],
    }


QUESTIONS = ("PIQA", "ARC-e", "ARC-c", "HellaSwag", "WinoGrande")
ACCURACIES = {
    "LOLCAT-w": (81.1, 81.4, 53.6, 77.4, 70.6),
    "LOLCAT-l": (79.4, 77.5, 45.6, 73.5, 53.1),
    "T2R": (53.5, 27.4, 26.8, 26.6, 51.2),
    "SUPRA": (80.4, 75.9, 45.8, 77.1, 70.3),
    "SUPRA, 20 billion tokens": (80.1, 74.6, 42.3, 74.8, 67.4),
}
"""Of Mistral 7B, in per cent; SUPRA with 100 billion tokens unless it says otherwise."""

METHODS_CPU = _tuned(_table2(), TRAINED, 60, 8, 128)
METHODS_SMOLLM2 = _tuned(_table2(), SMOLLM2, 32, 1, 256, 2048)

METHODS_COMPARED = {
    "lolcats-table2": Claim(
        paper=PAPER,
        place="Table 2",
        statement=(
            "LOLCAT with a window beats LOLCAT without one, which beats T2R; it also beats SUPRA."
        ),
        statements=(
            _above("LOLCAT-l", "LOLCAT-w", AFTER),
            _above("T2R", "LOLCAT-l", AFTER),
            _above("SUPRA", "LOLCAT-w", AFTER),
            _above("LOLCAT-l", "LOLCAT-w, arXiv", AFTER),
        ),
        unit="",
        cpu=ClaimSize(METHODS_CPU, 10, f"Perplexity, not accuracy. {SEARCHED}"),
        gpu=ClaimSize(
            _tuned(_table2(), MEDIUM, 120, 8, 256), 10, f"Perplexity, not accuracy. {SEARCHED}"
        ),
        paper_size=ClaimSize(
            Conversions(_short(_table2(), *PAPERS), LLAMA, 1024, 65_536, (0,)),
            1200,
            "Perplexity; zero-shot accuracies by fastweights eval on the models it leaves.",
        ),
        picture=Bars("perplexity, or distance", log=True),
        figures={
            name: {**dict(zip(QUESTIONS, row, strict=True)), "mean accuracy": fmean(row)}
            for name, row in ACCURACIES.items()
        },
        remark=(
            "The paper: accuracies of Mistral 7B. LOLCAT has eq. 6's features. SUPRA here keeps"
            " RoPE, and"
            " its φ is one matrix for x and -x. `arXiv` is the later LOLCAT-w: one"
            " normaliser, Hedgehog's features, the error of outputs."
        ),
    )
}

REAL = (
    "A second protocol, fixed before it was measured: SmolLM2-135M and Alpaca, 16,384 tokens for"
    f" each method. {SEARCHED}"
)
TRANSFER["lolcats-table1-smollm2"] = replace(
    TRANSFER["lolcats-table1"], cpu=ClaimSize(MAPS_SMOLLM2, 100, REAL)
)
METHODS_COMPARED["lolcats-table2-smollm2"] = replace(
    METHODS_COMPARED["lolcats-table2"],
    cpu=ClaimSize(METHODS_SMOLLM2, 80, f"Perplexity, not accuracy. {REAL}"),
)

TRAINED_SHARE = {
    "lolcats-share": computed(
        PAPER,
        "Section 3",
        "LoLCATs section 3",
        "LoRA trains less than 0.09 % of the parameters, both stages together less than 0.5 %.",
        Above(0.09, Term("LoRA", quantity=SHARE)),
        Above(0.5, Term("feature maps and LoRA", quantity=SHARE)),
        unit=SHARE,
        picture=Bars(SHARE),
        remark=(
            "Llama 3 8B without its weights, converted by this library: rank 8 on the"
            " four projections, W of d x d per query and key head. The abstract says 0.4"
            " %, the conclusion 0.1 %."
        ),
    )
}

MEMORY = {
    "lolcats-memory": computed(
        PAPER,
        "Figure 2, memory",
        "LoLCATs Figure 2",
        "The memory of a linearized model stays as it generates; softmax attention has none left"
        " beyond a batch of 16 and beyond 64k tokens (40 GB).",
        Near(Term("LoLCATs", -1), Term("LoLCATs", 0), 0),
        Above(Term("softmax", -1), Term("LoLCATs", -1)),
        Above(Term("softmax", -1, BATCHES), Term("LoLCATs", -1, BATCHES)),
        Above(Term("softmax", -1, BATCHES), 40),
        Above(Term("softmax", -1), 40),
        unit="GB of weights and caches",
        picture=Curves("tokens, or sequences", "GB", "x"),
        remark=(
            "Mistral 7B in bfloat16, computed by `fastweights plan`. Weights, keys and"
            " values of softmax attention fit at 32 sequences and at 131k tokens: other"
            " things took the memory."
        ),
    )
}

CLAIMS: dict[str, Claim] = {**TRAINED_SHARE, **MEMORY, **TRANSFER, **METHODS_COMPARED, **SPEED}
