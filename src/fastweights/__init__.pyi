"""Linear-time sequence models, each defined once."""

from fastweights import linearize as linearize
from fastweights.engines.transformers import Patch, patch_transformers
from fastweights.generate import stream
from fastweights.kernels import explain
from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent, evaluate
from fastweights.mixer import Bidirectional, Mixer, MixerState
from fastweights.mixers import MIXERS, register
from fastweights.models import (
    PRESETS,
    FastWeightsCache,
    FastWeightsConfig,
    FastWeightsForCausalLM,
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
    FastWeightsForTokenClassification,
    FastWeightsModel,
    FastWeightsVisionConfig,
    preset,
)
from fastweights.recurrence import (
    DPLR,
    LTV,
    Amplified,
    Bonus,
    Cholesky,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    NoFiniteFormError,
    Normalized,
    Recurrence,
    ShapeError,
    Softmax,
    WindowedLinear,
)

__all__ = [
    "DPLR",
    "LTV",
    "MIXERS",
    "PRESETS",
    "Amplified",
    "Auto",
    "Bidirectional",
    "Bonus",
    "Cholesky",
    "Chunkwise",
    "ConjugateGradient",
    "Decay",
    "Delta",
    "FastWeightsCache",
    "FastWeightsConfig",
    "FastWeightsForCausalLM",
    "FastWeightsForImageClassification",
    "FastWeightsForSequenceClassification",
    "FastWeightsForSequencePairClassification",
    "FastWeightsForTokenClassification",
    "FastWeightsModel",
    "FastWeightsVisionConfig",
    "Mesa",
    "Method",
    "Mixer",
    "MixerState",
    "NoFiniteFormError",
    "Normalized",
    "Parallel",
    "Patch",
    "Recurrence",
    "Recurrent",
    "ShapeError",
    "Softmax",
    "WindowedLinear",
    "evaluate",
    "explain",
    "linearize",
    "patch_transformers",
    "preset",
    "register",
    "stream",
]
