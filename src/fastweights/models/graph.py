"""One step of decoding on memory that stays where it is, which a CUDA graph can repeat.

A graph is replayed without Python: tokens, states and logits are where they were when it was
captured. So a `StaticStep` reads its token from a tensor of its own and writes every state back to
where it was; the kernels of Triton do so by themselves (`in_place`), what torch makes anew is
copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.kernels.triton.streams import in_place
from fastweights.mixers.fox import FoX
from fastweights.mixers.mla import MLA
from fastweights.mixers.shared import SharedAttention
from fastweights.mixers.softmax import SoftmaxAttention
from fastweights.models.cache import BatchFirstCache, FastWeightsCache
from fastweights.models.cache_names import cache_argument
from fastweights.models.invariant import RowCaches
from fastweights.recurrence.effects import tensors_mapped_by

WARM_UPS = 2
"""Steps before a capture, by which libraries allocate what they keep."""


def parts_of(cache: Any) -> list[Any]:
    """The pieces of a cache that hold states: itself, or the layers of transformers' own."""
    return [cache] if isinstance(cache, BatchFirstCache) else list(cache.layers)


def states_of(cache: Any) -> list[Tensor]:
    """All tensors of a cache whose parts are batch first."""
    return tensors_mapped_by(lambda note: [part.apply(note) for part in parts_of(cache)])


def replace_states(cache: Any, states: Iterable[Tensor]) -> None:
    """Put other tensors in the places of `states_of`."""
    rest = iter(states)
    for part in parts_of(cache):
        part.apply(lambda _: next(rest))


def sizes_of(cache: Any) -> list[torch.Size]:
    """The shapes of the states; one that grows with every token cannot stay where it is."""
    return [state.shape for state in states_of(cache)]


def refuse_static(model: PreTrainedModel, cache: Any) -> str | None:
    """Why no step of this model can be repeated on memory that stays where it is, None if one can
    be once all windows are full.
    """
    if isinstance(cache, RowCaches):
        return "its sequences are read apart from each other"
    if not all(isinstance(part, BatchFirstCache) for part in parts_of(cache)):
        return "its cache keeps the keys and values of all tokens"
    for name, module in model.named_modules():
        if (
            isinstance(module, FoX | MLA | SharedAttention | SoftmaxAttention)
            and getattr(module, "window", None) is None
        ):
            return f"{name} is softmax attention to all tokens"
    own = isinstance(cache, FastWeightsCache)
    if not own and "position_ids" not in signature(model.forward).parameters:
        return f"a {type(model).__name__} takes no position_ids"
    return None


def refuse_graph(model: PreTrainedModel, cache: Any) -> str | None:
    """Why no CUDA graph can be captured of a step of this model, None if one can be once all
    windows are full.
    """
    devices = {str(weights.device) for weights in model.parameters()}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        return f"its weights are on {', '.join(sorted(devices))}, not on one CUDA device"
    if torch.is_autocast_enabled("cuda"):
        return "autocast keeps rounded weights for as long as its block lasts"
    return refuse_static(model, cache)


class StaticStep:
    """Reads one token after the other from the same place, and leaves states and logits in theirs.

    Attributes:
        model: in evaluation mode
        cache: what it has read; its states are this object's own from now on
        token: ``[b 1]``, the token that is read
        position: ``[1 1]``, how many tokens are before it, for a model that does not count itself
        logits: ``[b vocab]`` after it
    """

    def __init__(self, model: PreTrainedModel, cache: Any, logits: Tensor) -> None:
        """
        Args:
            model: one that `refuse_static` does not refuse
            cache: of a size that another token does not change
            logits: those after the last token that was read
        """
        self.model, self.cache, self.logits = model, cache, logits.clone()
        self.token = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        self._parts = parts_of(cache)
        self._tokens = self._parts[0].tokens
        own = isinstance(cache, FastWeightsCache)
        self.position = None if own else torch.full_like(self.token[:1], self._tokens)
        self._states = [_own(state) for state in states_of(cache)]
        replace_states(cache, self._states)
        self._repeat: Callable[[], None] = self._run

    @torch.inference_mode()
    def __call__(self, token: Tensor) -> Tensor:
        """The logits ``[b vocab]`` after one more token ``[b]``, until the next call."""
        self.token.copy_(token[:, None])
        self._repeat()
        self._count(self._tokens + 1)
        return self.logits

    @torch.inference_mode()
    def capture(self, record: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Repeat from now on what `record`, such as `capture_graph`, makes of a step, which it may
        run any number of times.
        """
        changed = [*self._states, self.logits]
        changed += [] if self.position is None else [self.position]
        before = [place.clone() for place in changed]
        try:
            with torch.cuda.device_of(self.token):
                self._repeat = record(self._run)
        finally:
            for place, value in zip(changed, before, strict=True):
                place.copy_(value)
            replace_states(self.cache, self._states)
            self._count(self._tokens)

    def _run(self) -> None:
        model: Any = self.model
        positions = {} if self.position is None else {"position_ids": self.position}
        with in_place():
            output = model(
                input_ids=self.token,
                **cache_argument(self.cache),
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
                **positions,
            )
        for place, state in zip(self._states, states_of(self.cache), strict=True):
            _move(state, place)
        replace_states(self.cache, self._states)
        self.logits.copy_(output.logits[:, -1])
        if self.position is not None:
            self.position.add_(1)

    def _count(self, tokens: int) -> None:
        """Say how many tokens have been read; a graph does not."""
        self._tokens = tokens
        for part in self._parts:
            part.tokens = tokens


def _own(state: Tensor) -> Tensor:
    return state.clone(memory_format=torch.contiguous_format)


def _move(state: Tensor, place: Tensor) -> None:
    """Copy a state to its place, unless it is there."""
    if state.shape != place.shape:
        raise ValueError(
            f"a state of shape {list(place.shape)} has become one of {list(state.shape)}; only"
            " states that do not grow stay where they are"
        )
    if state.data_ptr() != place.data_ptr() or state.stride() != place.stride():
        place.copy_(state)


class HostWaitError(RuntimeError):
    """A step that asks the device for numbers, which a graph cannot."""


def capture_graph(run: Callable[[], None]) -> Callable[[], None]:
    """The replay of a CUDA graph of `run`, which has run a few times before, on a stream of its
    own.

    Raises:
        HostWaitError: if `run` made the host wait for the device
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            _run_without_waiting(run)
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _run_without_waiting(run: Callable[[], None]) -> None:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch says so once in a process
        warnings.filterwarnings("ignore", ".*does not yet detect all", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" in str(error):
            raise HostWaitError(str(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(mode)
