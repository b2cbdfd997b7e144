"""What vLLM calls when it starts: it learns the names of our models' classes."""

from __future__ import annotations

HOME = "fastweights.engines.vllm"
"""The package of the classes that vLLM imports when a model needs them."""


def register() -> None:
    """Let vLLM know our models; its entry point ``vllm.general_plugins``.

    vLLM calls it in each of its processes, and may call it again.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import fastweights  # noqa: F401 (transformers' classes know our model types from here on)
    from fastweights.engines.vllm.backend import state_backend
    from fastweights.engines.vllm.settings import LinearizedSettings, ServedSettings

    state_backend()
    own = {"FastWeightsForCausalLM": ("model:ServedFastWeights", ServedSettings)}
    linearized = ("linearized:ServedLinearized", LinearizedSettings)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name, (place, settings) in {
        **own,
        **{f"Linearized{name}": linearized for name in names if isinstance(name, str)},
    }.items():
        if name not in MODELS_CONFIG_MAP:
            ModelRegistry.register_model(name, f"{HOME}.{place}")
            MODELS_CONFIG_MAP[name] = settings
