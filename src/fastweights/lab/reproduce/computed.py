"""Claims that a computation decides, without training: theorems, counts, identities and bounds of
the papers, executed by the library's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from fastweights.analysis.tables import conditions_of
from fastweights.budget import DeviceMemory, Placing, device_memory, find_accelerator
from fastweights.lab.reproduce.claim import (
    Claim,
    ClaimSize,
    Experiment,
    FigureForm,
    Figures,
    Statement,
    Trial,
    TrialContext,
)
from fastweights.lab.reproduce.measures import Measure
from fastweights.lab.reproduce.theory import FindingFigure, finding, measures_of
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.methods import evaluate
from fastweights.mixers import MesaLayer
from fastweights.models import FastWeightsConfig
from fastweights.models.presets import preset
from fastweights.recurrence import Cholesky, Mesa, ShermanMorrison, condition_numbers

UNLIKE = "marks unlike the paper's"
SHARE = "trained parameters [%]"
BATCHES = "for many sequences of 2,176 tokens"
GROWTH = "MB per further token of one sequence"
SHORT_TO_LONG = "longest sequences / shortest"
QUOTIENT = "quotient"


@dataclass(frozen=True)
class Computation(Trial):
    """A trial that computes exact numbers.

    Attributes:
        source: A key of `COMPUTATIONS`, or the source of a `finding`, such as "DSF Lemma 1".
    """

    source: str

    @property
    def name(self) -> str:
        return self.source

    def run(self, context: TrialContext) -> list[Measure]:
        if self.source in COMPUTATIONS:
            return list(COMPUTATIONS[self.source]())
        return list(measures_of(finding(self.source)))


@dataclass(frozen=True)
class Computed(Experiment):
    """An experiment that is the same at any size and on any machine.

    Attributes:
        source: That of its `Computation`.
    """

    source: str

    def trials(self) -> Sequence[Trial]:
        return [Computation(self.source)]


def computed(
    paper: str,
    place: str,
    source: str,
    statement: str,
    *statements: Statement,
    unit: str,
    picture: FigureForm,
    figures: Figures | None = None,
    remark: str = "",
) -> Claim:
    """Return the claim that a computation decides, which is the same at all sizes."""
    size = ClaimSize(Computed(source), 0.1)
    return Claim(
        paper,
        place,
        statement,
        statements,
        unit,
        size,
        size,
        size,
        picture,
        figures=figures or {},
        remark=remark,
    )


def theorem(
    paper: str, place: str, statement: str, *statements: Statement, remark: str = ""
) -> Claim:
    """Return the claim that a theorem of `analysis.theory` decides, by its own picture."""
    source = f"{paper} {place}"
    picture = FindingFigure(source)
    return computed(
        paper, place, source, statement, *statements, unit="", picture=picture, remark=remark
    )


# MetaLA, Table 2 ----------------------------------------------------------------------------------

MARKS: Mapping[str, tuple[int, ...]] = {
    "linear": (1, 0, 1, 0),
    "performer": (1, 0, 1, 0),
    "rfa": (1, 0, 1, 0),
    "cosformer": (1, 0, 1, 0),
    "retnet": (1, 0, 0, 0),
    "transnormer": (1, 0, 0, 0),
    "gla": (1, 1, 1, 0),
    "s4d": (1, 0, 0, 0),
    "h3": (1, 0, 0, 0),
    "s5": (1, 0, 0, 0),
    "mamba": (1, 1, 1, 0),
    "rwkv4": (1, 0, 0, 0),
    "glru": (1, 1, 0, 0),
    "hgrn": (1, 1, 0, 0),
    "rglru": (1, 1, 0, 0),
    "lru": (1, 0, 0, 0),
    "metala": (1, 1, 1, 1),
    "softmax": (0, 1, 1),
}
"""C0 (linear complexity), C1 (dynamic memory), C2 (static approximation) and C3 (least parameters)
as the paper prints them; it gives softmax attention no C3."""
CONDITIONS = ("C0", "C1", "C2", "C3")


def conditions_of_mixers() -> Iterator[Measure]:
    """Yield the conditions that the mixers' own projections meet, and how many are unlike the
    paper's."""
    for name, printed in MARKS.items():
        found = conditions_of(name)
        marks = [int(mark) for mark in found if mark is not None]
        yield from (Measure(name, mark, x) for x, mark in zip(CONDITIONS, marks, strict=False))
        unlike = sum(ours != theirs for ours, theirs in zip(marks, printed, strict=True))
        yield Measure(name, unlike, quantity=UNLIKE)


