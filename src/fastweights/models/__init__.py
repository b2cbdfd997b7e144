"""Hugging Face models of any mixers, known to transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from fastweights.models.cache import FastWeightsCache
from fastweights.models.classify import (
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
    FastWeightsVisionConfig,
    FastWeightsVisionModel,
)
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsForCausalLM, FastWeightsModel
from fastweights.models.presets import PRESETS, Preset, find_preset, preset
from fastweights.models.reconstruct import FastWeightsForReconstruction

AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig)
AutoModel.register(FastWeightsConfig, FastWeightsModel)
AutoModelForCausalLM.register(FastWeightsConfig, FastWeightsForCausalLM)
AutoModelForSequenceClassification.register(FastWeightsConfig, FastWeightsForSequenceClassification)
AutoConfig.register(FastWeightsVisionConfig.model_type, FastWeightsVisionConfig)
AutoModel.register(FastWeightsVisionConfig, FastWeightsVisionModel)
AutoModelForImageClassification.register(FastWeightsVisionConfig, FastWeightsForImageClassification)

__all__ = [
    "PRESETS",
    "FastWeightsCache",
    "FastWeightsConfig",
    "FastWeightsForCausalLM",
    "FastWeightsForImageClassification",
    "FastWeightsForReconstruction",
    "FastWeightsForSequenceClassification",
    "FastWeightsForSequencePairClassification",
    "FastWeightsModel",
    "FastWeightsVisionConfig",
    "FastWeightsVisionModel",
    "Preset",
    "find_preset",
    "preset",
]
