"""Training language models on text, and measuring their loss by position."""

from fastweights.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    NoSpaceError,
    TrainingError,
)
from fastweights.training.data.corpus import Corpus, Text, TextSize, read_corpus, tokenize_sources
from fastweights.training.data.tokenizers import (
    BPE,
    Bytes,
    ExistingTokenizer,
    TextStream,
    Tokenization,
)
from fastweights.training.data.windows import Windows, sequential_windows
from fastweights.training.language.adapters import LoRA
from fastweights.training.language.architectures import (
    Architecture,
    HuggingFace,
    PresetArchitecture,
)
from fastweights.training.language.existing import ExistingModel
from fastweights.training.language.language_model import TrainConfig, train
from fastweights.training.loop.checkpoint import model_folder
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.optimizers import AdamW, Muon, OptimizerConfig
from fastweights.training.loop.report import Reporter, Result, Summary
from fastweights.training.loop.schedules import (
    Constant,
    Cosine,
    CosineDecay,
    DecayShape,
    Linear,
    LinearDecay,
    Schedule,
    SquareRootDecay,
    WarmupStableDecay,
)
from fastweights.training.loop.signals import StopOnSignal
from fastweights.training.loop.stage import Every

__all__ = [
    "BPE",
    "AdamW",
    "Architecture",
    "Bytes",
    "CheckpointError",
    "Constant",
    "Corpus",
    "Cosine",
    "CosineDecay",
    "DataError",
    "DecayShape",
    "Every",
    "ExistingModel",
    "ExistingTokenizer",
    "HuggingFace",
    "Layout",
    "Linear",
    "LinearDecay",
    "LoRA",
    "Muon",
    "NoSpaceError",
    "NonFiniteError",
    "OptimizerConfig",
    "PresetArchitecture",
    "Reporter",
    "Result",
    "Schedule",
    "SquareRootDecay",
    "StopOnSignal",
    "Summary",
    "Text",
    "TextSize",
    "TextStream",
    "Tokenization",
    "TrainConfig",
    "TrainingError",
    "WarmupStableDecay",
    "Windows",
    "model_folder",
    "read_corpus",
    "sequential_windows",
    "tokenize_sources",
    "train",
]
