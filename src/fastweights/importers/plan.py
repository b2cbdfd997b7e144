"""How a checkpoint becomes a model of this library: a configuration, and the source of each
tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastweights.importers.source import CheckpointSource
from fastweights.layers import upcast
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

T = TypeVar("T")
Convert = Callable[..., Tensor]
ProgressCallback = Callable[[int, int], None]
"""Told how many tensors are done, and of how many."""


class TensorSource(NamedTuple):
    """How to make one of our tensors: `convert` of their tensor `source`, and of `others` after it.

    Attributes:
        source: Name of their tensor.
        convert: Function of the tensors.
        others: Names of further tensors.
    """

    source: str
    convert: Convert = torch.Tensor.detach
    others: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source, *self.others)


class ConstantTensor(NamedTuple):
    """A tensor of ours that theirs has no counterpart of: `value` everywhere."""

    value: float


Table = dict[str, str | TensorSource | ConstantTensor]
"""Names below a module of ours → what they are made of, named below a module of theirs."""
LayerPlan = tuple[dict[str, Any], Table]
"""An entry of `mixers` or `mlps`, and its weights."""
NORMS: Table = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
"""Of most decoders."""


@dataclass(frozen=True)
class ImportPlan:
    """How a checkpoint becomes a model of this library.

    Attributes:
        config: The configuration of our model.
        tensors: The source of each of our tensors, by name; tied ones need not be there.
        ignored: Patterns of the names of their tensors that are not weights of the language model.
    """

    config: FastWeightsConfig
    tensors: Mapping[str, TensorSource | ConstantTensor]
    ignored: tuple[str, ...] = ()

    def build_model(
        self,
        source: CheckpointSource,
        dtype: torch.dtype | None = None,
        watch: ProgressCallback = lambda done, of: None,
    ) -> FastWeightsForCausalLM:
        """Build the model, tensor by tensor.

        Args:
            source: The checkpoint.
            dtype: The dtype of all weights; None for that of the checkpoint's embeddings.
            watch: Called after every tensor with (tensors done, tensors in all).

        Raises:
            ValueError: If tensors are missing, left over or of another shape; the message names
                them.
        """
        ours = _shapes(self.config)
        self._check_names(source, ours)
        embeddings = self.tensors["model.embed_tokens.weight"]
        assert isinstance(embeddings, TensorSource)
        dtype = source.read(embeddings.source).dtype if dtype is None else dtype
        state, reader = {}, _TensorReader(source)
        for done, name in enumerate(sorted(ours, key=self._order)):
            watch(done, len(ours))
            state[name] = _make_tensor(name, self.tensors[name], ours[name], reader, dtype)
        watch(len(ours), len(ours))
        return FastWeightsForCausalLM.from_pretrained(
            None, config=self.config, state_dict=state, dtype=dtype
        )

    def _order(self, name: str) -> str:
        """What sorts our tensors so that those made of the same one of theirs are neighbours."""
        part = self.tensors[name]
        return part.source if isinstance(part, TensorSource) else ""

    def _check_names(self, source: CheckpointSource, ours: Mapping[str, torch.Size]) -> None:
        read = {
            name: part.sources
            for name, part in self.tensors.items()
            if isinstance(part, TensorSource)
        }
        missing = {
            theirs for name, sources in read.items() if name in ours for theirs in sources
        } - source.names
        left = {
            n
            for n in source.names.difference(*read.values())
            if not any(fnmatch(n, pattern) for pattern in self.ignored)
        }
        lacks, holds = (
            f"lacks {_few(missing)}",
            f"holds {_few(left)}, which no {source.settings.kind} model has",
        )
        if missing or left:
            problems = " and ".join([lacks] * bool(missing) + [holds] * bool(left))
            raise ValueError(f"this {source.settings.kind} checkpoint {problems}")
        assert ours.keys() <= self.tensors.keys(), sorted(ours.keys() - self.tensors.keys())


def prefix_names(ours: str, theirs: str, table: Table) -> dict[str, TensorSource | ConstantTensor]:
    """Complete the names in `table`: ``{ours}.name`` from ``{theirs}.name``."""
    return {f"{ours}.{name}": _prefix_source(theirs, part) for name, part in table.items()}


def outer(
    embeddings: str = "model.embed_tokens",
    norm: str = "model.norm",
    convert: Convert = Tensor.detach,
) -> dict[str, TensorSource]:
    """Map what stands around the layers; `convert` is of the last norm."""
    return {
        "model.embed_tokens.weight": TensorSource(f"{embeddings}.weight"),
        "model.norm.weight": TensorSource(f"{norm}.weight", convert),
        "lm_head.weight": TensorSource("lm_head.weight"),
    }


def plan_layers(
    source: CheckpointSource,
    layers: Sequence[LayerPlan],
    block: Table,
    *,
    around: Mapping[str, TensorSource] = outer(),
    theirs: str = "model.layers",
    parts: int = 1,
    mlps: Sequence[LayerPlan] = (),
    published: Sequence[Mapping[str, str]] = (),
    ignored: tuple[str, ...] = (),
    **fields: Any,
) -> ImportPlan:
    """Plan the import of a stack of layers.

    Args:
        source: The checkpoint.
        layers: The mixer of every layer of ours.
        block: The weights that all layers have.
        around: Those outside of the layers.
        theirs: Name of their list of layers.
        parts: How many layers of ours are one of theirs.
        mlps: The MLP of every layer; none where `block` and `fields` state the one of all.
        published: Patterns for `rename_missing`, each in its turn.
        ignored: As in `ImportPlan`.
        fields: Of the configuration, beside those that all families have.
    """
    settings = source.settings
    sparse = any(mlp["name"] == "experts" for mlp, _ in mlps)
    stated: dict[str, Any] = {
        **settings.common,
        "num_hidden_layers": len(layers),
        "mixers": shortest_period([mixer for mixer, _ in layers]),
        "mlps": shortest_period([mlp for mlp, _ in mlps]) if sparse else None,
        "embedding_scale": 1.0,
        **fields,
    }
    if "hidden_size" not in stated:
        stated["hidden_size"] = settings["hidden_size"]
    tensors: dict[str, TensorSource | ConstantTensor] = dict(around)
    for i, (_, weights) in enumerate(layers):
        table = {**block, **(mlps[i][1] if mlps else {}), **weights}
        tensors |= prefix_names(f"model.layers.{i}", f"{theirs}.{i // parts}", table)
    for names in published:
        tensors = rename_missing(tensors, source.names, names)
    return ImportPlan(FastWeightsConfig(**stated), tensors, ignored)


def shortest_period(layers: Sequence[T]) -> list[T]:
    """Return the shortest beginning of `layers` that, repeated, gives all of them."""
    fits = (
        n
        for n in range(1, len(layers))
        if all(layer == layers[i % n] for i, layer in enumerate(layers))
    )
    return list(layers[: next(fits, len(layers))])


def linear(ours: str, theirs: str, *, bias: bool = False) -> Table:
    """Map a linear layer, with its bias if it has one."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")[: 1 + bias]}


