"""Single tokens by packed calls of C, where a model has a `NativeStep`: those of a `Decoder`, and
those that transformers' ``generate`` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastweights.kernels.table import choices
from fastweights.models.cache_names import CACHES, cache_argument, take_cache

_PLAIN = {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", *CACHES}
"""Arguments of a call that say nothing else than which token comes next, with `logits_to_keep`."""


class NoStepError(Exception):
    """Why modules read the tokens of a model."""


class TokenStep(Protocol):
    """What reads single tokens of sequences as a model does; see `NativeStep`."""

    @property
    def stale(self) -> bool:
        """Whether the model is not the one any more that this was made of."""
        ...

    def refuses(self, cache: Any) -> str | None:
        """Why modules read the next token, None if this does."""
        ...

    def knows(self, cache: Any, padded: bool, positions: Tensor | None) -> bool:
        """Whether what it computes is right where tokens so far were padding, and the next ones are
        at these positions ``[b]``."""
        ...

    def __call__(self, token: Tensor, cache: Any, positions: Tensor | None = None) -> Tensor:
        """The logits ``[b vocab]`` after one more token ``[b]``, by which the cache is advanced, at
        these positions ``[b]``; None for how many tokens are before it. They may be overwritten by
        the next call."""
        ...


_STEPS: dict[type, Callable[[Any, int], TokenStep]] = {}


def register_step(kind: type, make: Callable[[Any, int], TokenStep]) -> None:
    """Let steps that `make` makes, of a model of this kind and the number of sequences, read its
    tokens.
    """
    _STEPS[kind] = make


class TokenReader:
    """The `NativeStep` of a model, made anew where a weight, the choice of kernels or the number of
    sequences has changed.

    Args:
        model: in evaluation mode
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._step: TokenStep | str | None = None
        self._generates = False
        self._made_for: tuple[Any, ...] = ()

    def refuse(self, cache: Any, sequences: int, look: bool = True) -> str | None:
        """Why modules read the next tokens behind this cache, None where the step does.

        Args:
            look: whether the model may have changed since the last token
        """
        step, wanted = self._step, (*choices(), sequences)
        stale = look and step is not None and not isinstance(step, str) and step.stale
        if self._made_for != wanted or stale:
            self._step = step = _make_step(self.model, sequences)
            self._made_for = wanted
        return step if isinstance(step, str) else self.step.refuses(cache)

    @property
    def step(self) -> TokenStep:
        """What reads the next tokens, where it is not refused."""
        assert self._step is not None
        assert not isinstance(self._step, str)
        return self._step

    def answer(self, call: dict[str, Any]) -> CausalLMOutputWithPast | None:
        """What the model returns for a call of a token of each sequence; None where modules do."""
        token, cache = call.get("input_ids"), take_cache(dict(call))
        if cache is None or token is None or token.dim() != 2 or token.shape[1] != 1:
            return None
        look, self._generates = not self._generates, True  # nobody changes a model that generates
        if not _asks_for_logits(call) or self.refuse(cache, len(token), look) is not None:
            return None
        mask, positions = call.get("attention_mask"), call.get("position_ids")
        if mask is not None and not (mask.dim() == 2 and bool(mask[:, -1].all())):
            return None
        if positions is not None:
            if positions.dim() != 2 or positions.shape[1] != 1:
                return None
            positions = positions.expand(len(token), 1)[:, 0]
        if not self.step.knows(cache, mask is not None and not bool(mask.all()), positions):
            return None
        logits = self.step(token[:, 0], cache, positions)[:, None].clone()
        return CausalLMOutputWithPast(logits=logits, **cache_argument(cache))


def _make_step(model: Any, sequences: int) -> TokenStep | str:
    """A step of the model, or why there is none."""
    make = next((_STEPS[kind] for kind in type(model).__mro__ if kind in _STEPS), None)
    if make is None:
        return f"a {type(model).__name__} is not a model of ours"
    try:
        with _reading_by(None):  # a step that is tried out is compared with the modules
            return make(model, sequences)
    except NoStepError as error:
        return str(error)


def _asks_for_logits(call: dict[str, Any]) -> bool:
    """Whether a call wants logits and the cache, and nothing else."""
    kept = call.get("logits_to_keep", 0)
    more = (name for name, given in call.items() if given is not None and given is not False)
    plain = all(name in _PLAIN or name == "logits_to_keep" for name in more)
    tuples = call.get("use_cache") is False or call.get("return_dict") is False
    return plain and not tuples and isinstance(kept, int)


_generating: ContextVar[TokenReader | None] = ContextVar("generating", default=None)
"""What reads tokens of the model that generates; None where modules read all."""


@contextmanager
def _reading_by(reader: TokenReader | None) -> Iterator[None]:
    before = _generating.set(reader)
    try:
        yield
    finally:
        _generating.reset(before)


class GeneratesNatively:
    """A model whose ``generate`` reads single tokens by its step, where it has one."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers' ``GenerationMixin.generate`` does, with its arguments."""
        base: Any = super()
        with _reading_by(TokenReader(self)):
            return base.generate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reader, base = _generating.get(), super()
        if reader is not None and reader.model is self and not (args or torch.is_grad_enabled()):
            answer = reader.answer(kwargs)
            if answer is not None:
                return answer
        return base.__call__(*args, **kwargs)  # type: ignore[misc]
