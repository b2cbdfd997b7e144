"""How a model goes on from its cache: with any number of tokens, one by one, or not at all.

Some models of transformers begin from nothing where several tokens follow a cache, or count
positions anew. What a model does is found by reading a short text in pieces and at once, which is
what `fastweights check` asks of it, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastweights.models.cache_names import name_of_cache
from fastweights.models.evaluation import evaluation_mode
from fastweights.models.hf import FastWeightsPreTrainedModel

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUGH = 0.1
"""Of types with fewer digits."""
NEAR = 1e-3
"""Of a model that goes on from its cache: of float64, too, states are float32 in many, and tokens
that weights of 4 bits multiply are rounded (1.2e-4 in a model of 30 layers)."""
PROBE = 2, 40
"""Texts, and tokens in each, that a model is tried on."""


class NoCacheError(ValueError):
    """A model that returns nothing to go on from."""


@dataclass(frozen=True)
class Continuation:
    """A way to go on from a model's cache.

    Attributes:
        most: how many tokens may follow it at a time; 0 if even one has other logits then
        positions: whether the model has to be told where tokens are, as `generate` does
    """

    most: float = inf
    positions: bool = False

    def split(self, ids: Tensor, size: int) -> tuple[Tensor, ...]:
        """``ids [b t]`` in pieces of `size` tokens, or all at once if they cannot be read so."""
        return ids.split(size, 1) if size <= self.most else (ids,)

    def told(self, ids: Tensor, before: int) -> dict[str, Tensor]:
        """What the model is told of ``ids [b t]``, which follow `before` others."""
        if not self.positions:
            return {}
        positions = torch.arange(before, before + ids.shape[1], device=ids.device)
        return {"position_ids": positions[None]}


def continuation_of(model: nn.Module) -> Continuation:
    """How a model goes on from its cache, which is tried once, and said where only so many tokens
    may follow.
    """
    if isinstance(model, FastWeightsPreTrainedModel):
        return Continuation()
    if model not in _known:
        _known[model] = _try_out(model)
        _say(model, _known[model])
    return _known[model]


def forget_continuations() -> None:
    """Try models anew, after their functions have been replaced."""
    _known.clear()


_known: WeakKeyDictionary[nn.Module, Continuation] = WeakKeyDictionary()


def read_pieces(
    model: Any, pieces: Sequence[Tensor], way: Continuation | None = None, **given: Any
) -> Iterator[Tensor]:
    """Yield the logits ``[b t vocab]`` of pieces ``[b t]`` of texts, each read from the cache of
    those before, with these other arguments.

    Raises:
        NoCacheError: if the model returns no cache, and there are several pieces.
    """
    name, cache, before = "", None, 0
    way, carried = way or Continuation(), len(pieces) > 1
    for ids in pieces:
        kept = {} if cache is None else {name: cache}
        told = way.told(ids, before)
        read = model(input_ids=ids, use_cache=carried, **told, **kept, **given)
        yield read.logits
        before += ids.shape[1]
        name = require_cache(model, read) if carried else ""
        cache = getattr(read, name, None)


def require_cache(model: nn.Module, returned: Any) -> str:
    """By which name a model has returned a cache.

    Raises:
        NoCacheError: if it has returned none.
    """
    if name := name_of_cache(returned):
        return name
    raise NoCacheError(
        f"a {type(model).__name__} returns no cache to go on from; use model.generate, which reads"
        " all tokens anew or knows where the model keeps what it has read"
    )


def read_with_cuts(
    model: Any,
    ids: Tensor,
    cuts: Iterable[int],
    way: Continuation | None = None,
    **given: Any,
) -> Tensor:
    """The logits ``[b t vocab]`` of ``ids [b t]``, read in pieces that begin at `cuts`."""
    pieces = ids.tensor_split([*cuts], dim=1)
    return torch.cat([*read_pieces(model, pieces, way, **given)], dim=1)


def _try_out(model: nn.Module) -> Continuation:
    with evaluation_mode(model), _in_float32(model):
        plain, generator = plain_tokens(model), torch.Generator().manual_seed(0)
        ids = plain[torch.randint(len(plain), PROBE, generator=generator)]
        ids = ids.to(next(model.parameters()).device)
        whole = torch.cat([*read_pieces(model, [ids])])
        told = (False, True) if _takes_positions(model) else (False,)
        ways = [Continuation(most, positions) for most in (inf, 1) for positions in told]
        sound = (way for way in ways if _agrees(model, ids, whole, way))
        return next(sound, Continuation(0, told[-1]))


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in signature(model.forward).parameters


def _agrees(model: nn.Module, ids: Tensor, whole: Tensor, way: Continuation) -> bool:
    """Whether the model, read in this way, has the logits of the whole texts at once."""
    tokens = ids.shape[1]
    half = tokens // 2
    cuts = range(half, tokens) if way.most == 1 else (half, tokens - 2, tokens - 1)
    try:
        found = read_with_cuts(model, ids, cuts, way)
    except Exception:  # a stranger's model may raise anything
        return False
    allowed = max(tolerance_of(whole.dtype), NEAR)
    return found.shape == whole.shape and apart(found, whole) <= allowed


def _say(model: nn.Module, way: Continuation) -> None:
    if way.most < inf:
        how = (
            "with several tokens as it reads them at once: a text is read at once, and what follows"
            " that token by token"
            if way.most
            else "as it reads a text at once: to generate a token, all before it are read anew"
        )
        warnings.warn(f"a {type(model).__name__} does not go on from its cache {how}", stacklevel=3)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Widen the weights of a model that transformers says keeps a state, which forgets it by less
    than half precision shows; as they are where there is no memory for that.
    """
    stateful = any(vars(kind).get("_is_stateful") is True for kind in type(model).__mro__)
    narrow = [
        tensor
        for tensor in chain(model.parameters(), model.buffers())
        if stateful and tensor.is_floating_point() and tensor.dtype.itemsize < 4
    ]
    before = [tensor.data for tensor in narrow]
    try:
        for tensor in narrow:
            tensor.data = tensor.data.float()
    except torch.OutOfMemoryError:
        _put_back(narrow, before)
    try:
        yield
    finally:
        _put_back(narrow, before)


def _put_back(tensors: Iterable[Tensor], before: Iterable[Tensor]) -> None:
    for tensor, data in zip(tensors, before, strict=True):
        tensor.data = data


def plain_tokens(model: Any) -> Tensor:
    """The tokens of a model's vocabulary that are not special to it, ascending."""
    config = model.config.get_text_config()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = [getattr(config, name, None) for name in names]
    special = {one for some in found for one in (some if isinstance(some, list) else [some])}
    return torch.tensor(sorted(set(range(config.vocab_size)) - special))


def apart(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| / max |expected|; NaN where a number is not finite."""
    found, expected = found.double(), expected.double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("nan")
    largest = float(expected.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
    return float((found - expected).abs().max()) / largest


def tolerance_of(dtype: torch.dtype) -> float:
    """What rounding may change of a model's logits, over their largest."""
    return TOLERANCES.get(dtype, ROUGH)
