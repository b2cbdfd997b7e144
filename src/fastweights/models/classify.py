"""Classifiers of sequences, of pairs of sequences, of tokens, and of images."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from fastweights.layers import POOLINGS, upcast
from fastweights.models.cache import FastWeightsCache
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsModel, FastWeightsPreTrainedModel, FastWeightsTrunk
from fastweights.models.packing import Boundaries
from fastweights.recurrence.base import ShapeError
from fastweights.shapes import Embedded


class FastWeightsClassifier(FastWeightsPreTrainedModel):
    """A model and a linear score of its hidden states, which is new where a checkpoint has none of
    it, as that of a language model has none.
    """

    new_head = "score"
    trunk: type[Any] = FastWeightsModel

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.model = self.trunk(config)
        self.score = self._make_score()
        self.post_init()

    def _make_score(self) -> nn.Module:
        return score_layer(self.config, self.config.hidden_size)

    def _classified(
        self, x: Embedded, attention_mask: Tensor | None, labels: Tensor | None
    ) -> dict[str, Any]:
        """The logits ``[b labels]`` of pooled hidden states, and their loss."""
        logits = self.score(pool_tokens(self.config, x, attention_mask))
        return {"logits": logits, "loss": classification_loss(self.config, logits, labels)}


class FastWeightsForSequenceClassification(FastWeightsClassifier):
    """A classifier of sequences: a linear score of the pooled hidden states.

    `config.pooling` says how hidden states are pooled, `config.num_labels` how wide the score is;
    with `config.bidirectional` every mixer reads both ways.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Compute the scores of sequences, padded on either side.

        Args:
            input_ids: ``[b t]``; give either these or `inputs_embeds`.
            attention_mask: ``[b t]``; 1 marks a token, 0 padding.
            inputs_embeds: ``[b t d]`` in place of `input_ids`.
            labels: ``[b]`` classes, or what `config.problem_type` asks for, as in transformers'
                sequence classifiers.
            output_hidden_states: Whether to return every block's input as well.

        Returns:
            `logits` ``[b labels]``, and with labels their `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        found = self._classified(outputs.last_hidden_state, attention_mask, labels)
        return SequenceClassifierOutput(**found, hidden_states=outputs.hidden_states)


class FastWeightsForSequencePairClassification(FastWeightsClassifier):
    """A classifier of pairs of sequences (Long Range Arena's retrieval).

    Both sequences go through the same model; an MLP reads [a, b, a ⊙ b, a - b] of their pooled
    states.

    The MLP has two hidden layers of `config.mlp_size` and half as many channels, with ReLU, as in
    the benchmark.
    """

    def _make_score(self) -> nn.Module:
        d, width = self.config.hidden_size, self.config.mlp_size
        hidden = nn.Linear(4 * d, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU()
        return nn.Sequential(*hidden, score_layer(self.config, width // 2))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Compute the scores of pairs.

        Args:
            input_ids: ``[b 2 t]``, the two sequences of every pair.
            attention_mask: ``[b 2 t]``; 1 marks a token, 0 padding, anywhere.
            labels: ``[b]`` classes.

        Returns:
            `logits` ``[b labels]``, and with labels their `loss`.
        """
        if input_ids.dim() != 3 or input_ids.shape[1] != 2:
            raise ShapeError(
                f"input_ids have shape {list(input_ids.shape)}, must be [batch, 2, time]"
            )
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        x = self.model(
            input_ids.flatten(0, 1), attention_mask=mask, use_cache=False, return_dict=True
        )
        a, b = pool_tokens(self.config, x.last_hidden_state, mask).unflatten(0, (-1, 2)).unbind(1)
        logits = self.score(torch.cat([a, b, a * b, a - b], dim=-1))
        return SequenceClassifierOutput(
            loss=classification_loss(self.config, logits, labels), logits=logits
        )


class FastWeightsForTokenClassification(FastWeightsClassifier):
    """A classifier of tokens: a linear score of every token's hidden state.

    A mixer sees the tokens before the one it scores; with `config.bidirectional` those after it
    too.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        **boundaries: Unpack[Boundaries],
    ) -> TokenClassifierOutput:
        """Compute the scores of every token.

        Args:
            input_ids: ``[b t]``; give either these or `inputs_embeds`.
            attention_mask: ``[b t]``; 1 marks a token, 0 padding.
            inputs_embeds: ``[b t d]`` in place of `input_ids`.
            labels: ``[b t]`` classes; −100 is not counted.
            output_hidden_states: Whether to return every block's input as well.
            position_ids, boundaries: Where packed documents begin, as in
                `FastWeightsModel.forward`.

        Returns:
            `logits` ``[b t labels]``, and with labels their mean cross-entropy as `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            position_ids=position_ids,
            return_dict=True,
            **boundaries,
        )
        logits = self.score(outputs.last_hidden_state)
        return TokenClassifierOutput(
            loss=None if labels is None else ForTokenClassification(logits, labels, self.config),
            logits=logits,
            hidden_states=outputs.hidden_states,
        )


