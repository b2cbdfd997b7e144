"""A mixer says where the streams of a recurrence come from; everything else it inherits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastweights.layers import (
    Gate,
    HeadNorm,
    LayerStream,
    Linear,
    ShortConvolution,
    SiLUGate,
    TokenContext,
    both_ways,
    l2_normalize,
    split_heads,
)
from fastweights.methods import Auto, Method, evaluate, require_method
from fastweights.recurrence.base import Recurrence, ShapeError, State
from fastweights.recurrence.cached import CacheRule
from fastweights.recurrence.streams import state_parts, with_room
from fastweights.recurrence.windowed import WindowedLinear
from fastweights.recurrence.windowed_rule import Windowed
from fastweights.shapes import Embedded, Mask, Output, Segments

CACHED = (CacheRule, Windowed, WindowedLinear)
"""Rules whose states hold tokens in the dtype of their streams."""


class MixerState(NamedTuple):
    """What a mixer remembers of a sequence; every tensor is batch first.

    Attributes:
        memory: the recurrence's state
        tails: the last inputs of its short convolutions, ``[b w-1 c]`` each, by their names
        position: ``[b]``, how many tokens of the present document it has seen, padding not
            counted
    """

    memory: State
    tails: dict[str, Tensor]
    position: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """`f` of every tensor: to select, repeat, move or detach sequences."""
        memory = (
            tuple(f(s) for s in self.memory) if isinstance(self.memory, tuple) else f(self.memory)
        )
        tails = {name: f(tail) for name, tail in self.tails.items()}
        return type(self)(memory, tails, f(self.position))

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences together."""
        parts = (*state_parts(self.memory), *self.tails.values(), self.position)
        return sum(part.nbytes for part in parts)