# MetaLA, Figure A2: memory ------------------------------------------------------------------------

COUNTED: Mapping[str, FastWeightsConfig] = {
    "metala": preset("metala-1.3b"),
    "gla": preset("metala-1.3b", mixers=[{"name": "gla", "heads": 16}]),
    "softmax": preset("metala-1.3b", mixers=[{"name": "softmax", "heads": 16}]),
    "mamba": preset("metala-1.3b", mixers=[{"name": "mamba"}], mlp=None, num_hidden_layers=48),
}
"""Models of 1.3 billion parameters, 16 heads; Mamba's blocks have no MLP, and are twice as many."""
STEP = 16_384
"""Tokens of a training step; an A800 has room for it, but for Mamba's."""


def training_memory(lengths: Sequence[int] = (1024, 4096, STEP)) -> Iterator[Measure]:
    """Yield the GB of a training step of `STEP` tokens by the length of its sequences, and what
    each further token of one sequence adds to what is kept for the backward pass."""
    steps = {
        name: [_step_memory(config, STEP // n, n).total / 1e9 for n in lengths]
        for name, config in COUNTED.items()
    }
    for name, config in COUNTED.items():
        yield from (Measure(name, gb, n) for n, gb in zip(lengths, steps[name], strict=True))
        yield Measure(name, steps[name][-1] / steps[name][0], quantity=SHORT_TO_LONG)
        kept = [_step_memory(config, 1, n).activations / 1e6 for n in lengths]
        for (less, n), (more, m) in pairwise(zip(kept, lengths, strict=True)):
            yield Measure(name, (more - less) / (m - n), m, GROWTH)
    for n, ours, theirs in zip(lengths, steps["metala"], steps["gla"], strict=True):
        yield Measure("metala / gla", ours / theirs, n, QUOTIENT)


def _step_memory(config: FastWeightsConfig, sequences: int, length: int) -> DeviceMemory:
    """With products in bfloat16 and AdamW, on one A800, whose memory and kernels are an A100's."""
    device = find_accelerator("a100")
    return device_memory(config, Placing(bf16=True), device, sequences, length)


# MesaNet, appendices F.5 and G --------------------------------------------------------------------


SAME = ("recursive least squares", "Newton step per token")
BOUND, LEAST_RIDGE = 0.9975, MesaLayer.least_ridge
"""The layer's bound of γ where β = 1, and the least Λ that it can have."""


def _drawn(tokens: int, gamma: float) -> Mesa:
    """A Mesa layer's streams in float64: keys of norm 1, as the layer has them."""
    generator = Generator().manual_seed(0)

    def stream(width: int) -> Tensor:
        return torch.randn(1, tokens, 1, width, generator=generator, dtype=torch.float64)

    q, k = (nn.functional.normalize(stream(8), dim=-1) for _ in range(2))
    beta, decay = torch.ones(2, 1, tokens, 1, 1, dtype=torch.float64)
    ridge = torch.ones(1, 8, dtype=torch.float64)
    return Mesa(q, k, stream(8), beta, math.log(gamma) * decay, ridge, Cholesky())


def least_squares(tokens: int = 64) -> Iterator[Measure]:
    """Yield how far recursive least squares and a Newton step per token are from the Mesa layer's
    own solution, without and with forgetting (appendix G)."""
    for name, gamma in (("γ = 1", 1.0), ("γ = 0.9", 0.9)):
        record = _drawn(tokens, gamma)
        wanted = evaluate(record)[0][0, :, 0]
        for series, found in zip(SAME, (_recursive(record), _newton(record)), strict=True):
            yield Measure(series, float((found - wanted).abs().max()), name)


def _recursive(record: Mesa) -> Tensor:
    """o ``[t v]`` with (H + Λ)⁻¹ by the Sherman-Morrison formula alone."""
    solver, memory, o = ShermanMorrison(), torch.zeros(8, 8).double(), []
    inverse = torch.eye(8, dtype=torch.float64)
    for q, k, v, decay, beta in _tokens(record):
        inverse = solver.advance(inverse, decay, k, beta)
        memory = decay * memory + beta * k.mT @ v
        o.append(q @ inverse @ memory)
    return torch.cat(o)


def _newton(record: Mesa) -> Tensor:
    """o ``[t v]`` with Φ_t = Φ_{t-1} - (H_t + Λ)⁻¹ kᵀ (k Φ_{t-1} - v), eq. 22."""
    gram, weights, o = torch.eye(8).double(), torch.zeros(8, 8).double(), []
    for q, k, v, decay, beta in _tokens(record):
        gram = decay * (gram - torch.eye(8)) + torch.eye(8) + beta * k.mT @ k
        weights = weights - torch.linalg.solve(gram, beta * k.mT @ (k @ weights - v))
        o.append(q @ weights)
    return torch.cat(o)


def _tokens(record: Mesa) -> Iterator[tuple[Tensor, ...]]:
    """Each token's q, k, v, γ and β ``[1 ·]``."""
    assert record.log_decay is not None
    streams = record.q, record.k, record.v, record.log_decay.exp(), record.beta
    return zip(*(stream[0] for stream in streams), strict=True)


def screams(lengths: Sequence[int] = (16, 256, 4096)) -> Iterator[Measure]:
    """Yield the condition number of H + Λ after one token was repeated that often, with the upper
    bound of γ and without (appendix F.5)."""
    for name, gamma in (("γ < 1", 1 - 1e-9), (f"γ < {BOUND}", BOUND)):
        record = _drawn(max(lengths), gamma)
        same = replace(
            record,
            k=record.k[:, :1].expand(-1, max(lengths), -1, -1),
            ridge=torch.full((1, 8), LEAST_RIDGE, dtype=torch.float64),
        )
        found = condition_numbers(same)[0, :, 0]
        yield from (Measure(name, float(found[n - 1]), n) for n in lengths)


# LoLCATs: how much is trained ---------------------------------------------------------------------

RANK = 8
LLAMA = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
"""Llama 3 8B, where its sizes differ from the class's defaults."""


def trained_share() -> Iterator[Measure]:
    """Yield which share of Llama 3 8B's parameters the two stages train, with W of the head's
    width."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
        whole = model.num_parameters()
        linearize(model, LinearAttentionConfig("exp", feature_dim=128, window=0))
    adapters = sum(
        RANK * sum(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))
    )
    maps = model.num_parameters() - whole
    yield Measure("LoRA", 100 * adapters / whole, quantity=SHARE)
    yield Measure("feature maps and LoRA", 100 * (maps + adapters) / whole, quantity=SHARE)


# LoLCATs, Figure 2: memory ------------------------------------------------------------------------


MISTRAL: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
"""Mistral 7B with attention to all tokens, as the paper has it; its layers are alike."""
LAYERS = 32
READ = 2048 + 128
"""Tokens of a prompt and its answer."""


def generation_memory(
    lengths: Sequence[int] = (512, 8192, 65_536, 131_072), batches: Sequence[int] = (1, 16, 32)
) -> Iterator[Measure]:
    """Yield the GB of Mistral 7B's weights and caches in bfloat16, by the tokens of one sequence
    and by the number of sequences."""
    whole: Any
    part: Any
    with torch.device("meta"):
        whole, part = (
            MistralForCausalLM(MistralConfig(**MISTRAL, num_hidden_layers=layers))
            for layers in (LAYERS, 1)
        )
    analog = LinearAttentionConfig("exp", feature_dim=128, window=64)
    planned = plan(part.to(torch.bfloat16), LinearizationRecipe(analog, ()))  # pyrefly: ignore[bad-argument-type]
    weights = whole.num_parameters() * torch.bfloat16.itemsize
    maps = LAYERS * planned.branch * torch.float32.itemsize
    (layer,) = planned.caches
    models = {"softmax": (weights, layer.as_softmax), "LoLCATs": (weights + maps, layer.after)}
    for name, (held, kept) in models.items():
        for tokens in lengths:
            yield Measure(name, (held + LAYERS * kept(tokens)) / 1e9, tokens)
        for batch in batches:
            yield Measure(name, (held + batch * LAYERS * kept(READ)) / 1e9, batch, BATCHES)


COMPUTATIONS: Mapping[str, Callable[[], Iterator[Measure]]] = {
    "MetaLA Table 2": conditions_of_mixers,
    "MetaLA Figure A2": training_memory,
    "MesaNet appendix F.5": screams,
    "MesaNet appendix G": least_squares,
    "LoLCATs section 3": trained_share,
    "LoLCATs Figure 2": generation_memory,
}
"""What is computed, by its source."""
