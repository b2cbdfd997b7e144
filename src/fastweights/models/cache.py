"""The cache of every model: what its mixers remember of the tokens before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor
from transformers.cache_utils import Cache

from fastweights.mixer import MixerState


class BatchFirstCache(ABC):
    """What transformers asks of a cache whose tensors are all batch first."""

    @abstractmethod
    def apply(self, f: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `f` of it, such as ``Tensor.detach``."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.apply(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda x: x.repeat_interleave(repeats, dim=0))


class FastWeightsCache(BatchFirstCache, Cache):
    """What a model remembers of the tokens so far: one `MixerState` per layer.

    Empty at first; a forward pass with ``use_cache=True`` advances it in place. Where all mixers
    are recurrent its size does not depend on the number of tokens. A state cannot be wound back:
    keep a ``copy.deepcopy`` to return to.

    Attributes:
        states: The states of the layers; none while the cache is empty.
        tokens: How many tokens the model has read, padding counted.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: tuple[MixerState, ...] = ()
        self.tokens = 0

    def advance(self, states: Sequence[MixerState], tokens: int) -> None:
        """Replace the states by those of all layers after `tokens` more tokens."""
        self.states = tuple(states)
        self.tokens += tokens

    def apply(self, f: Callable[[Tensor], Tensor]) -> None:
        self.states = tuple(state.map(f) for state in self.states)

    def states_before(self, layers: int, batch: int) -> Sequence[MixerState | None]:
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
        return self.states[0].position if self.states else None

    @property
    def is_croppable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, transformers' word for no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise NotImplementedError(
            "a fast-weight state cannot forget its last tokens; copy.deepcopy the cache before"
            " feeding them"
        )

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"FastWeightsCache({len(self)} layers, {self.tokens} tokens, {self.nbytes} bytes)"