class SumState(NamedTuple):
    """What the mixers of a layer remember that has several, one state each."""

    states: tuple[MixerState | SumState, ...]

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """`f` of every tensor."""
        return type(self)(tuple(state.map(f) for state in self.states))

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences together."""
        return sum(state.nbytes for state in self.states)

    @property
    def position(self) -> Tensor:
        """``[b]``, how many tokens of the present document they have seen."""
        return self.states[0].position


LayerState = MixerState | SumState
"""What one layer of a model remembers."""


class Projection(NamedTuple):
    """A mixer's recurrence on some x.

    Attributes:
        recurrence: with padding and segments applied: what is evaluated
        unmasked: without them, as `project` returned it
        gate: the output gate ``[b t h·v]`` or None
        past: what the projection leaves behind
    """

    recurrence: Recurrence
    unmasked: Recurrence
    gate: Gate
    past: TokenContext


class Mixer(nn.Module, ABC):
    """x ``[b t d]`` → y ``[b t d]`` through a recurrence: y = W_o(norm(o) ⊙ gate).

    A subclass sets ``W_o`` and, unless it overrides `read`, ``norm`` (on ``[b t h v]``); it states
    `project` and, for parameters that are not to start as PyTorch's layers do, `reset_parameters`
    (by ``nn.init`` only).

    Attributes:
        leaves_values, takes_values: whether it leaves its values in the `LayerStream`, or needs
            those of an earlier layer there
    """

    leaves_values: bool = False
    takes_values: bool = False
    norm: nn.Module
    W_o: nn.Module

    def __init__(self, d: int) -> None:
        super().__init__()
        if d < 1:
            raise ShapeError(f"d = {d}; a model has at least one channel")
        self.d = d

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the short convolutions in it learn their names."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            for path, module in value.named_modules(prefix=name):
                if isinstance(module, ShortConvolution):
                    module.name = path

    @abstractmethod
    def project(self, x: Embedded, past: TokenContext) -> tuple[Recurrence, Gate]:
        """The recurrence that x drives, and the output gate ``[b t h·v]`` or None."""

    def read(self, o: Output, gate: Gate, recurrence: Any) -> Embedded:
        """y from the recurrence's output (`recurrence` is the one `project` returned)."""
        if isinstance(self.norm, HeadNorm):
            return self.W_o(self.norm(o, gate).flatten(-2))
        y = self.norm(o).flatten(-2)
        gate = gate.tensor if isinstance(gate, SiLUGate) else gate
        return self.W_o(y if gate is None else y * gate)

    def reset_parameters(self) -> None:
        """Initialise the parameters that have a start of their own."""

    def forward(
        self,
        x: Embedded,
        state: MixerState | None = None,
        *,
        keep: Mask | None = None,
        segments: Segments | None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> tuple[Embedded, MixerState]:
        """(y, state after the last token), continuing from `state`.

        Args:
            x: ``[b t d]``
            state: what an earlier call returned; None for the empty one
            keep: ``[b t]``, False for padding: such a token leaves no trace in any other or in
                the state
            segments: ``[b t]``, an integer per packed document; where it changes, memory starts
                anew
            method: how the recurrence is evaluated
            stream: what earlier layers of a model say of these tokens, and this one to later ones

        Raises:
            ShapeError: for an x, mask or state that does not fit
            TypeError: for an x of another dtype than the weights, or a state that is none
        """
        driven, recurrence, gate, past = self.project_all(
            x, state, keep=keep, segments=segments, method=method, stream=stream
        )
        o, memory = evaluate(driven, None if state is None else state.memory, method)
        return self.read(o, gate, recurrence), MixerState(memory, past.tails, past.position)

    def project_all(
        self,
        x: Embedded,
        state: MixerState | None = None,
        *,
        keep: Mask | None = None,
        segments: Segments | None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> Projection:
        """What `forward` evaluates, and what it reads the output with."""
        require_method(method)
        self._check(x, keep, segments)
        if state is None:
            self._check_start(x)
        else:
            self._check_state(x, state)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0)
        tails, position = (None, None) if state is None else (state.tails, state.position)
        past = TokenContext(x, tails, position, keep, segments, method.neighbours, stream)
        recurrence, gate = self.project(x, past)
        if x.dtype is torch.float16 and not isinstance(recurrence, CACHED):
            recurrence = recurrence.map_streams(with_room)
        driven = recurrence if keep is None else recurrence.keep(keep)
        driven = driven if past.starts is None else driven.restart(past.starts)
        return Projection(driven, recurrence, gate, past)

    def _check(self, x: Tensor, keep: Tensor | None, segments: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[-1] != self.d:
            raise ShapeError(
                f"{type(self).__name__}(d={self.d}) reads [batch, time, {self.d}], got"
                f" {list(x.shape)}"
            )
        for name, mask in (("keep", keep), ("segments", segments)):
            if mask is not None and mask.shape != x.shape[:2]:
                raise ShapeError(
                    f"{name} has shape {list(mask.shape)}, must be [batch, time] ="
                    f" {list(x.shape[:2])}"
                )

    def _check_start(self, x: Tensor) -> None:
        weights: Any = getattr(self.W_o, "weight", x)
        if x.dtype is not weights.dtype and differ_for_good(x, weights):
            raise TypeError(
                f"{type(self).__name__} has weights of {weights.dtype}, x is {x.dtype}; use"
                f" x.to({weights.dtype}), mixer.to({x.dtype}) or torch.autocast"
            )

    def _check_state(self, x: Tensor, state: MixerState) -> None:
        if not isinstance(state, MixerState):
            raise TypeError(
                f"state is a {type(state).__name__}; pass the MixerState that an earlier call"
                " returned, or None"
            )
        if state.position.shape[0] not in (1, x.shape[0]):
            raise ShapeError(
                f"the state is of {len(state.position)} sequences, x of {len(x)}; choose among"
                " them with state.map(lambda s: s[rows]), or begin without a state"
            )


def differ_for_good(x: Tensor, weights: Tensor) -> bool:
    """Whether nothing reconciles the dtypes of these: neither autocast nor quantized weights."""
    return weights.is_floating_point() and not torch.is_autocast_enabled(x.device.type)


class DeltaMixer(Mixer):
    """A mixer of q, k and v behind short convolutions, q and k of length 1: for delta rules.

    A subclass adds its layers in their order, with `add_layers` and `add_convolutions` among them.

    Attributes:
        heads: of q and k
        served: how many heads v has for each of them
        scale: of q
        largest: of β = largest · σ(x W_β): 2 has eigenvalues of I - β kᵀk down to -1
        floor: of L2, see `l2_normalize`
    """

    W_q: Linear
    W_k: Linear
    W_v: Linear
    W_beta: Linear
    W_alpha: nn.Module
    W_g: nn.Module
    conv_q: ShortConvolution
    conv_k: ShortConvolution
    conv_v: ShortConvolution

    def __init__(
        self, d: int, heads: int, width: int, *, negative: bool = False, floor: float = 0.0
    ) -> None:
        """
        Args:
            width: of a head's keys
        """
        super().__init__(d)
        self.heads, self.served, self.scale, self.floor = heads, 1, width**-0.5, floor
        self.largest = 2.0 if negative else 1.0

    def add_layers(self, **widths: int) -> None:
        """``W_name`` of so many outputs, for each name."""
        for name, width in widths.items():
            setattr(self, f"W_{name}", Linear(self.d, width, bias=False))

    def add_convolutions(self, values: int, size: int) -> None:
        """``W_o`` of so many inputs, and a convolution behind each of W_q, W_k and W_v."""
        self.W_o = Linear(values, self.d, bias=False)
        for name, layer in (("q", self.W_q), ("k", self.W_k), ("v", self.W_v)):
            setattr(self, f"conv_{name}", ShortConvolution(layer.out_features, size))

    def convolve(
        self, past: TokenContext, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """SiLU(conv(·)) of each, by heads."""
        q = split_heads(self.conv_q(with_room(q), past, silu=True), self.heads)
        k = split_heads(self.conv_k(with_room(k), past, silu=True), self.heads)
        return q, k, split_heads(self.conv_v(v, past, silu=True), self.heads * self.served)

    def streams(
        self, past: TokenContext, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L2(SiLU(conv(·))) of q, which is scaled, and of k, with a head for each of v's; and v."""
        q, k, v = self.convolve(past, q, k, v)
        q, k = self.normalize(q, k)
        if self.served > 1:
            q, k = (s.repeat_interleave(self.served, dim=2) for s in (q, k))
        return q * self.scale, k, v

    def normalize(self, *streams: Tensor) -> list[Tensor]:
        """L2 of each."""
        return [l2_normalize(stream, self.floor) for stream in streams]

    def beta(self, x: Tensor) -> Tensor:
        """β ``[b t h 1]`` of x W_β."""
        return self.largest * with_room(x).sigmoid()[..., None]


class MixerSum(nn.Module):
    """y = Σ_i M_i(x): mixers that read the same x side by side (Falcon-H1, Zuo et al., 2025)."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(
        self,
        x: Embedded,
        state: SumState | None = None,
        *,
        keep: Mask | None = None,
        segments: Segments | None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> tuple[Embedded, SumState]:
        """(y, states after the last token), as `Mixer.forward`."""
        before: Any = [None] * len(self.mixers) if state is None else state.states
        results = [
            mixer(x, one, keep=keep, segments=segments, method=method, stream=stream)
            for mixer, one in zip(self.mixers, before, strict=True)
        ]
        outputs, states = zip(*results, strict=True)
        return torch.stack(outputs).sum(0), SumState(states)


class Bidirectional(nn.Module):
    """y = M(x) + R M(R x), where R turns time around: the mixer M reads both ways with the same
    weights.

    For whole inputs such as images (MetaLA appendix A4). Padding leaves no trace, and documents of
    `segments` do not meet, wherever they stand. A sequence read backwards gives y backwards: where
    the direction matters, a token at one end (or learnt positions) must tell it.
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    @property
    def W_o(self) -> nn.Module:
        return self.mixer.W_o

    def forward(
        self,
        x: Embedded,
        state: MixerState | None = None,
        *,
        keep: Mask | None = None,
        segments: Segments | None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> tuple[Embedded, None]:
        """(y, None), as `Mixer.forward`; raises ValueError for a state, as there is none to go on
        from.
        """
        if state is not None:
            raise ValueError(
                f"Bidirectional({type(self.mixer).__name__}) reads sequences as a whole and keeps"
                " no state; give it all tokens at once, or use the mixer alone"
            )
        if method.neighbours is not None:
            raise ValueError(
                f"Bidirectional({type(self.mixer).__name__}) reads sequences from their end, too,"
                f" which other processes hold; evaluate it by another method than {method}"
            )
        y, _ = self.mixer(
            both_ways(x),
            keep=None if keep is None else both_ways(keep),
            segments=None if segments is None else both_ways(segments),
            method=method,
            stream=stream,
        )
        ahead, back = y.chunk(2)
        return ahead + back.flip(1), None
