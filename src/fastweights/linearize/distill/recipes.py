"""The published ways to make a pretrained model linear, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.fit import AdamWByPart, Fit
from fastweights.linearize.distill.recipe import (
    ADAPT,
    AdaptationConfig,
    AlignmentConfig,
    LinearizationRecipe,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.trained import AllButMLPs, AllWeights
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.schedules import (
    Constant,
    Cosine,
    LinearDecay,
    Schedule,
    WarmupStableDecay,
)


def _fit(
    tokens: float, length: int, batch: int, lr: float, schedule: Schedule, decay: float = 0.0
) -> Fit:
    """Updates until so many tokens are seen, by AdamW."""
    steps = -(-int(tokens) // (batch * length))
    optimizer = AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=decay)
    return Fit(steps=steps, batch=batch, optimizer=optimizer, schedule=schedule)


def _align(tokens: float, batch: int, loss: HiddenLoss) -> AlignmentConfig:
    """RADLADS' step 1, which HALO and KL-guided hybrid distillation take over."""
    fit = _fit(tokens, 512, batch, 1e-3, Cosine(warmup=0, floor=0.01))
    return AlignmentConfig(loss=loss, fit=fit, length=512)


KL = TokenLoss(ce=0.0, kl=1.0)

RADLADS = LinearizationRecipe(
    LinearAttentionConfig(window=0, rule="gated_deltanet"),
    (
        _align(100e6, 32, HiddenLoss(squared=0.0, norm=1.0)),
        AdaptationConfig(
            AllWeights(), KL, _fit(500e6, 512, 96, 1e-5, Constant()), name="kl", length=512
        ),
        AdaptationConfig(
            AllWeights(), fit=_fit(100e6, 16384, 96, 1e-5, Constant()), name="long", length=16384
        ),
    ),
)
HALO = LinearizationRecipe(
    LinearAttentionConfig(window=0, rule="supra", positions="linear", log_scale=500),
    (
        _align(20_000 * 32 * 512, 32, HiddenLoss()),
        AdaptationConfig(
            AllWeights(),
            KL,
            _fit(20_000 * 96 * 512, 512, 96, 1e-4, Cosine(warmup=0, floor=0.1)),
            name="kl",
            length=512,
        ),
        AdaptationConfig(
            AllWeights(),
            fit=_fit(500 * 128 * 16384, 16384, 128, 1e-5, Constant()),
            name="long",
            length=16384,
        ),
    ),
)
GUIDED = LinearizationRecipe(
    LinearAttentionConfig(window=0, rule="gated_deltanet"),
    (
        _align(100e6, 96, HiddenLoss(squared=0.0, norm=1.0)),
        AdaptationConfig(
            AllWeights(),
            KL,
            replace(
                _fit(600e6, 4096, 32, 7e-6, Constant()),
                optimizer=AdamWByPart(
                    lr=7e-6, betas=(0.9, 0.95), weight_decay=0.0, attention_lr=1e-4
                ),
            ),
            name="kl",
            length=4096,
        ),
    ),
    selection=1 / 3,
)


