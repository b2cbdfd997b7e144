"""A token of a few sequences through softmax layers, by calls of C that are packed once.

Read by modules, a token of a model of thirty layers spends more time in Python than its weights
take to be read. A `NativeStep` makes the same calls of the same kernels, so the same numbers, on
memory of its own; caches grow as they do for modules, which may go on from them at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import getitem, is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from fastweights.kernels.attention import (
    CacheReader,
    attend_to_cache,
    attend_token_natively,
    gone_by,
)
from fastweights.kernels.growing import append, drop_oldest
from fastweights.kernels.native import library
from fastweights.kernels.native.abi import PointwiseCall, PointwiseKind
from fastweights.kernels.table import select
from fastweights.layers import GatedMLP, HeadNorm, Linear, Rope, WholeNorm
from fastweights.methods import Auto
from fastweights.mixer import MixerState
from fastweights.mixers.softmax import OLMo2Attention, SlidingWindow, SoftmaxAttention
from fastweights.models.block import Block
from fastweights.models.cache import FastWeightsCache
from fastweights.models.hf import FastWeightsForCausalLM
from fastweights.models.quantize import Int4Linear, Int8Linear
from fastweights.models.token_reader import NoStepError, register_step
from fastweights.ops.normalization import RMSNorm, prepare_norm
from fastweights.ops.product import MOST_ROWS, Product, prepare_rows, refuses_here
from fastweights.ops.quantized import QuantizedProduct, prepare_quantized_rows
from fastweights.ops.rotation import Rotation, prepare_rotation
from fastweights.recurrence import Softmax
from fastweights.recurrence.timeline import FORGOTTEN

Call = Callable[[], None]

KINDS = ("_modules", "_parameters", "_buffers")
"""Where a module keeps what it consists of."""

_TRIED = torch.linspace(-9, 9, 31)
"""What an activation is told by."""

_GATES: dict[PointwiseKind, Callable[[Tensor], Tensor]] = {
    PointwiseKind.SILU_GATED: F.silu,
    PointwiseKind.GELU_GATED: partial(F.gelu, approximate="tanh"),
}
"""Activations of gates that C computes."""

ATTENTIONS = (SoftmaxAttention, SlidingWindow, OLMo2Attention)
"""Mixers that project, turn, and attend, and do nothing else."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps what waits for its call."""


