"""GGUF files: folders of models in float32, by transformers' reader, or in few bits, each written
once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastweights.environment import require_package
from fastweights.errors import CheckpointError, reason_of
from fastweights.models.quantize import quantize, round_each
from fastweights.ops.quantized import GROUP, Int4Weight, Int8Weight, QuantizedWeight
from fastweights.render.units import bytes_in_words

GGUF = ".gguf"
"""What names of such files end in."""
_logger = logging.getLogger("fastweights")


def is_gguf(source: str | Path) -> bool:
    """Whether a name of a model is that of a GGUF file."""
    return Path(source).suffix.lower() == GGUF


def require_gguf(file: str | Path) -> None:
    """Check that a GGUF file is there, and what it is read with.

    Raises:
        ValueError: If either is missing.
    """
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}")
    require_package("gguf", f"{file}, a GGUF file,", "or name the model that it was made from")


@cache
def dequantize(file: Path) -> Path:
    """Return a folder with the model of a GGUF file in float32, in the cache of the Hugging Face
    hub, where it is written unless it is there; which is said in a line of the log.

    Raises:
        CheckpointError: If it cannot be read as a causal language model.
        ValueError: If there is no such file, or the package gguf is missing.
    """
    folder = _cached(file, "", _read_floats)
    size = sum(path.stat().st_size for path in folder.iterdir())
    _logger.warning(
        "%s is dequantised: %s of float32 in %s; --int4 or --int8 keeps its weights of 4 or 8 bits",
        file,
        bytes_in_words(size),
        folder,
    )
    return folder


@cache
def keep_codes(file: Path, bits: int) -> Path:
    """Return a folder with the model of a GGUF file in weights of few bits, as `dequantize` does;
    those that are of Q4_0, Q4_1 or Q8_0 there keep their codes, and others are rounded one by one.

    Args:
        file: of an architecture that is read so; of others all are dequantised first
        bits: 4 or 8

    Raises:
        CheckpointError, ValueError: as `dequantize`
    """
    return _cached(file, f"-{bits}", partial(_read_codes, bits=bits))


def _cached(file: Path, kind: str, read: Callable[[Path], Any]) -> Path:
    """The folder of this kind of a file, written with the model that is read unless it is there."""
    require_gguf(file)
    there = file.stat()
    version = f"{file.resolve()} {there.st_size} {there.st_mtime_ns}"
    digest = sha256(version.encode()).hexdigest()[:8]
    folder = Path(HF_HOME, "fastweights", f"{file.stem}-{digest}{kind}")
    if not folder.exists():
        _write(file, folder, read)
    return folder


def _write(file: Path, folder: Path, read: Callable[[Path], Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch, "model")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = read(file)
        except Exception as error:  # whatever its readers raise at a file that they do not know
            raise CheckpointError(
                f"{file} cannot be read as a causal language model ({reason_of(error)})"
            ) from error
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _read_floats(file: Path) -> Any:
    """The model by transformers' reader, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    vars(model.config).pop("quantization_config", None)  # what is written is not quantised
    model.hf_quantizer, model.is_quantized = None, False
    return model


