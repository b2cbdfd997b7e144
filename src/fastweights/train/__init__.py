"""Training language models on text, and measuring their loss by position."""

from fastweights.runs.checkpoint import model_folder
from fastweights.runs.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    NoSpaceError,
    TrainingError,
)
from fastweights.runs.layout import Layout
from fastweights.runs.optimizers import AdamW, Muon, OptimizerConfig
from fastweights.runs.report import Reporter, Result, Summary
from fastweights.runs.schedules import (
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
from fastweights.runs.signals import StopOnSignal
from fastweights.runs.stage import Every
from fastweights.text.corpus import Corpus, Text, TextSize, read_corpus, tokenize_sources
from fastweights.text.tokenizers import BPE, Bytes, ExistingTokenizer, TextStream, Tokenization
from fastweights.text.windows import Windows, sequential_windows
from fastweights.train.adapters import LoRA
from fastweights.train.architectures import Architecture, HuggingFace, PresetArchitecture
from fastweights.train.existing import ExistingModel
from fastweights.train.language_model import TrainConfig, train

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
