"""Test-time training: the state is a small network, which learns from every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import (
    Evaluation,
    NoFiniteFormError,
    Recurrence,
    check_mask,
)
from fastweights.recurrence.streams import ShapeError, State, heads_first, require_width
from fastweights.shapes import HeadVectors, HeadWeights, Keys, Mask, Output, PerToken

Matrices = list[Tensor]
States = tuple[Tensor, ...]
Gradients = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class TTT(Recurrence[States]):
    """A network per head that takes a gradient step at every token, on minibatches of tokens.

    G_t = G_{t-1} + η_t ∇ℓ(W; k_t, v_t) ;  W_t = W - s_t G_t ;  o_t = f(q_t; W_t)

    with ℓ = ½ ‖f(k; W) - v‖² and f(x) = x + LN(network(x)), where W is the network before the
    minibatch, the same for all tokens of it: behind its last token W ← W_t and G ← 0. The network
    is linear (TTT-Linear), or has hidden layers with GELU between them (TTT-MLP has one). Source:
    Sun et al. (2407.04620 eq. 4-7, section 2.5; the step of every token and s_t as in its code).
    `chunk` is the dual form: products within a minibatch, one minibatch after the other.

    The state is (W - W_0 of every layer, ``[b h i+1 o]``, the bias in its last row; G likewise;
    how many tokens of the minibatch it has read, ``[b]``), zeros being the empty one.

    Attributes:
        q, k, v: ``[b t h k]``
        rate: η ``[b t h 1]``
        scale: s, how far the weights go at this token, ``[b t h 1]``, such as 1 / its place in the
            minibatch
        start: W_0 ``[h p]``: of every layer the matrix, row by row, and the bias
        gain, shift: of LN, ``[h k]``
        hidden: the widths of the hidden layers
        size: tokens of a minibatch
        eps: of LN, above 0
        keep_mask, starts: ``[b t 1 1]`` bool, set by `keep` and `restart`
    """

    q: Keys
    k: Keys
    v: Keys
    rate: PerToken
    scale: PerToken
    start: HeadWeights | Tensor
    gain: HeadVectors | Tensor
    shift: HeadVectors | Tensor
    hidden: tuple[int, ...] = ()
    size: int = 16
    eps: float = 1e-6
    keep_mask: Tensor | None = None
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("start", "gain", "shift"):
            given = getattr(self, name)
            if given.dim() == 2:
                object.__setattr__(self, name, given[None, None])
            elif given.dim() != 4 or given.shape[1] > 1:
                raise ShapeError(
                    f"{name} has shape {list(given.shape)}; it is the same for all tokens: give it"
                    " the shape [heads, width]"
                )
        _ = self.shape
        width = self.q.shape[-1]
        for name in ("k", "v", "gain", "shift"):
            require_width(name, getattr(self, name), width)
        for name in ("rate", "scale"):
            require_width(name, getattr(self, name), 1)
        require_width("start", self.start, self.parameters)
        if self.size < 1 or not self.eps > 0:
            raise ValueError(
                f"TTT(size={self.size}, eps={self.eps}): a minibatch has one token or more, and"
                " eps is above 0"
            )

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every layer, the row of the bias included."""
        width = self.q.shape[-1]
        return tuple((i + 1, o) for i, o in pairwise((width, *self.hidden, width)))

    @property
    def parameters(self) -> int:
        """Numbers in the network of a head."""
        return sum(i * o for i, o in self.layers)

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        layers = tuple((b, h, i, o) for i, o in self.layers)
        return *layers, *layers, (b,)

    def initial_state(self) -> States:
        *matrices, count = super().initial_state()
        return *matrices, count.long()

    def adopt(self, state: State) -> States:
        *matrices, count = super().adopt(state)
        return *matrices, state[-1].expand(count.shape).long()

    def state_size(self, context: int) -> int:
        """Of W and G: where in the minibatch the last token stood is no memory of it."""
        del context
        return 2 * self.shape[0] * self.shape[2] * self.parameters

    def step(self, state: States) -> tuple[Output, States]:
        memory, count = self._unpack(state)
        if self.starts is not None:
            fresh = self._flags(self.starts)[:, 0]
            memory, count = memory.emptied(fresh), torch.where(fresh, 0, count)
        kept = self._flags(self.keep_mask)
        q, k, v, rate, scale = (s.transpose(1, 2) for s in self._tokens())
        own = kept[:, :, None, None]
        network = self._network(memory.moved)
        memory = memory.learn(network.gradients(k, v, torch.where(own, rate, 0)))
        o = network.moved([-scale * G for G in memory.sums])(q)
        count = count + kept[:, 0]
        memory = memory.settle(scale, count == self.size)
        o = torch.where(own, o, 0).transpose(1, 2).to(self.output)
        return o, (*memory.moved, *memory.sums, count % self.size)

    def chunk(self, state: States) -> tuple[Output, States]:
        memory, count = self._unpack(state)
        starts = None if self.starts is None else self._flags(self.starts)
        grid = _Grid.of(count, self._flags(self.keep_mask), starts, self.size)
        outputs: list[Tensor] = []
        for number, tokens in enumerate(zip(*map(grid.place, self._tokens()), strict=True)):
            q, k, v, rate, scale = tokens
            if grid.fresh is not None:
                memory = memory.emptied(grid.fresh[:, number])
            network = self._network(memory.moved)
            gradients = network.gradients(k, v, rate)
            outputs.append(network.read(q, memory.sums, gradients, scale))
            memory = memory.learn(gradients).settle(scale[:, :, -1:], grid.full[:, number])
        o = grid.gather(outputs).to(self.output)
        return o, (*memory.moved, *memory.sums, grid.after)

    def _tokens(self) -> list[Tensor]:
        """q, k, v, η and s ``[b t h ·]``."""
        streams = (self.q, self.k, self.v, self.rate, self.scale)
        return [s.to(self.accumulator).expand(*self.shape, -1) for s in streams]

    def _flags(self, mask: Tensor | None) -> Tensor:
        """``[b t]``, True everywhere without a mask."""
        b, t, _ = self.shape
        if mask is None:
            return torch.ones(b, t, dtype=torch.bool, device=self.device)
        return mask[..., 0, 0].expand(b, t)

    def _unpack(self, state: States) -> tuple[_NetworkMemory, Tensor]:
        """The matrices of a state, and the count."""
        *matrices, count = state
        depth = len(self.layers)
        return _NetworkMemory(matrices[:depth], matrices[depth:]), count

    def _network(self, moved: Matrices) -> _Network:
        """The network whose layers are ``moved [b h i+1 o]`` from W_0."""
        start, gain, shift = (
            heads_first(s, self.accumulator) for s in (self.start, self.gain, self.shift)
        )
        parts = start.squeeze(2).split([i * o for i, o in self.layers], -1)
        layers = [part.unflatten(-1, size) for part, size in zip(parts, self.layers, strict=True)]
        return _Network(layers, gain, shift, self.eps).moved(moved)

    def attention_map(self) -> NoReturn:
        raise NoFiniteFormError(
            "the output of a TTT is not linear in its values, which pass the LayerNorm of its"
            " network: there is no attention map; look at its outputs, or at Delta, whose state"
            " takes a gradient step of a linear network without a norm"
        )

    def ltv(self) -> NoReturn:
        raise NoFiniteFormError(
            "the state of a TTT is not linear in the state before it: gradients go through the"
            " LayerNorm of its network, so that there is no system (A, B, C, D); look at Delta,"
            " whose state takes a gradient step of a linear network without a norm"
        )

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(self, keep_mask=mask[..., None, None])

    def restart(self, starts: Mask) -> Self:
        return replace(self, starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> NoReturn:
        del evaluate
        raise NoFiniteFormError(
            "what tokens do to the network of a TTT depends on its weights at every minibatch;"
            " evaluate it by HeadSharded(group), to which HybridSharded(group) turns by itself"
        )

    def step_operations(self, context: int) -> int:
        """A network applied to k and to q, its gradients, their sum, the weights that follow."""
        del context
        return 2 * self.shape[2] * (5 * self.parameters + self._behind)

    def chunk_operations(self, context: int, size: int) -> int:
        """As `step_operations`, with scores and their sums over the minibatch instead of the
        weights that follow.
        """
        del context, size
        within = self.size * sum(i + o for i, o in self.layers)
        return 2 * self.shape[2] * (3 * self.parameters + self._behind + within)

    @property
    def _behind(self) -> int:
        """Numbers in the layers behind the first, through which gradients go."""
        return sum(i * o for i, o in self.layers[1:])


class _Network(NamedTuple):
    """f(x) = x + LN(network(x)) of every sequence and head.

    Attributes:
        layers: ``[b h i+1 o]``, biases in the last rows
        gain, shift: ``[b h 1 k]``
        eps: of the norm
    """

    layers: Matrices
    gain: Tensor
    shift: Tensor
    eps: float

    def moved(self, by: Matrices) -> _Network:
        """The network with these differences added to its layers."""
        return self._replace(layers=[W + D for W, D in zip(self.layers, by, strict=True)])

    def __call__(self, x: Tensor) -> Tensor:
        """f(x) ``[b h t k]``"""
        return x + self._norm(self._forward(x)[-1].output)

    def gradients(self, k: Tensor, v: Tensor, rate: Tensor) -> Gradients:
        """(X, E) of every layer: token t adds η_t ∇ℓ = X_tᵀ E_t to its gradients."""
        applied = self._forward(k)
        # ℓ = ½ ‖k + LN(y) - v‖²
        error = self._norm_backward(applied[-1].output, v - k)
        found = [(applied[-1].input, rate * error)]
        for layer, W in zip(applied[-2::-1], self.layers[:0:-1], strict=True):
            # through W without its bias, then GELU; η multiplies what is written, not what goes on
            error = (error @ W[..., :-1, :].mT) * _gelu_slope(layer.output)
            found.append((layer.input, rate * error))
        return found[::-1]

    def read(self, q: Tensor, sums: Matrices, found: Gradients, scale: Tensor) -> Tensor:
        """f(q_t; W - s_t G_t), G_t = G + Σ_{s≤t} X_sᵀ E_s, from products of q with all X."""
        x = q
        for number, (W, G, (X, E)) in enumerate(zip(self.layers, sums, found, strict=True)):
            x = _with_one(_gelu(x) if number else x)
            # G_t is never formed: scores of x with the inputs X_s of s ≤ t weigh their E_s
            x = x @ W - scale * (x @ G + (x @ X.mT).tril() @ E)
        return q + self._norm(x)

    def _forward(self, x: Tensor) -> list[_Applied]:
        found: list[_Applied] = []
        for number, W in enumerate(self.layers):
            x = _with_one(_gelu(x) if number else x)
            found.append(_Applied(x, x @ W))
            x = found[-1].output
        return found

    def _norm(self, y: Tensor) -> Tensor:
        return self.gain * self._standardize(y)[0] + self.shift

    def _norm_backward(self, y: Tensor, target: Tensor) -> Tensor:
        """d ½ ‖LN(y) - target‖² / d y"""
        standard, deviation = self._standardize(y)
        slope = self.gain * (self.gain * standard + self.shift - target)
        # the adjoint of (I - 1ᵀ1 / k - yᵀy / k) / deviation, y standardised
        along = (slope * standard).mean(-1, keepdim=True)
        return (slope - slope.mean(-1, keepdim=True) - standard * along) / deviation

    def _standardize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y with mean 0 and variance 1, and what it was divided by."""
        y = y - y.mean(-1, keepdim=True)
        deviation = (y.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return y / deviation, deviation


class _Applied(NamedTuple):
    """What a layer read, ones behind it, and its output, before GELU."""

    input: Tensor
    output: Tensor


class _NetworkMemory(NamedTuple):
    """W - W_0 and G of every layer."""

    moved: Matrices
    sums: Matrices

    def emptied(self, where: Tensor) -> _NetworkMemory:
        """Without what it has learnt ``where [b]``."""
        where = where[:, None, None, None]
        return _NetworkMemory(*([torch.where(where, 0, s) for s in part] for part in self))

    def learn(self, gradients: Gradients) -> _NetworkMemory:
        """With these gradients among the sums."""
        sums = [G + X.mT @ E for G, (X, E) in zip(self.sums, gradients, strict=True)]
        return self._replace(sums=sums)

    def settle(self, scale: Tensor, where: Tensor) -> _NetworkMemory:
        """Behind the last token of a minibatch, of ``scale [b h 1 1]``, ``where [b]`` it is one."""
        where = where[:, None, None, None]
        scale = torch.where(where, scale, 0)
        moved = [D - scale * G for D, G in zip(self.moved, self.sums, strict=True)]
        return _NetworkMemory(moved, [torch.where(where, 0, G) for G in self.sums])


class _Grid(NamedTuple):
    """Where tokens stand in minibatches: every sequence's from a place of its own on, those of a
    document from the beginning of one.

    Attributes:
        slot: ``[b t]``, minibatch · size + place in it; behind all for padding
        count, size: minibatches, and tokens of each
        full: ``[b n]``, whether the last token of a minibatch is here
        fresh: ``[b n]``, whether a document begins with it; None if none does
        after: ``[b]``, how many tokens the minibatch has that the next token belongs to
    """

    slot: Tensor
    count: int
    size: int
    full: Tensor
    fresh: Tensor | None
    after: Tensor

    @classmethod
    def of(cls, before: Tensor, kept: Tensor, starts: Tensor | None, size: int) -> Self:
        """Of tokens that are ``kept [b t]``, or begin documents, where ``before [b]`` tokens of a
        minibatch were read.

        With documents the host waits for how many minibatches these take; on the meta device there
        is one.
        """
        b, t = kept.shape
        # which token of the sequence each is, those of the minibatch before counted
        number = kept.cumsum(1) - kept.long() + before[:, None]
        # enough for t tokens behind size - 1 others
        count = (size + t - 2) // size + 1
        if starts is None:
            slot, fresh = number, None
            after = (before + kept.sum(1)) % size
        else:
            document = starts.cumsum(1)
            # kept tokens of each document; document 0 goes on with those that were read before
            lengths = F.pad(before[:, None], (0, t)).scatter_add(1, document, kept.long())
            needed = -(-lengths // size)
            # minibatches, and tokens, of the documents ahead
            first, ahead = needed.cumsum(1) - needed, lengths.cumsum(1) - lengths
            begins = first.gather(1, document)
            slot = size * begins + number - ahead.gather(1, document)
            last = document[:, -1:]
            if not before.is_meta:
                # a last document of padding alone still begins a minibatch
                count = int((begins[:, -1:] + needed.gather(1, last).clamp(min=1)).max())
            fresh = kept.new_zeros(b, count + 1)
            # tokens that begin nothing mark the column behind all
            fresh = fresh.scatter(1, torch.where(starts, begins, count), True)
            after = lengths.gather(1, last)[:, 0] % size
        slot = torch.where(kept, slot, count * size)
        taken = kept.new_zeros(b, count * size + 1).scatter(1, slot, True)
        # places are taken in order: a minibatch is full if its last one is
        full = taken[:, size - 1 : -1 : size]
        return cls(slot, count, size, full, fresh, after)

    def place(self, stream: Tensor) -> tuple[Tensor, ...]:
        """``[b h size ·]`` of every minibatch of ``[b t h ·]``, zeros where there is no token."""
        b, _, h, width = stream.shape
        grid = stream.new_zeros(b, self.count * self.size + 1, h, width)
        grid = grid.index_put((self._rows, self.slot), stream)[:, :-1]
        return grid.unflatten(1, (self.count, self.size)).permute(1, 0, 3, 2, 4).unbind()

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """The reverse of `place`, zeros for padding."""
        grid = torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return F.pad(grid, (0, 0, 0, 0, 0, 1))[self._rows, self.slot]

    @property
    def _rows(self) -> Tensor:
        return torch.arange(self.slot.shape[0], device=self.slot.device)[:, None]


def _with_one(x: Tensor) -> Tensor:
    """With the channel that biases are read by."""
    return F.pad(x, (0, 1), value=1.0)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_slope(x: Tensor) -> Tensor:
    """d GELU / d x of the tanh form."""
    cubic, root = 0.044715, math.sqrt(2 / math.pi)
    t = (root * (x + cubic * x**3)).tanh()
    return (1 + t + x * (1 - t * t) * root * (1 + 3 * cubic * x * x)) / 2
