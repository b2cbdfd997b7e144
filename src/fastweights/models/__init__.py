"""Hugging Face language models of any mixers, known to transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fastweights.models.cache import FastWeightsCache
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsForCausalLM, FastWeightsModel

AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig)
AutoModel.register(FastWeightsConfig, FastWeightsModel)
AutoModelForCausalLM.register(FastWeightsConfig, FastWeightsForCausalLM)

__all__ = ["FastWeightsCache", "FastWeightsConfig", "FastWeightsForCausalLM", "FastWeightsModel"]
