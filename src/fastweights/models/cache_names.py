"""What a cache is called, in the arguments of models as in what they return.

transformers 5.24 calls `cache` what was ``past_key_values`` before, or ``cache_params`` in the
models of state spaces. RWKV of transformers says ``state``, and other libraries any of these.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

Output = TypeVar("Output", bound=type)

_NAMES = ("cache", "past_key_values", "cache_params", "state")
_FIELDS = {field.name for field in fields(BaseModelOutputWithPast)}

CACHE = next(name for name in _NAMES if name in _FIELDS)
"""The name in the installed transformers."""

CACHES = tuple(sorted(_NAMES, key=lambda name: name != CACHE))
"""All names, that of the installed transformers first."""


def cache_argument(cache: Any) -> dict[str, Any]:
    """`cache` by its name in the installed transformers, for a call or an output."""
    return {CACHE: cache}


def one_cache(**given: Any) -> Any:
    """The one among these arguments, by name, that is not None; None if there is none.

    Raises:
        ValueError: Several are given.
    """
    found = {name: cache for name, cache in given.items() if cache is not None}
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} are names of one argument, the cache; pass it by one of them"
        )
    return next(iter(found.values()), None)


def take_cache(call: dict[str, Any]) -> Any:
    """The cache of a call, which is taken out of its arguments whatever its name; None if there is
    none.

    Raises:
        ValueError: It is given by several names.
    """
    return one_cache(**{name: call.pop(name) for name in CACHES if name in call})


def rename_cache(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with its cache, whatever its name there, by the one in the installed
    transformers.

    Raises:
        ValueError: It is given by several names.
    """
    cache = take_cache(call)
    return call if cache is None else call | cache_argument(cache)


def name_of_cache(returned: Any) -> str | None:
    """By which name a model has returned a cache; None if it has returned none."""
    found = vars(returned)
    return next((name for name in CACHES if found.get(name) is not None), None)


class GeneratesByEitherName:
    """A model whose `generate` takes a cache by either of transformers' names for it, beside PEFT,
    which knows the older one alone.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers' ``GenerationMixin.generate`` does, with its arguments."""
        base: Any = super()
        return base.generate(*args, **rename_cache(kwargs))

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Make the arguments of the next call, with the cache where prompt tuning looks for it.

        `generate` takes `inputs_embeds` of models alone that name them here.
        """
        base: Any = super()
        given = {} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        inputs = base.prepare_inputs_for_generation(*args, **given, **kwargs)
        return {"past_key_values": take_cache(inputs)} | inputs

    def _prefill(self, input_ids: Tensor, config: Any, given: dict[str, Any], **kwargs: Any) -> Any:
        base: Any = super()
        if given.get("inputs_embeds") is not None and config.prefill_chunk_size:
            config = copy(config)  # transformers splits token ids alone: these are read at once
            config.prefill_chunk_size = None
        return base._prefill(input_ids, config, given, **kwargs)


def with_both_names(output: Output) -> Output:
    """A class of outputs whose cache is an attribute by transformers' older name and its newer."""
    for name in ("cache", "past_key_values"):
        if name != CACHE:
            setattr(output, name, property(attrgetter(CACHE)))
    return output