def _read_codes(file: Path, bits: int) -> Any:
    """The model with weights of few bits."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stored = GgufTensors(file, getattr(config, "head_dim", 0))
    if not stored.are_those_of(model):
        return quantize(_read_floats(file), bits)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    round_each(model, bits, lambda kind, weight: stored.weight(names[id(weight)], kind))
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    model.load_state_dict({name: stored.floats(name) for name in left}, strict=False, assign=True)
    return model


class GgufTensors:
    """The tensors of a GGUF file by the names that transformers' model has for them, as its file
    of safetensors would hold them.

    Args:
        file: The file.
        head_dim: Channels of the model's heads.
    """

    def __init__(self, file: Path, head_dim: int) -> None:
        import gguf

        read = gguf.GGUFReader(file)
        self._dequantize: Any = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in read.tensors}
        field: Any = read.get_field("general.architecture")
        architecture = str(field.contents())
        self._layout, self._head_dim = ARCHITECTURES.get(architecture), head_dim
        if self._layout is not None:
            layers: Any = read.get_field(f"{architecture}.block_count")
            known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
            self._names = gguf.get_tensor_name_map(known[architecture], int(layers.contents()))

    def are_those_of(self, model: Any) -> bool:
        """Whether the architecture is one of those whose tensors are known to differ in nothing
        but what is undone here, and the model has all of the file's and no others.
        """
        if self._layout is None:
            return False
        names = {self._name(name) for name, _ in model.named_parameters()}
        return names == self._tensors.keys()

    def _name(self, name: str) -> str:
        return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    def floats(self, name: str) -> Tensor:
        """A tensor in float32."""
        found = self._tensors[self._name(name)]
        values = torch.tensor(self._dequantize(found.data, found.tensor_type)).float()
        shift = self._layout.norm if self._layout and name.endswith("norm.weight") else 0
        return (values - shift)[self._rows(name, len(values))]

    def weight(self, name: str, kind: type[QuantizedWeight]) -> QuantizedWeight | None:
        """A tensor in few bits; None if float16 does not hold it well."""
        found = self._tensors[self._name(name)]
        read = CODES.get((found.tensor_type.name, kind))
        if read is None:
            values = self.floats(name)
            return kind.of(values) if kind.holds(values) else None
        rows = self._rows(name, len(found.data))
        return kind(*(part[rows].contiguous() for part in read(torch.tensor(found.data))))

    def _rows(self, name: str, count: int) -> Any:
        """Where the rows of a tensor lie in the file."""
        if not (self._layout and self._layout.turned and re.search(r"\.[qk]_proj\.", name)):
            return slice(None)
        pairs = torch.arange(count).view(-1, self._head_dim // 2, 2)
        return pairs.transpose(1, 2).flatten()


class TensorLayout(NamedTuple):
    """How the tensors of a file differ from transformers'.

    Attributes:
        turned: whether the channels of a head that rotate together lie side by side
        norm: what is added to the weights of norms
    """

    turned: bool = False
    norm: float = 0


ARCHITECTURES = {
    "llama": TensorLayout(turned=True),
    "qwen2": TensorLayout(),
    "qwen3": TensorLayout(),
    "gemma3": TensorLayout(norm=1),
}
"""Those whose tensors are read one by one; transformers reads the others."""


def _blocks(data: Tensor, floats: int, codes: int) -> tuple[list[Tensor], Tensor]:
    """Of rows ``[o b]`` of blocks their numbers of float16 ``[o i/32]`` each, and what is behind
    them of all blocks.
    """
    blocks = data.unflatten(1, (-1, 2 * floats + codes))
    halves = blocks[..., : 2 * floats].contiguous().view(torch.float16)
    return list(halves.unbind(-1)), blocks[..., 2 * floats :].flatten(1)


def _bytes(data: Tensor) -> tuple[Tensor, ...]:
    (scale,), codes = _blocks(data, 1, GROUP)
    return codes.view(torch.int8), scale


def _halves(data: Tensor) -> tuple[Tensor, ...]:
    (scale, offset), codes = _blocks(data, 2, GROUP // 2)
    return codes, scale, offset


def _centred_halves(data: Tensor) -> tuple[Tensor, ...]:
    (scale,), codes = _blocks(data, 1, GROUP // 2)
    return codes, scale, -8 * scale


CODES: Mapping[tuple[str, type], Callable[[Tensor], tuple[Tensor, ...]]] = {
    ("Q8_0", Int8Weight): _bytes,
    ("Q4_1", Int4Weight): _halves,
    ("Q4_0", Int4Weight): _centred_halves,
}
"""What a weight is made of, by the type of a file's tensor, of whose rows blocks of 32 numbers are
float16 and codes.
"""
