"""Our language models as torchtitan's specifications, and settings to train them with."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from fastweights.engines.titan.model import TitanLanguageModel
from fastweights.engines.titan.names import (
    PREFIX,
    find_config,
    find_folder,
    from_folder_names,
    to_folder_names,
)
from fastweights.engines.titan.parallelize import parallelize
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.size import sketch_of
from fastweights.training.loop.optimizers import AdamW, matrices

ANY_LAYER = rf"layers.\\d+.(?:{_CHECKPOINT_PREFIX})?"
"""A regular expression of where a layer's weights are; a dot stands for itself well enough."""


class FolderAdapter(StateDictAdapter):
    """Renames weights between torchtitan's checkpoints and folders of ours."""

    model_config: TitanLanguageModel.Config

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Tensor]:
        """Return torchtitan's weights by the names of a folder."""
        return to_folder_names(state_dict, tied=self._tied)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Tensor]:
        """Return a folder's weights by torchtitan's names."""
        return from_folder_names(hf_state_dict, tied=self._tied)

    @property
    def _tied(self) -> bool:
        return self.model_config.language_model.tie_word_embeddings


def model_spec(config: FastWeightsConfig, flavour: str) -> ModelSpec:
    """Make torchtitan's specification of a language model.

    Args:
        config: The model: any mixers, and hybrids of them.
        flavour: What logs call it.
    """
    return ModelSpec(
        name="fastweights",
        flavor=flavour,
        model=TitanLanguageModel.Config(language_model=config),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=FolderAdapter,
    )


def trainer_config(
    model: FastWeightsConfig | str, optimizer: AdamW = AdamW(lr=4e-4), flavour: str = "custom"
) -> Trainer.Config:
    """Make settings with which torchtitan trains a language model, each to be changed by an option.

    The loss makes logits by parts of a sequence. CUDA graphs are off, as our kernels' first calls
    ask the host which tiles to take.

    Args:
        model: A configuration, or a flavour: a preset's name or a folder of ours.
        optimizer: The optimiser, whose decay applies to the same weights as in `fastweights.train`.
        flavour: What logs call a model that is given by its configuration.

    Raises:
        ValueError: A flavour is not known, or is no language model.
    """
    config = find_config(model) if isinstance(model, str) else model
    folder = find_folder(model) if isinstance(model, str) else None
    return Trainer.Config(
        model_spec=model_spec(config, model if isinstance(model, str) else flavour),
        hf_assets_path=str(folder or "tokenizer"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        optimizer=optimizer_config(optimizer, config),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=500, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(last_save_in_hf=True),
    )


def optimizer_config(optimizer: AdamW, config: FastWeightsConfig) -> OptimizersContainer.Config:
    """Make torchtitan's settings of an optimiser: two groups of weights, as `AdamW` divides them.

    Args:
        optimizer: The optimiser.
        config: The model, whose weights the groups name.
    """
    settings = {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps}
    decays = {_pattern_of(config): optimizer.weight_decay, ".*": 0.0}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={**settings, "weight_decay": decay},
            )
            for pattern, decay in decays.items()
        ]
    )


def _pattern_of(config: FastWeightsConfig) -> str:
    """A regular expression of the names of all weights that decay, recomputed layers' as well."""
    with torch.device("meta"):
        model = FastWeightsForCausalLM(sketch_of(config))
    decayed = {id(p) for p in matrices(model)}
    names = {
        re.sub(r"layers\.\d+\.", ANY_LAYER, name)
        for name, p in model.named_parameters()
        if id(p) in decayed
    }
    return f"^{PREFIX}(?:{'|'.join(sorted(names))})$"
