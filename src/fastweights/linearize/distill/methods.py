"""The published ways to make a pretrained model linear, as settings of one method."""

from __future__ import annotations

from dataclasses import dataclass

from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.distill.adapt import LoRA, TokenLoss
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.runs.optimizers import AdamW
from fastweights.runs.ranges import FRACTION

TRANSFER = Fit(steps=400)
"""Of stage one: a rate of 1e-2 with a straight decay; 200 steps of 8 · 1024 tokens are enough on
LoLCATs' zero-shot tasks.
"""
ADAPT = Fit(steps=400, optimizer=AdamW(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0))
"""Of stage two."""


@dataclass(frozen=True)
class TransferConfig:
    """The settings of stage one, attention transfer: every layer learns to reproduce its softmax.

    Attributes:
        loss: How far a layer is from its softmax.
        dropout: The probability with which a layer is trained without its window.
        fit: Steps, batch and optimiser.
        blockwise: True to train one block of the model after another, with the hidden states on
            disk, for models larger than memory. The result is the same.

    Raises:
        TrainingError: If `dropout` is not at least 0 and below 1.
    """

    loss: TransferLoss = TransferLoss()
    dropout: float = 0.0
    fit: Fit = TRANSFER
    blockwise: bool = False

    def __post_init__(self) -> None:
        FRACTION.require(dropout=self.dropout)


@dataclass(frozen=True)
class AdaptationConfig:
    """The settings of stage two, in which the whole model adapts to its linear layers.

    Attributes:
        lora: The adapters that are trained; None to train all of the model's weights.
        loss: The loss of the next token.
        branches: Whether the branches are trained further, together with the adapters.
        fit: Steps, batch and optimiser.
    """

    lora: LoRA | None = LoRA()
    loss: TokenLoss = TokenLoss()
    branches: bool = False
    fit: Fit = ADAPT


@dataclass(frozen=True)
class LinearizationMethod:
    """What replaces softmax attention, and the two training stages.

    Attributes:
        analog: The linear attention.
        transfer: Stage one; None to leave it out.
        adapt: Stage two; None to leave it out.

    Raises:
        ValueError: If stage one asks for what the linear attention does not have.
    """

    analog: LinearAttentionConfig = LinearAttentionConfig()
    transfer: TransferConfig | None = TransferConfig()
    adapt: AdaptationConfig | None = AdaptationConfig()

    def __post_init__(self) -> None:
        analog, transfer = self.analog, self.transfer
        if transfer is None:
            return
        if transfer.dropout and not analog.has_window:
            raise ValueError(
                f"dropout = {transfer.dropout} hides a window of softmax, and window ="
                f" {analog.window} is none; leave dropout out, or take a window above 0"
            )
        if transfer.loss.weights and analog.rule != "windowed" and not analog.has_window:
            raise ValueError(
                f"rule = {analog.rule!r} without a window has no attention weights that the"
                " transfer could compare with softmax's; take a window, or a method whose loss"
                " compares outputs, such as lolcats"
            )


METHODS: dict[str, LinearizationMethod] = {
    "lolcats": LinearizationMethod(),
    "lolcats-linear": LinearizationMethod(LinearAttentionConfig(window=0)),
    "workshop": LinearizationMethod(
        LinearAttentionConfig("exp", window=16, shared=False), TransferConfig(TransferLoss(0, 1))
    ),
    "hedgehog": LinearizationMethod(
        LinearAttentionConfig(window=0), TransferConfig(TransferLoss(0, 1))
    ),
    "no-transfer": LinearizationMethod(transfer=None),
    "t2r": LinearizationMethod(
        LinearAttentionConfig("relu", window=0), None, AdaptationConfig(lora=None, branches=True)
    ),
    "supra": LinearizationMethod(
        LinearAttentionConfig("relu", window=0, rule="supra"),
        None,
        AdaptationConfig(lora=None, branches=True),
    ),
}
"""Published methods by name:

- lolcats: Zhang et al., 2024 (arXiv 2410.10254): a window of 64 tokens, one normaliser, relative
  squared error of outputs;
- lolcats-linear: the same without a window (their ablation);
- workshop: the ES-FoMo paper: a window of 16, eq. 8's two normalisers, cross-entropy of weights;
- hedgehog: Zhang et al., 2024 (arXiv 2402.04347): cross-entropy of weights, no window;
- no-transfer: the layers are swapped, and the model adapts;
- t2r: Kasai et al., 2021: ReLU features, no transfer, all weights adapted;
- supra: Mercat et al., 2024: ReLU features, RetNet's decays, a norm in place of the normaliser, no
  transfer, all weights adapted. RoPE stays, and φ is one matrix for x and -x where theirs is a
  small network.
"""
