"""Hugging Face models of any mixers, known to transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import fastweights.models.native_step  # noqa: F401 - which registers what reads tokens
from fastweights.models.cache import FastWeightsCache
from fastweights.models.checkpoint_code import register_models
from fastweights.models.classify import (
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
    FastWeightsForTokenClassification,
    FastWeightsVisionConfig,
    FastWeightsVisionModel,
)
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsForCausalLM, FastWeightsModel
from fastweights.models.invariant import batch_invariant, log_probabilities
from fastweights.models.presets import PRESETS, Preset, find_preset, preset
from fastweights.models.quantize import (
    FewBitsConfig,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    quantize,
)
from fastweights.models.reconstruct import FastWeightsForReconstruction

AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig)
register_models(
    FastWeightsConfig,
    {
        AutoModel: FastWeightsModel,
        AutoModelForCausalLM: FastWeightsForCausalLM,
        AutoModelForSequenceClassification: FastWeightsForSequenceClassification,
        AutoModelForTokenClassification: FastWeightsForTokenClassification,
    },
)
AutoConfig.register(FastWeightsVisionConfig.model_type, FastWeightsVisionConfig)
register_models(
    FastWeightsVisionConfig,
    {
        AutoModel: FastWeightsVisionModel,
        AutoModelForImageClassification: FastWeightsForImageClassification,
    },
)

__all__ = [
    "PRESETS",
    "FastWeightsCache",
    "FastWeightsConfig",
    "FastWeightsForCausalLM",
    "FastWeightsForImageClassification",
    "FastWeightsForReconstruction",
    "FastWeightsForSequenceClassification",
    "FastWeightsForSequencePairClassification",
    "FastWeightsForTokenClassification",
    "FastWeightsModel",
    "FastWeightsVisionConfig",
    "FastWeightsVisionModel",
    "FewBitsConfig",
    "Int4Linear",
    "Int8Embedding",
    "Int8Linear",
    "Preset",
    "batch_invariant",
    "find_preset",
    "log_probabilities",
    "preset",
    "quantize",
]