def glu_mlp(theirs: str = "mlp", *, bias: bool = False, ours: str = "mlp") -> Table:
    """Map the MLP of most decoders: gate_proj, up_proj and down_proj."""
    names = {"W_1": "gate_proj", "W_2": "up_proj", "W_3": "down_proj"}
    table: Table = {}
    for a, b in names.items():
        table |= linear(f"{ours}.{a}", f"{theirs}.{b}", bias=bias)
    return table


def scaled(table: Mapping[str, Any], factors: Mapping[str, float | Tensor]) -> dict[str, Any]:
    """Multiply what `factors` has a factor of, by patterns of our names.

    Args:
        table: A table of ours.
        factors: Numbers, or tensors that multiply what is read of theirs.
    """
    found = {
        name: [one for pattern, one in factors.items() if fnmatch(name, pattern)] for name in table
    }
    return {name: _multiplied(part, found[name]) for name, part in table.items()}


def rows(start: int, stop: int | None = None) -> Convert:
    """Return a function that takes the outputs from `start` up to `stop` of a fused projection."""
    return lambda weight: weight[start:stop]


def taps(weight: Tensor) -> Tensor:
    """Convert a depthwise Conv1d's weight ``[d 1 size]`` to ours, ``[size d]``."""
    return weight.squeeze(1).mT


