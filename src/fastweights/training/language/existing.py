"""A model that exists already, as the start of a training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, extract_commit_hash

from fastweights.environment import require_package
from fastweights.errors import CheckpointError, TrainingError
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.data.tokenizers import ExistingTokenizer, require_embeddings
from fastweights.training.language.adapters import LoRA, add_adapters
from fastweights.training.loop.checkpoint import model_source, no_progress_bars
from fastweights.training.loop.files import hash_file

WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class ExistingModel:
    """A causal language model to go on from: one of this library, a linearized one, or any of
    transformers.

    Attributes:
        source: A folder of a run, a checkpoint or a model, a GGUF file, or a name on the Hugging
            Face hub.
        lora: Adapters to train in place of all weights; None to train all weights.
        weights: Hash of the configuration and the weights at `source`, or their commit on the hub,
            by which a run that is resumed notices other ones; found out unless it is given.

    Raises:
        CheckpointError: If there is no model at `source`.
        ValueError: If there is to be LoRA, and peft is not installed.
    """

    source: str
    lora: LoRA | None = None
    weights: str = ""

    def __post_init__(self) -> None:
        if self.lora is not None:
            require_package("peft", "LoRA", "or train all weights")
        object.__setattr__(self, "weights", self.weights or fingerprint(self.folder))

    @cached_property
    def folder(self) -> str:
        """The folder with the model's files, or its name on the hub."""
        return model_source(self.source)

    @property
    def tokenization(self) -> ExistingTokenizer:
        """The tokenizer that the model was trained with."""
        return ExistingTokenizer(self.folder)

    @property
    def stored_dtype(self) -> str:
        """The dtype of the weights at `source`; they are trained and saved in float32."""
        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        return str(config.dtype or torch.float32).removeprefix("torch.")

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Load the model in float32, with new adapters if there are to be some.

        Raises:
            CheckpointError: If it cannot be loaded, or lacks weights.
            TrainingError: If the tokenizer is not the model's, or the model cannot be trained.
        """
        model = _load(self.folder)
        self._require_tokens(tokenizer, model)
        _require_causal(model)
        return model if self.lora is None else add_adapters(model, self.lora)

    @property
    def name(self) -> str:
        """The last part of the source that tells it from others."""
        return [part for part in Path(self.source).parts if part != "model"][-1]

    @property
    def title(self) -> str:
        adapters = "" if self.lora is None else f", LoRA of rank {self.lora.rank}"
        return f"from {self.name}{adapters}"

    def _require_tokens(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        own = _tokenizer_of(self.folder)
        if own is not None and own.get_vocab() != tokenizer.get_vocab():
            raise TrainingError(
                f"the tokenizer has other tokens ({len(tokenizer):,}) than that of {self.source}"
                f" ({len(own):,}), whose embeddings would mean something else; leave the tokenizer"
                " out to take the model's"
            )
        embedding: Any = model.get_input_embeddings()
        require_embeddings(tokenizer, len(embedding.weight), self.source)


def fingerprint(source: str) -> str:
    """Return a hash of the configuration and weights in a folder, or their commit on the hub.

    Raises:
        CheckpointError: If there is no model.
    """
    folder = Path(source)
    if not folder.exists():
        return f"commit:{_commit(source)}"
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.name} {hash_file(path)}\n".encode())
    return f"sha256:{digest.hexdigest()[:16]}"


def copy_to_own_memory(model: nn.Module) -> None:
    """Move parameters that lie in a file's memory to torch's own.

    Sums depend on the alignment: torch aligns its own memory, a file's lies anywhere.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _files(folder: Path) -> Iterator[Path]:
    for pattern in ("config.json", *WEIGHTS):
        yield from sorted(folder.glob(pattern))


def _commit(name: str) -> str:
    try:
        return str(extract_commit_hash(cached_file(name, "config.json"), None))
    except OSError as error:
        raise CheckpointError(
            f"no model at {name!r}: there is no such folder, and the Hugging Face hub gives none"
            f" ({_first_line(error)})"
        ) from error


def _load(folder: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise TrainingError(
            f"{folder} has quantised weights, which are not trained; take the model that it was"
            " made from"
        )
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
            model, info = loaded
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded as a causal language model: {_first_line(error)}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights of a {type(model).__name__}, among them"
            f" {', '.join(missing[:3])}; it is another kind of model, or damaged"
        )
    copy_to_own_memory(model)
    return model


def _require_causal(model: Any) -> None:
    """Raises TrainingError if the first token's logits depend on the second token."""
    with evaluation_mode(model):
        logits = model(input_ids=torch.tensor([[0, 1], [0, 2]])).logits
    first, second = (logits[0] - logits[1]).abs().amax(-1)
    if first > 1e-3 * second:
        raise TrainingError(
            f"a {type(model).__name__} sees the tokens that it is to predict; only causal language"
            " models can be trained on text"
        )


def _tokenizer_of(folder: str) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