def _mohawk(tokens: float, batch: int, lr: float) -> Fit:
    steps = -(-int(tokens) // (batch * 2048))
    schedule = WarmupStableDecay(warmup=steps // 10, decay=0.1, shape=LinearDecay())
    return _fit(tokens, 2048, batch, lr, schedule, decay=0.1)


MOHAWK = LinearizationRecipe(
    LinearAttentionConfig(window=0, rule="gla"),
    (
        TransferConfig(
            TransferLoss(output=0.0, maps=1.0),
            fit=_mohawk(80e6, 16, 5e-4),
            name="maps",
            length=2048,
        ),
        AlignmentConfig(loss=HiddenLoss(blocks=True), fit=_mohawk(160e6, 16, 2e-3), length=2048),
        AdaptationConfig(AllWeights(), KL, _mohawk(2.76e9, 256, 5e-4), name="logits", length=2048),
    ),
)


def _replaced(name: str, softmax: float, warmup: int) -> StageConfig:
    """One step of Mamba-in-Llama."""
    fit = replace(_fit(5e9, 2048, 64, 8e-5, Cosine(warmup=warmup, floor=0.0)), clip=0.1)
    loss = TokenLoss(ce=1.0, kl=0.1)
    return AdaptationConfig(AllButMLPs(), loss, fit, softmax, name=name, length=2048)


MAMBA_IN_LLAMA = LinearizationRecipe(
    LinearAttentionConfig(window=0, rule="gla"),
    (
        _replaced("softmax-50", 0.5, 1500),
        _replaced("softmax-25", 0.25, 500),
        _replaced("softmax-12", 0.125, 500),
        _replaced("softmax-0", 0.0, 500),
    ),
)

_ALL = AdaptationConfig(AllWeights())
_SHORT_LORA = replace(ADAPT, steps=100)

RECIPES: Mapping[str, LinearizationRecipe] = {
    "lolcats": LinearizationRecipe(),
    "lolcats-linear": LinearizationRecipe(LinearAttentionConfig(window=0)),
    "workshop": LinearizationRecipe(
        LinearAttentionConfig("exp-skip", window=16, shared=False),
        (TransferConfig(TransferLoss(0, 1)), AdaptationConfig()),
    ),
    "hedgehog": LinearizationRecipe(
        LinearAttentionConfig(window=0), (TransferConfig(TransferLoss(0, 1)), AdaptationConfig())
    ),
    "no-transfer": LinearizationRecipe(stages=(AdaptationConfig(),)),
    "t2r": LinearizationRecipe(LinearAttentionConfig("relu", window=0), (_ALL,)),
    "supra": LinearizationRecipe(LinearAttentionConfig("relu", window=0, rule="supra"), (_ALL,)),
    "hedgecats": LinearizationRecipe(
        LinearAttentionConfig("exp"),
        (
            TransferConfig(TransferLoss(0, 1), dropout=1.0),
            AdaptationConfig(fit=_SHORT_LORA),
        ),
    ),
    "window-last": LinearizationRecipe(
        LinearAttentionConfig("exp"),
        (TransferConfig(TransferLoss(0, 1), dropout=1.0), AdaptationConfig(dropout=1.0)),
    ),
    "window-dropout": LinearizationRecipe(
        stages=(
            TransferConfig(dropout=0.9),
            AdaptationConfig(fit=replace(ADAPT, steps=200), dropout=0.75, name="dropout-75"),
            AdaptationConfig(fit=replace(ADAPT, steps=100), dropout=0.5, name="dropout-50"),
            AdaptationConfig(fit=replace(ADAPT, steps=100), dropout=0.25, name="dropout-25"),
        ),
    ),
    "liger": LinearizationRecipe(
        LinearAttentionConfig(rule="gla", gates="pooled", shared=False), (AdaptationConfig(),)
    ),
    "landmarks": LinearizationRecipe(
        LinearAttentionConfig(
            "landmarks", feature_dim=16, window=80, sinks=4, windows_by_head=True
        ),
        (TransferConfig(), AdaptationConfig(loss=KL)),
    ),
    "lawcat": LinearizationRecipe(LinearAttentionConfig(window=0, rule="gla", convolution=4)),
    "mohawk": MOHAWK,
    "mamba-in-llama": MAMBA_IN_LLAMA,
    "radlads": RADLADS,
    "halo": HALO,
    "kl-guided": GUIDED,
}
"""Recipes by name, published unless `RECIPE_NOTES` says otherwise."""

RECIPE_NOTES: Mapping[str, str] = {
    "lolcats": "Zhang et al., 2024 (arXiv 2410.10254): a window of 64 tokens, one normaliser,"
    " relative squared error of outputs; 400 steps of each stage are ours",
    "lolcats-linear": "the same without a window (their ablation)",
    "workshop": "the ES-FoMo paper: eq. 6's features exp(x W + x), a window of 16, eq. 8's two"
    " normalisers, cross-entropy of weights",
    "hedgehog": "Zhang et al., 2024 (arXiv 2402.04347): cross-entropy of weights, no window",
    "no-transfer": "the layers are swapped, and the model adapts",
    "t2r": "Kasai et al., 2021: ReLU features, no transfer, all weights adapted",
    "supra": "Mercat et al., 2024: ReLU features, RetNet's decays, a norm in place of the"
    " normaliser, no transfer, all weights adapted. RoPE stays, and φ is one matrix for x and -x"
    " where theirs is a small network",
    "hedgecats": "Benfeghoul et al., 2025 (arXiv 2510.05901): cross-entropy of the linear side's"
    " weights alone, then a short LoRA with the window; steps, features' width and rates are ours",
    "window-last": "the same paper's hybridisation at inference: the window is added when all"
    " training is over; steps and rates are ours",
    "window-dropout": "the same paper's scheduled dropout of the window, as stages of falling"
    " probability; the probabilities, steps and rates are ours",
    "liger": "Lan et al., 2025 (arXiv 2503.01496): GLA whose gates are averages of the keys'"
    " channels, beside a window with a normaliser of its own, LoRA alone; theirs weighs both"
    " sides alike, ours learns γ",
    "landmarks": "ours: features that are a softmax over landmarks, which are placed among the"
    " model's keys, 32 of them beside a window of 80 and 4 sinks; then LoLCATs' stages, the second"
    " by KL",
    "lawcat": "Liu et al., 2025 (arXiv 2509.18467): causal convolutions of 4 taps of q and k"
    " before the feature maps, normalised gated linear attention, and no window; LoLCATs' two"
    " stages, of sequences of 1024 tokens (a conversion's default). Gates, steps and rates are"
    " ours",
    "mohawk": "Bick et al., 2024 (arXiv 2408.10189): maps, hidden states of blocks, logits, with"
    " 80, 160 and 2,760 million tokens of length 2048. Their students are Mamba-2's, here GLA's;"
    " batches, rates and the schedule are ours",
    "mamba-in-llama": "Wang et al., 2024 (arXiv 2408.15237): 50, 25, 12.5 and 0 % of the layers"
    " softmax, MLPs frozen; rate, warm-up, clipping, batch and 1 · cross-entropy + 0.1 · KL are"
    " those of the repository's configurations, the quarter of 20 billion tokens for each step is"
    " ours, as is GLA for Mamba",
    "radlads": "Goldstein et al., 2025 (arXiv 2505.03005): hidden states by their distance, then"
    " KL, then long texts; 100, 500 and 100 million tokens. Their students are RWKV's, here Gated"
    " DeltaNet's; the batches and the rate of the last two stages are those of HALO's description",
    "halo": "HALO, 2026 (arXiv 2601.22156): hidden states by squared error, KL, and 500 steps of"
    " length 16,384; the batches follow from its 2.3 billion tokens. The rate of KL is that of"
    " its smallest models (5e-5 and 3e-5 for larger ones), its students are lightning"
    " attention's, here SUPRA's. Layers that stay softmax have no positions, and outside of"
    " training multiply the scores of the query at position t by log_500(t + 500), as the paper's"
    " repository does (HyPE)",
    "kl-guided": "KL-guided layer selection, 2025: RADLADS' first two stages as its configurations"
    " have them, with the linear attentions at a rate of their own. Between the two, if layers"
    " stay softmax (`--softmax-layers`), every candidate is trained for a third of the second"
    " one, 200 million tokens; the paper's criterion is restored",
}
"""What each recipe does, whose it is and what of it is ours; steps are those of the papers' tokens
unless said otherwise."""
