"""Training language models on text."""

from fastweights.runs.checkpoint import model_folder
from fastweights.runs.errors import CheckpointError, DataError, NonFiniteError, TrainingError
from fastweights.runs.optimizers import AdamW, Cosine, Linear, Recipe, Schedule
from fastweights.runs.report import Reporter, Result, Summary
from fastweights.runs.signals import StopOnSignal
from fastweights.text.corpus import Corpus, Size, Text, Windows, cover, read, tokenized
from fastweights.text.tokenizers import BPE, Bytes, Pretrained, TextStream, Tokenization
from fastweights.train.loop import Architecture, Every, HuggingFace, Named, TrainConfig, train

__all__ = [
    "BPE",
    "AdamW",
    "Architecture",
    "Bytes",
    "CheckpointError",
    "Corpus",
    "Cosine",
    "DataError",
    "Every",
    "HuggingFace",
    "Linear",
    "Named",
    "NonFiniteError",
    "Pretrained",
    "Recipe",
    "Reporter",
    "Result",
    "Schedule",
    "Size",
    "StopOnSignal",
    "Summary",
    "Text",
    "TextStream",
    "Tokenization",
    "TrainConfig",
    "TrainingError",
    "Windows",
    "cover",
    "model_folder",
    "read",
    "tokenized",
    "train",
]
