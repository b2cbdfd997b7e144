"""The contents of another library's checkpoint: its settings, and its tensors one at a time."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel, RwkvForCausalLM

from fastweights.importers.gguf import dequantize, is_gguf

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)
"""The files that make up a tokenizer."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
CARRIED = ("unk_token_id", "max_position_embeddings", "initializer_range")
"""Fields that logits do not depend on, and that are written again when a model is exported."""
DECODER = {
    "norm_eps": "rms_norm_eps",
    "hidden_act": "hidden_act",
    "intermediate_size": "intermediate_size",
}
"""Fields of ours → what most decoders call them."""
WITH_EYES = ("gemma3", "qwen3_5", "qwen3_5_moe")
"""Models of text and images, whose model of text is imported."""


class Settings:
    """The fields of a checkpoint's config.json, with transformers' defaults for types that it
    knows; those of its model of text, where it has eyes as well."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        fields = _of_text(fields) if fields.get("model_type") in WITH_EYES else fields
        self.kind = str(fields.get("model_type"))
        self._fields = (
            _fill_defaults(self.kind, fields) if self.kind in CONFIG_MAPPING else dict(fields)
        )
        self.require("quantization_config", None)

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise ValueError(f"the config.json of this {self.kind} checkpoint lacks {name!r}")
        return self._fields[name]

    def get(self, name: str, default: Any) -> Any:
        """Return a field, or `default` if there is none."""
        return self._fields.get(name, default)

    def require(self, name: str, *accepted: object) -> None:
        """Check that a field, if it is there, has one of the `accepted` values.

        Raises:
            ValueError: If it has another value.
        """
        if name in self._fields and self._fields[name] not in accepted:
            values = " or ".join(map(repr, accepted))
            raise ValueError(
                f"a {self.kind} checkpoint with {name} = {self._fields[name]!r} cannot be imported,"
                f" only with {values}"
            )

    @property
    def common(self) -> dict[str, Any]:
        """The fields that every language model has under the same names."""
        names = ("vocab_size", "tie_word_embeddings", *TOKENS, *CARRIED)
        return {name: self._fields[name] for name in names if name in self._fields}

    @property
    def decoder(self) -> dict[str, Any]:
        """The fields of ours that most decoders with MLPs state under the same names."""
        return self.pick(DECODER)

    def pick(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The fields with these names there, by ours."""
        return {ours: self[theirs] for ours, theirs in names.items()}


class CheckpointSource(ABC):
    """A checkpoint of another library.

    Attributes:
        settings: The fields of its config.json.
        names: The names of its tensors.
    """

    settings: Settings
    names: frozenset[str]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the tensor called `name`, one of `names`."""


class InMemorySource(CheckpointSource):
    """A checkpoint in memory: a loaded model of transformers.

    Raises:
        ValueError: If it is an RWKV model that has halved its weights, as it does when it first
            runs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if isinstance(model, RwkvForCausalLM) and model.rwkv.layers_are_rescaled:
            raise ValueError(
                "this RWKV model has run, and has rescaled its weights for that; import its folder"
                " instead"
            )
        self.settings = Settings(model.config.to_dict())
        self._tensors = model.state_dict()
        self.names = frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class FolderSource(CheckpointSource):
    """A checkpoint in a folder with config.json and safetensors files, in one piece or in shards.

    Raises:
        ValueError: If a file is missing or damaged; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        ends = folder / "generation_config.json"
        tokens = (
            {name: value for name, value in _json(ends).items() if name in TOKENS}
            if ends.is_file()
            else {}
        )
        self.settings = Settings(_config(folder) | tokens)
        self._files = {path: _open_weights(path) for path in _weight_files(folder)}
        self._home = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self.names = frozenset(self._home)

    def read(self, name: str) -> Tensor:
        return self._files[self._home[name]].get_tensor(name)


def locate_checkpoint(model: str | Path) -> Path:
    """Return the folder `model`, that of a GGUF file, or download what the Hugging Face hub has
    under that name.

    Pickled weights are not downloaded.

    Raises:
        ValueError: If it is neither a folder nor a name on the hub.
    """
    if is_gguf(model):
        return dequantize(Path(model))
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(
            snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", *TOKENIZER])
        )
    except HFValidationError as error:
        raise ValueError(
            f"{model} is neither a folder nor the name of a model on the Hugging Face hub"
        ) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files in `folder` that make up its tokenizer."""
    return sorted(path for pattern in TOKENIZER for path in folder.glob(pattern))


def _fill_defaults(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with transformers' defaults."""
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(fields)).to_dict()
    except StrictDataclassError as error:
        raise ValueError(
            f"the config.json of this {kind} checkpoint is contradictory: {error}"
        ) from error


def _of_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the model of text, with those of both that are stated of the whole."""
    of_both = ("tie_word_embeddings", "quantization_config", *TOKENS)
    stated = {name: fields[name] for name in of_both if name in fields}
    kind = {"model_type": f"{fields['model_type']}_text"}
    return {**kind, **dict(fields.get("text_config") or {}), **stated}


def _config(folder: Path) -> dict[str, Any]:
    try:
        return PretrainedConfig.get_config_dict(folder)[0]
    except OSError as error:
        raise ValueError(f"{folder / 'config.json'} is missing or damaged: {error}") from error


def _weight_files(folder: Path) -> Iterable[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in _json(index)["weight_map"].values()})
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    raise ValueError(
        f"{folder} holds no model.safetensors"
        + (
            f"; {pickled[0]} is a pickle, which can run code: save the model as safetensors first"
            if pickled
            else ""
        )
    )


def _open_weights(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
