"""The cache of every model: what its mixers remember of the tokens before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache

from fastweights.layers import TokenContext
from fastweights.mixer import LayerState
from fastweights.models.tokens import Tokens

LONGEST_PAST = 1024
"""Most tokens that a cache remembers for taking them back."""

LAST = 64
"""Tokens of a long text that can be taken back."""

WORTH_READING_APART = 16
"""More settled tokens than these are read once, before a copy of the states is made."""


class CountingCache(Cache):
    """A cache that is no list of transformers' layers: it says itself what it has read."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, transformers' word for no limit."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """No, to transformers' question whether it cannot tell how many tokens it has read."""
        return [False]


class BatchFirstCache(ABC):
    """What transformers asks of a cache whose tensors are all batch first.

    Attributes:
        tokens: How many tokens it has seen.
    """

    tokens: int

    @abstractmethod
    def apply(self, f: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `f` of it, such as ``Tensor.detach``."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.apply(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda x: x.repeat_interleave(repeats, dim=0))


class CheckpointedPast(NamedTuple):
    """Where a cache can go back to.

    Attributes:
        states: The states of the layers before some tokens.
        tokens: How many tokens the model had read then.
        since: The tokens that were read since, or are to be read again.
    """

    states: tuple[LayerState, ...]
    tokens: int
    since: Tokens

    def map(self, f: Callable[[Tensor], Tensor]) -> CheckpointedPast:
        """Apply `f` to every tensor."""
        states = tuple(state.map(f) for state in self.states)
        return self._replace(states=states, since=self.since.map(f))


class FastWeightsCache(BatchFirstCache, CountingCache):
    """What a model remembers of the tokens so far: one `LayerState` per layer.

    Empty at first; a forward pass with ``use_cache=True`` advances it in place. Where all mixers
    are recurrent its size does not depend on the number of tokens. A state cannot be wound back:
    keep a ``copy.deepcopy`` to return to. After `activate_past_recording`, which assisted decoding
    calls, the cache keeps the states before the tokens since the last `crop`, and `crop` goes back
    to those; the tokens that it leaves are read again with the next ones.

    Attributes:
        states: The states of the layers; none while the cache is empty.
        tokens: How many tokens the model has read, padding counted.
        records: Whether it keeps what `crop` needs.
        past: What `crop` goes back to; None for nothing.
        unread: The tokens that `crop` has left and the states have not read; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: tuple[LayerState, ...] = ()
        self.tokens = 0
        self.past: CheckpointedPast | None = None
        self.unread: Tokens | None = None

    def advance(self, states: Sequence[LayerState], tokens: int) -> None:
        """Replace the states by those of all layers after `tokens` more tokens."""
        self.states = tuple(states)
        self.tokens += tokens

    def apply(self, f: Callable[[Tensor], Tensor]) -> None:
        self.states = tuple(state.map(f) for state in self.states)
        self.past = None if self.past is None else self.past.map(f)
        self.unread = None if self.unread is None else self.unread.map(f)

    def states_before(self, layers: int, batch: int) -> Sequence[LayerState | None]:
        """Return each layer's state for `batch` sequences, or Nones while the cache is empty.

        Raises:
            ValueError: The cache comes from a model of other layers, or holds another number of
                sequences.
        """
        if not self.states:
            return [None] * layers
        if len(self.states) != layers:
            raise ValueError(
                f"this cache comes from a model of {len(self.states)} layers, this one has {layers}"
            )
        if self.batch_size != batch:
            raise ValueError(
                f"this cache holds {self.batch_size} sequences, the input {batch}; use"
                " batch_repeat_interleave or batch_select_indices on the cache, or begin a new one"
            )
        return self.states

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences together."""
        return sum(state.nbytes for state in self.states)

    @property
    def batch_size(self) -> int:
        """How many sequences; -1 while empty, as in transformers."""
        return self.states[0].position.shape[0] if self.states else -1

    @property
    def position(self) -> Tensor | None:
        """``[b]``: how many tokens of the present document have been read; None while empty."""
        before = self.states[0].position if self.states else None
        if (unread := self.unread) is None:
            return before
        return TokenContext(unread.x, None, before, unread.keep, unread.segments).position

    def activate_past_recording(self) -> None:
        """From now on, keep what `crop` needs; the name is transformers'."""
        self.records = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back the last tokens."""
        return self.records

    def record(self, tokens: Tokens) -> Iterator[Tokens]:
        """Cut `tokens`, behind those unread, in parts that are to be read one after the other.

        Where there are many that `crop` will not take back, they are the first part: what comes
        before the copy of the states need not be read again.
        """
        settled = tokens.length - LAST
        if self.unread is not None and self.past is not None:
            settled, self.tokens = max(settled, self.unread.length), self.past.tokens
            tokens, self.unread, self.past = tokens.after(self.unread), None, None
        if settled > WORTH_READING_APART:
            settling, tokens = tokens.cut(settled)
            yield settling
            self.past = None
        if self.past is None or self.past.since.length + tokens.length > LONGEST_PAST:
            self.past = CheckpointedPast(self.states, self.tokens, tokens)
        else:
            self.past = self.past._replace(since=tokens.after(self.past.since))
        yield tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens read since the last call, −n of them; 0 settles them all.

        Raises:
            NotImplementedError: The cache has no copy of the states before so many tokens.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove == 0:
            self.past = None if self.unread is None else self.past
            return
        if self.past is None or not 0 < -tokens_to_remove <= self.past.since.length:
            known = 0 if self.past is None else self.past.since.length
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a fast-weight state cannot forget its last tokens, and"
                f" this cache can go back to before {known} of them at most; call"
                " activate_past_recording before feeding what is to be taken back and give crop"
                " minus how many, or copy.deepcopy the cache"
            )
        self.states, self.tokens = self.past.states, self.tokens + tokens_to_remove
        kept, _ = self.past.since.cut(self.past.since.length + tokens_to_remove)
        self.past = self.past._replace(since=kept) if kept.length else None
        self.unread = kept if kept.length else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"FastWeightsCache({len(self)} layers, {self.tokens} tokens, {self.nbytes} bytes)"
