"""What is trained: the architectures of new language models, as values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.training.data.tokenizers import vocabulary_size


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the tokens that begin a text, end it and fill it up, as a configuration names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


class OwnArchitecture(ABC):
    """The architecture of a language model of this library."""

    @abstractmethod
    def config(self, vocabulary: int = 1, **special: Any) -> FastWeightsConfig:
        """Make the model's configuration.

        Args:
            vocabulary: Number of tokens.
            special: The tokens that begin, end and fill up texts, as `special_tokens` has them.

        Raises:
            ValueError: If sizes do not fit each other, or there is no such language model.
        """

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        """Build a new model for `tokenizer`; raises as `config` does."""
        special = special_tokens(tokenizer)
        return FastWeightsForCausalLM(self.config(vocabulary_size(tokenizer), **special))


@dataclass(frozen=True)
class Architecture(OwnArchitecture):
    """An architecture by its mixers and sizes.

    Attributes:
        mixers: One ``{"name": …, …arguments}`` per mixer, repeated over the blocks.
        layers: Number of blocks.
        width: Hidden size.
    """

    mixers: tuple[Mapping[str, object], ...] = ({"name": "metala"},)
    layers: int = 4
    width: int = 128

    def config(self, vocabulary: int = 1, **special: Any) -> FastWeightsConfig:
        return FastWeightsConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            mixers=[dict(mixer) for mixer in self.mixers],
            **special,
        )

    @property
    def name(self) -> str:
        return "-".join(str(mixer["name"]) for mixer in self.mixers)

    @property
    def title(self) -> str:
        mixers = ", ".join(str(mixer["name"]) for mixer in self.mixers)
        return f"{mixers}: {self.layers} layers of width {self.width}"


@dataclass(frozen=True)
class PresetArchitecture(OwnArchitecture):
    """The architecture ``fastweights.PRESETS[name]``, with the tokenizer's vocabulary.

    Attributes:
        name: Name of the preset.
    """

    name: str

    def config(self, vocabulary: int = 1, **special: Any) -> FastWeightsConfig:
        found = find_preset(self.name)
        if found.model is not FastWeightsForCausalLM:
            raise ValueError(
                f"{self.name} is a {found.model.__name__}; training takes language models"
            )
        return found.config(vocab_size=vocabulary, **special)

    @property
    def title(self) -> str:
        return self.name


@dataclass(frozen=True)
class HuggingFace:
    """An architecture of the transformers library, such as a softmax model to linearize later.

    Attributes:
        name: Its model_type, such as ``"llama"``.
        fields: Fields of its configuration; vocabulary and end of text are the tokenizer's.
    """

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Build a new model for `tokenizer`.

        Raises:
            ValueError: If transformers refuses the name or the fields.
        """
        known = {"vocab_size": vocabulary_size(tokenizer), **special_tokens(tokenizer)}
        config = AutoConfig.for_model(self.name, **{**known, **self.fields})
        return AutoModelForCausalLM.from_config(config)

    @property
    def title(self) -> str:
        return f"{self.name}: " + ", ".join(
            f"{name} {value}" for name, value in self.fields.items()
        )
