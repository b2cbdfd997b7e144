"""Training language models on text."""

from fastweights.train.checkpoint import model_folder
from fastweights.train.data import Corpus, Size, Text, Windows, cover, read, tokenized
from fastweights.train.errors import CheckpointError, DataError, NonFiniteError, TrainingError
from fastweights.train.loop import Architecture, Every, HuggingFace, Named, TrainConfig, train
from fastweights.train.optim import AdamW, Cosine, Linear, Recipe, Schedule
from fastweights.train.report import Reporter, Result, Summary
from fastweights.train.signals import StopOnSignal
from fastweights.train.tokens import BPE, Bytes, Pretrained, TextStream, Tokenization

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