@strict
class FastWeightsVisionConfig(FastWeightsConfig):
    """The configuration of an image classifier: a model whose tokens are an image's patches.

    Attributes:
        image_size, patch_size: in pixels; images are square, and the latter divides the former
        num_channels: 3 for colour
        class_token: whether a learnt token stands behind the patches (pooling = "last" reads it
            alone)

    `vocab_size` and the ids of tokens are not used.
    """

    model_type = "fastweights_vision"

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    class_token: bool = False
    embedding_scale: int | float | None = 1.0
    bidirectional: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + self.class_token

    def _check_sizes(self) -> None:
        super()._check_sizes()
        for name in ("image_size", "patch_size", "num_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it is at least 1")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size = {self.image_size} is not divisible by patch_size = {self.patch_size}"
            )


class Patches(nn.Module):
    """Embed images ``[b c s s]`` as tokens ``[b t d]``: a linear map of every patch, row by row,
    and behind them the class token.
    """

    def __init__(self, config: FastWeightsVisionConfig) -> None:
        super().__init__()
        self.channels = config.num_channels
        self.size, self.patch = config.image_size, config.patch_size
        self.W = nn.Linear(self.channels * self.patch**2, config.hidden_size)
        self.class_token = (
            nn.Parameter(torch.empty(config.hidden_size)) if config.class_token else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.class_token is not None:
            nn.init.normal_(self.class_token)

    def forward(self, images: Tensor) -> Embedded:
        expected = [self.channels, self.size, self.size]
        if images.dim() != 4 or list(images.shape[1:]) != expected:
            raise ShapeError(
                f"pixel_values have shape {list(images.shape)}, must be [batch, {str(expected)[1:]}"
            )
        rows = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))
        x = self.W(rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)).to(self.W.weight.dtype)
        if self.class_token is None:
            return x
        return torch.cat([x, self.class_token.to(x.dtype).expand(len(x), 1, -1)], dim=1)


class FastWeightsVisionModel(FastWeightsTrunk):
    """An image model without its head: images to the hidden states of their patches."""

    config_class = FastWeightsVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: FastWeightsVisionConfig) -> None:
        super().__init__(config, Patches(config))
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Embedded:
        """Compute the hidden states ``[b t d]`` of images ``[b c s s]``."""
        return self.run_blocks(
            self.embed_tokens(pixel_values), None, None, FastWeightsCache(), use_cache=False
        )


class FastWeightsForImageClassification(FastWeightsClassifier):
    """A classifier of images: a linear score of the pooled hidden states of the patches."""

    config_class = FastWeightsVisionConfig
    main_input_name = "pixel_values"
    trunk = FastWeightsVisionModel

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Compute the scores of images.

        Args:
            pixel_values: ``[b c s s]``, square images of `config.image_size` pixels.
            labels: ``[b]`` classes.

        Returns:
            `logits` ``[b labels]``, and with labels their `loss`.
        """
        return ImageClassifierOutput(**self._classified(self.model(pixel_values), None, labels))


def score_layer(config: FastWeightsConfig, width: int) -> nn.Linear:
    """A new linear map of `width` channels to `config.num_labels` scores."""
    if not config.num_labels:
        raise ValueError(f"num_labels = {config.num_labels}; a classifier has at least one")
    return nn.Linear(width, config.num_labels)


def pool_tokens(config: FastWeightsConfig, x: Embedded, attention_mask: Tensor | None) -> Tensor:
    """``[b d]``: one vector per sequence ``x [b t d]``, of the tokens that are not padding."""
    mask = (
        torch.ones(x.shape[:2], device=x.device)
        if attention_mask is None
        else attention_mask.to(x.device)
    )
    return POOLINGS[config.pooling](x, mask.bool())


def classification_loss(
    config: FastWeightsConfig, logits: Tensor, labels: Tensor | None
) -> Tensor | None:
    """transformers' loss for `config.problem_type` (found from the labels if it is None), in
    float32.
    """
    return None if labels is None else ForSequenceClassificationLoss(labels, upcast(logits), config)