class LayerCalls(NamedTuple):
    """The calls of one layer, between which it turns its queries and keys, and attends.

    Attributes:
        project: the norm, and queries, keys and values of it
        finish: the output projection, and the MLP
        turning: the queries of all b sequences, then their keys, ``[1 1 b(h+g) k]``
        value: ``[b g 1 v]``
        read: what the queries have read, ``[b 1 h·v]``
        heads: h
    """

    project: list[Call]
    finish: list[Call]
    turning: Tensor
    value: Tensor
    read: Tensor
    heads: int

    def divide(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[b 1 h k]`` and keys ``[b 1 g k]`` of what `turning` has become."""
        (b, g), rows = self.value.shape[:2], turned.view(-1, turned.shape[-1])
        q, k = rows.split([b * self.heads, b * g])
        return q.view(b, 1, self.heads, -1), k.view(b, 1, g, -1)


class LayerModules(NamedTuple):
    """The modules of a layer x ← x + Norm' W_o Attention(Norm_q W_q n, Norm_k W_k n, W_v n) of
    n = Norm x, then x ← x + Norm' W_3 (act(W_1 n) ⊙ W_2 n) of n = Norm x.

    Attributes:
        norms: before and behind the attention, then before and behind the MLP; None: no norm
        head_norms: of queries and of keys, of each head or of all as one vector; None: no norm
        projections: W_q, W_k, W_v and W_o
        mlp: W_1, W_2 and W_3
        heads: of queries
        kv_heads: of keys and values
        activation: act
    """

    norms: tuple[Any, Any, Any, Any]
    head_norms: tuple[Any, Any]
    projections: tuple[Any, Any, Any, Any]
    mlp: tuple[Any, Any, Any]
    heads: int
    kv_heads: int
    activation: nn.Module


class NativeStep(ABC):
    """Reads single tokens of sequences as a model does, without its modules.

    Args:
        model: in evaluation mode; of weights that stay where they are, see `stale`
        sequences: b, how many are read at once
        hooked: functions that may wait for calls of its modules, as the step does what they do
        exact: whether it has the modules' bits whatever its weights are

    Attributes:
        rounds: whether weights are of few bits: what is computed between the products may then
            differ from what modules compute by rounding

    Raises:
        NoStepError: if modules must read them
    """

    def __init__(
        self,
        model: Any,
        sequences: int,
        hooked: Collection[Callable[..., Any]] = (),
        exact: bool = False,
    ) -> None:
        self.model, self.sequences = model, sequences
        rounded = any(isinstance(part, (Int8Linear, Int4Linear)) for part in model.modules())
        self.rounds = rounded and not exact
        self._rooms: dict[tuple[str, int], Tensor] = {}
        width = model.config.hidden_size
        self._x, self._normed, self._y = (self._room(name, width) for name in ("x", "normed", "y"))
        _require(model.device.type == "cpu", f"its weights are on {model.device.type}")
        _require(model.dtype is torch.float32, f"its weights are {model.dtype}, not float32")
        own = [part.__dict__ for part in model.modules()]
        waiting = [hooks for d in own for name, hooks in d.items() if name in HOOKS]
        strange = any(hook not in hooked for hooks in waiting for hook in hooks.values())
        replaced = any("forward" in d or d.get("_compiled_call_impl") is not None for d in own)
        _require(not (strange or replaced), "a module has hooks, its own forward, or is compiled")
        self._hooks, self._waiting = waiting, list(map(len, waiting))
        places = [(d[kind], name, s) for d in own for kind in KINDS for name, s in d[kind].items()]
        self._places: Any = list(zip(*places, strict=True))
        self._tensors = [s for s in self._places[2] if isinstance(s, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        with torch.no_grad():
            self._layers = [self._calls_of(parts) for parts in self.parts()]

    @abstractmethod
    def parts(self) -> Iterator[LayerModules]:
        """The layers of the model, in order."""

    @abstractmethod
    def prepare_norm(self, norm: Any, x: Tensor, to: Tensor) -> Call:
        """What leaves the norm of the rows of x in `to`, which may be x."""

    @abstractmethod
    def refuses_cache(self, cache: Any) -> str | None:
        """Why modules read what follows this cache."""

    @abstractmethod
    def knows(self, cache: Any, padded: bool, positions: Tensor | None) -> bool:
        """Whether it is right where tokens so far were padding, and the next ones are at these
        positions ``[b]``."""

    @abstractmethod
    def __call__(self, token: Tensor, cache: Any, positions: Tensor | None = None) -> Tensor:
        """The logits ``[b vocab]`` after one more token ``[b]``, by which the cache is advanced, at
        these positions ``[b]``; None for how many tokens are before it."""

    @property
    def stale(self) -> bool:
        """Whether a module or weight has been replaced, moved or hooked since this was made."""
        of, names, parts = self._places
        kept = all(map(is_, map(getitem, of, names), parts))
        hooked = list(map(len, self._hooks)) != self._waiting
        return not kept or hooked or list(map(Tensor.data_ptr, self._tensors)) != self._addresses

    def refuses(self, cache: Any) -> str | None:
        """Why modules read the next token, None if this does."""
        if (why := self.refuses_cache(cache)) is not None:
            return why
        if self.model.training or _has_any_global_hook():
            return "the model is in training mode, or torch has hooks for all modules"
        if torch.is_grad_enabled():
            return "autograd follows"
        return refuses_here()

    def project(self, layer: LayerCalls) -> None:
        """Queries, keys and values of Norm x, where the layer has room for them."""
        for call in layer.project:
            call()

    def finish(self, layer: LayerCalls) -> None:
        """x ← x + W_o o, of what the queries have read, then x ← x + MLP(Norm x)."""
        for call in layer.finish:
            call()

    def _calls_of(self, parts: LayerModules) -> LayerCalls:
        require_products(*parts.projections, *parts.mlp)
        w_q, w_k, w_v, w_o = parts.projections
        w_1, w_2, w_3 = parts.mlp
        queries, keys, values = (layer.out_features for layer in (w_q, w_k, w_v))
        both, b = self._room("turning", queries + keys), self.sequences
        turning = [s.view(b, 1, -1) for s in both.view(-1).split([b * queries, b * keys])]
        value = self._room("value", values)
        read = self._room("read", w_o.in_features)
        gate, z, product = (self._room(n, w_3.in_features) for n in ("gate", "z", "product"))
        before, behind, before_mlp, behind_mlp = parts.norms
        first, normed = self._norm_of_x(before)
        second, normed_again = self._norm_of_x(before_mlp)
        add = self._pointwise(PointwiseKind.SUM, self._x, self._y, self._x)
        project = [
            *first,
            *self._products(w_q, w_k, w_v, x=normed, to=[*turning, value]),
            *chain.from_iterable(map(self._norm_in_place, parts.head_norms, turning)),
        ]
        finish = [
            *self._products(w_o, x=read, to=[self._y]),
            *self._norm_in_place(behind, self._y),
            add,
            *second,
            *self._products(w_1, w_2, x=normed_again, to=[gate, z]),
            self._gate(parts.activation, gate, z, product),
            *self._products(w_3, x=product, to=[self._y]),
            *self._norm_in_place(behind_mlp, self._y),
            add,
        ]
        return LayerCalls(
            library.chain(project),
            library.chain(finish),
            both.view(1, 1, b * (parts.heads + parts.kv_heads), -1),
            value.view(b, parts.kv_heads, 1, -1),
            read,
            parts.heads,
        )

    def _norm_of_x(self, norm: Any) -> tuple[list[Call], Tensor]:
        """What leaves the norm of x, and where; x itself where there is no norm."""
        if norm is None:
            return [], self._x
        return [self.prepare_norm(norm, self._x, self._normed)], self._normed

    def _norm_in_place(self, norm: Any, x: Tensor) -> list[Call]:
        """What puts the norm of rows as wide as its weight in their place."""
        if norm is None:
            return []
        width = 0 if getattr(norm, "weight", None) is None else norm.weight.numel()
        _require(width > 0 and x.shape[-1] % width == 0, "a norm is not of heads, or of all")
        rows = x.view(-1, width)
        return [self.prepare_norm(norm, rows, rows)]

    def _gate(self, activation: nn.Module, gate: Tensor, z: Tensor, to: Tensor) -> Call:
        """What leaves act(gate) ⊙ z: by torch, so that it has the modules' bits, where weights have
        all of theirs."""
        tried = activation(_TRIED)
        known = [kind for kind, compute in _GATES.items() if torch.equal(tried, compute(_TRIED))]
        if self.rounds and known:
            return self._pointwise(known[0], gate, z, to)
        return lambda: torch.mul(activation(gate), z, out=to)  # type: ignore[return-value]

    def _pointwise(self, kind: PointwiseKind, a: Tensor, b: Tensor, to: Tensor) -> Call:
        return library.PreparedCall("fw_pointwise", PointwiseCall(to.numel(), kind, a, b, to))

    def _products(self, *layers: Any, x: Tensor, to: list[Tensor]) -> list[Call]:
        """What leaves the layers of x in these tensors, as `project_each` does."""
        ends = zip(layers, to, strict=True)
        fitting = all(
            layer.in_features == x.shape[-1] and y.numel() == self.sequences * layer.out_features
            for layer, y in ends
        )
        _require(fitting, "its projections do not fit one another")
        if len({type(layer) for layer in layers}) > 1:
            each = zip(layers, to, strict=True)
            return [call for layer, y in each for call in self._products(layer, x=x, to=[y])]
        if type(layers[0]) is Linear:
            call = prepare_rows(tuple(Product(x, one.weight, one.bias) for one in layers), to)
        else:
            quantized = [QuantizedProduct(x, one.stored, one.bias) for one in layers]
            call = prepare_quantized_rows(quantized, to)
        if call is None and self.sequences > MOST_ROWS:
            return [partial(_multiply, layer, x, y) for layer, y in zip(layers, to, strict=True)]
        return [require_call(call, "a product")]

    def _room(self, name: str, width: int) -> Tensor:
        """Memory ``[b 1 width]``, the same for this name in every layer."""
        if (name, width) not in self._rooms:
            self._rooms[name, width] = torch.empty(self.sequences, 1, width)
        return self._rooms[name, width]


class SoftmaxStep(NativeStep):
    """The step of a model of softmax layers of ours."""

    def __init__(self, model: FastWeightsForCausalLM, sequences: int) -> None:
        _require(isinstance(model.model.method, Auto), "its method is not Auto()")
        self._blocks: Any = model.model.layers
        super().__init__(model, sequences)
        self._states: Any = None
        self._sequence_of: dict[tuple[int, ...], Tensor] = {}
        ropes: list[Rope] = [block.mixer.rope for block in self._blocks]
        self._turns = {rope: self._room_of(rope) for rope in ropes if rope.rotary_width}
        self._attentions = [
            SoftmaxToken(layer, rope, self._turns.get(rope) if self.rounds else None)
            for layer, rope in zip(self._layers, ropes, strict=True)
        ]
        self._windows: list[int | None] = [block.mixer.window for block in self._blocks]

    def _room_of(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Where cosines and sines of all sequences will be, at one place."""
        cosines, sines = torch.empty(2, 1, 1, 1, rope.rotary_width)
        return cosines, sines

    def parts(self) -> Iterator[LayerModules]:
        for block in self._blocks:
            _refuse_block(block)
            mixer, mlp = block.mixer, block.mlp
            yield LayerModules(
                _norms_of(block),
                (_none_if_identity(mixer.norm_q), _none_if_identity(mixer.norm_k)),
                (mixer.W_q, mixer.W_k, mixer.W_v, mixer.W_o),
                (mlp.W_1, mlp.W_2, mlp.W_3),
                mixer.heads,
                mixer.kv_heads,
                mlp.activation,
            )

    def prepare_norm(self, norm: Any, x: Tensor, to: Tensor) -> Call:
        plain = type(norm) in (HeadNorm, WholeNorm) and not norm.center
        call = prepare_norm(RMSNorm(x, norm.weight, norm.eps), to) if plain else None
        return require_call(call, "a norm")

    def refuses_cache(self, cache: FastWeightsCache) -> str | None:
        if cache.records or not cache.states:
            return "its cache is empty, or can go back"
        if self._states is cache.states:
            return None
        return _refuses_states(cache, self.sequences, self._windows)

    def knows(self, cache: FastWeightsCache, padded: bool, positions: Tensor | None) -> bool:
        del padded  # the states know which tokens were
        own = cast("list[Any]", cache.states)[0].position
        return positions is None or torch.equal(positions, own)

    def __call__(
        self, token: Tensor, cache: FastWeightsCache, positions: Tensor | None = None
    ) -> Tensor:
        del positions  # the states have them
        trunk, states, x = self.model.model, cast("list[Any]", cache.states), self._x
        position = states[0].position
        embedded = trunk._embeddings(token[:, None], None)
        x.copy_(trunk._scale_and_position(embedded, position, None, None))
        following = {
            window: _next_ages(state.memory[2], window)
            for window, state in dict(zip(self._windows, states, strict=True)).items()
        }
        turns, ahead, after = self._turn_to(position), position + 1, []
        layers = zip(self._layers, self._attentions, self._windows, states, strict=True)
        for layer, attention, window, state in layers:
            self.project(layer)
            own = None if turns is None else self._spread(layer, turns.get(attention.rope))
            age, seen, gone = following[window]
            keys, values = attention.read(state.memory, own, seen, gone)
            self.finish(layer)
            after.append(MixerState((keys, values, age), {}, ahead))
        cache.advance(after, 1)
        self._states = cache.states
        return self.model.logits(trunk.norm(x))[:, -1]

    def _turn_to(self, position: Tensor) -> dict[Rope, tuple[Tensor, Tensor]] | None:
        """What streams turn by at these places ``[b]``; None where it lies where C reads it."""
        alike = bool((position == position[0]).all())
        places = (position[:1] if alike else position)[:, None]
        turns = {rope: rope.turns(places, self._x[: len(places)]) for rope in self._turns}
        if not (alike and all(attention.turns_natively for attention in self._attentions)):
            return turns
        for rope, room in self._turns.items():
            for place, own in zip(room, turns[rope], strict=True):
                place.copy_(own)
            room[1][..., : rope.rotary_width // 2].neg_()
        return None

    def _spread(self, layer: LayerCalls, turns: Sequence[Tensor] | None) -> Any:
        """What each sequence's streams turn by ``[b 1 1 ·]``, as `turning` has them: ``[1 1 b(h+g)
        ·]``, or as they are of sequences at one place."""
        if turns is None or len(turns[0]) == 1:
            return turns
        rows = self._rows_of(layer.heads, layer.value.shape[1])
        return tuple(turn[rows].transpose(0, 2) for turn in turns)

    def _rows_of(self, *heads: int) -> Tensor:
        """Which sequence each row of `turning` is of."""
        if heads not in self._sequence_of:
            each = [torch.arange(self.sequences).repeat_interleave(count) for count in heads]
            self._sequence_of[heads] = torch.cat(each)
        return self._sequence_of[heads]


class SoftmaxToken:
    """What turns the queries and keys of a layer, and reads its cache.

    Args:
        layer: Of a step.
        rope: Its rotary positions.
        turns: Where the cosines and sines will be of all sequences at one place, if C turns by
            them, which rounds otherwise than `rope` does.

    Attributes:
        turns_natively: Whether C turns where it is told nothing else.
    """

    def __init__(self, layer: LayerCalls, rope: Rope, turns: tuple[Tensor, Tensor] | None) -> None:
        self._layer, self.rope = layer, rope
        self._turned = torch.empty_like(layer.turning) if rope.rotary_width else layer.turning
        q, key = layer.divide(self._turned)
        g, b = key.shape[2], len(key)
        self._q = q.view(b, g, -1, q.shape[-1])
        self._key = key.view(b, g, 1, -1)
        o = layer.read.view(*self._q.shape[:3], -1)
        self._reader = CacheReader(self._q, self._key, layer.value, o)
        self._turn: Call | None = None
        if turns is not None and rope.rotary_width == rope.width:
            self._turn = prepare_rotation(Rotation(layer.turning, *turns), self._turned)
        self.turns_natively = self._turn is not None or not rope.rotary_width

    def read(
        self, memory: Any, turns: Sequence[Tensor] | None, seen: Tensor | None, gone: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values behind the token, which reads those that it sees ``[b 1 1 s]``, or all.

        Args:
            memory: Keys, values and ages before it.
            turns: What queries and keys turn by; None: what C has been told of, or nothing.
            seen: Which tokens are read; None for all.
            gone: How many of the oldest the next one does not see.
        """
        if turns is not None:
            self._turned.copy_(self.rope.turn_by(self._layer.turning, *turns))
        elif self._turn is not None:
            self._turn()
        if seen is None:
            return self._reader.read(memory[0], memory[1], gone)
        keys, values = append(memory[0], self._key), append(memory[1], self._layer.value)
        o = attend_to_cache(self._q, keys, values, seen)
        self._layer.read.view(o.shape).copy_(o)
        return drop_oldest(keys, gone), drop_oldest(values, gone)


register_step(FastWeightsForCausalLM, SoftmaxStep)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NoStepError(otherwise)


def _multiply(layer: nn.Module, x: Tensor, y: Tensor) -> None:
    y.copy_(layer(x))


def require_products(*layers: Any) -> None:
    """Raise NoStepError unless each layer is a product with a weight, as those of ours are."""
    known = (Linear, Int8Linear, Int4Linear)
    _require(all(type(layer) in known for layer in layers), "a projection is not ours")


def require_call(call: Call | None, what: str) -> Call:
    """The call that there is. Raises NoStepError where there is none, of what is computed."""
    if call is None:
        raise NoStepError(f"{what} is not computed by the compiled extension")
    return call


def _norms_of(block: Block) -> tuple[Any, Any, Any, Any]:
    """Of a block: before and behind the mixer, before and behind the MLP."""
    if block.post_norm:
        return None, block.mixer_norm, None, block.mlp_norm
    before, behind, before_mlp, behind_mlp = map(_none_if_identity, block.norms)
    return before, behind, before_mlp, behind_mlp


def _none_if_identity(norm: nn.Module | None) -> nn.Module | None:
    return None if type(norm) is nn.Identity else norm


def _refuse_block(block: Any) -> None:
    plain = type(block) is Block and block.shared is None
    around = plain and not (block.parallel or block.normalized)
    _require(around, "its blocks are not x + Mixer(x) and x + MLP(x), with norms")
    mixer: Any = block.mixer
    _require(type(mixer) in ATTENTIONS, f"a mixer is {type(mixer).__name__}, not softmax")
    _require(mixer.W_g is None, "its attention has a gate")
    _require(type(block.mlp) is GatedMLP, "an MLP is not gated")
    q, k = torch.empty(1, 1, mixer.heads, 1), torch.empty(1, 1, mixer.kv_heads, 1)
    taken = select(Softmax(q, k, k, mixer.window)).compute is attend_token_natively
    _require(taken, "attention to one token goes to another kernel")


def _next_ages(age: Tensor, window: int | None) -> tuple[Tensor, Tensor | None, int]:
    """The ages ``[b s+1]`` of cached tokens and of the next one, without those of the oldest tokens
    that the one behind it does not see, which of all it sees ``[b 1 1 s+1]``, None for all, and how
    many these oldest are.
    """
    following = F.pad(age + 1, (0, 1), value=1)
    there = following < FORGOTTEN if window is None else following <= window
    gone = 0 if window is None else gone_by(window, following.shape[1])
    seen = None if bool(there.all()) else there[:, None, None]
    return following[:, gone:], seen, gone


def _refuses_states(
    cache: FastWeightsCache, sequences: int, windows: Sequence[int | None]
) -> str | None:
    """Why not all layers have read the same tokens of so many sequences."""
    states = cast("tuple[Any, ...]", cache.states)
    if cache.batch_size != sequences:
        return f"its cache holds {cache.batch_size} sequences, not {sequences}"
    parts = [part for state in states for part in state.memory[:2]]
    if any(part.dtype is not torch.float32 for part in parts):
        return "its cache is not float32"
    ages = dict(zip(windows, (state.memory[2] for state in states), strict=True))
    each = zip(windows, states, strict=True)
    same = all(torch.equal(state.memory[2], ages[window]) for window, state in each)
    if not same or not all(torch.equal(state.position, states[0].position) for state in states):
        return "its layers have not read the same tokens"
    return None if all(age.numel() for age in ages.values()) else "it has read no token"
