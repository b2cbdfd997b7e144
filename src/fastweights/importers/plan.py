"""How a checkpoint becomes one of ours: a configuration, and where each tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.importers.source import Source
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

Convert = Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """A tensor of ours: `convert` of their tensor `source`."""

    source: str
    convert: Convert = torch.Tensor.detach


class Constant(NamedTuple):
    """A tensor of ours that theirs has no counterpart of: `value` everywhere."""

    value: float


Table = Mapping[str, str | Piece | Constant]
"""Names below a module of ours → what they are made of, named below a module of theirs."""


@dataclass(frozen=True)
class Plan:
    """`config` of our model, and its tensors by name.

    ignored  patterns of their tensors that hold no weights of the language model
    """

    config: FastWeightsConfig
    tensors: Mapping[str, Piece | Constant]
    ignored: tuple[str, ...] = ()

    def carry_out(
        self, source: Source, dtype: torch.dtype | None = None, watch: Callable[[int, int], None] = lambda done, all: None
    ) -> FastWeightsForCausalLM:
        """The model, made tensor by tensor.

        dtype  None for that of their embeddings
        watch  told how many tensors are done, and of how many
        Raises ValueError, which names them, for tensors that are missing, left over or of another shape.
        """
        ours = _shapes(self.config)
        self._check_names(source, ours)
        embeddings = self.tensors["model.embed_tokens.weight"]
        assert isinstance(embeddings, Piece)
        dtype = source.read(embeddings.source).dtype if dtype is None else dtype
        state = {}
        for done, (name, shape) in enumerate(ours.items()):
            watch(done, len(ours))
            state[name] = _made(name, self.tensors[name], shape, source, dtype)
        watch(len(ours), len(ours))
        return FastWeightsForCausalLM.from_pretrained(None, config=self.config, state_dict=state, dtype=dtype)

    def _check_names(self, source: Source, ours: Mapping[str, torch.Size]) -> None:
        read = {piece.source for piece in self.tensors.values() if isinstance(piece, Piece)}
        missing = read - source.names
        left = {n for n in source.names - read if not any(fnmatch(n, pattern) for pattern in self.ignored)}
        problems = [
            f"{what} {_few(names)}"
            for what, names in (("lacks", missing), ("holds, beside what is expected,", left))
            if names
        ]
        if problems:
            raise ValueError(f"this {source.settings.kind} checkpoint {' and '.join(problems)}")
        assert ours.keys() == self.tensors.keys(), sorted(ours.keys() ^ self.tensors.keys())


def under(ours: str, theirs: str, table: Table) -> dict[str, Piece | Constant]:
    """`table` with the names completed: ``{ours}.name`` from ``{theirs}.name``."""
    return {f"{ours}.{name}": _placed(theirs, part) for name, part in table.items()}


def rows(start: int, stop: int | None = None) -> Convert:
    """Of a fused projection, the outputs from `start` up to `stop`."""
    return lambda weight: weight[start:stop]


def taps(weight: Tensor) -> Tensor:
    """A depthwise Conv1d's ``[d 1 size]`` as our ``[size d]``."""
    return weight.squeeze(1).mT


def _placed(theirs: str, part: str | Piece | Constant) -> Piece | Constant:
    match part:
        case Constant():
            return part
        case Piece(source, convert):
            return Piece(f"{theirs}.{source}", convert)
        case _:
            return Piece(f"{theirs}.{part}")


def _shapes(config: FastWeightsConfig) -> dict[str, torch.Size]:
    """Names and shapes of our tensors, tied ones once."""
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    tied = model.all_tied_weights_keys
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}


def _made(name: str, part: Piece | Constant, shape: torch.Size, source: Source, dtype: torch.dtype) -> Tensor:
    if isinstance(part, Constant):
        return torch.full(shape, part.value, dtype=dtype)
    theirs = source.read(part.source)
    tensor = part.convert(theirs)
    if tensor.shape != shape:
        raise ValueError(
            f"{part.source} of this {source.settings.kind} checkpoint has shape {list(theirs.shape)}, which gives "
            f"{list(tensor.shape)} for our {name}; its config.json calls for {list(shape)}"
        )
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _few(names: set[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