def convolutions(names: Collection[str], theirs: str, widths: Mapping[str, int]) -> Table:
    """Map short convolutions that transformers has in one Conv1d, and files in one each.

    Args:
        names: Names of all their tensors.
        theirs: Name of the module that the convolutions are in.
        widths: Channels of each, by our name, in the order of the one.
    """
    fused = any(name.endswith(".conv1d.weight") for name in names)
    parts = ["conv1d"] if fused else [f"{name}_conv1d" for name in widths]
    first, *others = (f"{theirs}.{part}.weight" for part in parts)
    ends = accumulate(widths.values())
    return {
        f"mixer.conv_{name}.weight": TensorSource(
            first, _channels(end - widths[name], end), tuple(others)
        )
        for name, end in zip(widths, ends, strict=True)
    }


def _channels(start: int, stop: int) -> Convert:
    # files that transformers wrote divide the channels in equal parts, whatever their widths
    return lambda *weights: taps(torch.cat(weights)[start:stop])


def rename_missing(
    tensors: Mapping[str, TensorSource | ConstantTensor],
    names: Collection[str],
    published: Mapping[str, str],
) -> dict[str, TensorSource | ConstantTensor]:
    """Let tensors that the checkpoint lacks come from those with their published names.

    Args:
        tensors: The source of each of our tensors.
        names: Names of all their tensors.
        published: Patterns of parts of a source's name → what the published name has instead.
    """

    def known(name: str) -> str:
        other = name
        for pattern, replacement in published.items():
            other = re.sub(pattern, replacement, other)
        return other if name not in names and other in names else name

    return {
        ours: part
        if isinstance(part, ConstantTensor)
        else TensorSource(known(part.source), part.convert, tuple(map(known, part.others)))
        for ours, part in tensors.items()
    }


def one_plus(weight: Tensor) -> Tensor:
    """Return 1 + w for norms that store w (Gemma, Qwen3-Next), in float32 at least."""
    return 1 + upcast(weight)


def _multiplied(
    part: str | TensorSource | ConstantTensor, factors: Sequence[float | Tensor]
) -> str | TensorSource | ConstantTensor:
    if isinstance(part, ConstantTensor):
        return ConstantTensor(0.0) if factors and not part.value else part
    source = TensorSource(part) if isinstance(part, str) else part
    for factor in factors:
        if isinstance(factor, Tensor) or factor != 1:
            source = source._replace(convert=_times(factor, source.convert))
    return source


def _times(factor: float | Tensor, convert: Convert) -> Convert:
    return lambda *tensors: factor * upcast(convert(*tensors))


def _prefix_source(
    theirs: str, part: str | TensorSource | ConstantTensor
) -> TensorSource | ConstantTensor:
    match part:
        case ConstantTensor():
            return part
        case TensorSource(source, convert, others):
            return TensorSource(
                f"{theirs}.{source}", convert, tuple(f"{theirs}.{name}" for name in others)
            )
        case _:
            return TensorSource(f"{theirs}.{part}")


def _shapes(config: FastWeightsConfig) -> dict[str, torch.Size]:
    """Names and shapes of our tensors, tied ones once."""
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    tied = model.all_tied_weights_keys
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}


class _TensorReader:
    """Reads a tensor once for all of ours that follow each other, and holds no other."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self._name: str | None = None
        self._tensor: Tensor | None = None

    def read(self, name: str) -> Tensor:
        if name != self._name or self._tensor is None:
            self._name, self._tensor = name, None
            self._tensor = self.source.read(name)
        return self._tensor


def _make_tensor(
    name: str,
    part: TensorSource | ConstantTensor,
    shape: torch.Size,
    reader: _TensorReader,
    dtype: torch.dtype,
) -> Tensor:
    if isinstance(part, ConstantTensor):
        return torch.full(shape, part.value, dtype=dtype)
    theirs = reader.read(part.source)
    tensor = part.convert(theirs, *map(reader.source.read, part.others))
    if tensor.shape != shape:
        raise ValueError(
            f"{part.source} of this {reader.source.settings.kind} checkpoint has shape"
            f" {list(theirs.shape)}, which gives {list(tensor.shape)} for our {name}; its"
            f" config.json calls for {list(shape)}"
        )
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _few(names: set[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (
        f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    )
