"""transformers' own server with our models: it looks classes up among transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBGenerateManager

from fastweights import auto
from fastweights.models import quantize


def serve_ours() -> None:
    """From now on `transformers serve` loads our folders and linearized ones, and answers requests
    for a continuous batching that a model does not have with that model's words.
    """
    _wrap(ModelManager, "_load_model", _load_any)
    _wrap(CBGenerateManager, "init_cb", _start_batching)


def serve_rounded(bits: int) -> None:
    """From now on `transformers serve` quantizes what it loads."""
    _wrap(ModelManager, "_load_model", _rounding(bits))


def _wrap(owner: type, name: str, ours: Callable[..., Any]) -> None:
    """Have `ours` called with the method that was there; once, however often this is asked."""
    theirs = getattr(owner, name)
    known = getattr(theirs, "wrapped_by", ())
    if ours in known:
        return

    @wraps(theirs)
    def method(*arguments: Any, **named: Any) -> Any:
        return ours(theirs, *arguments, **named)

    vars(method)["wrapped_by"] = (*known, ours)
    setattr(owner, name, method)


def _load_any(
    theirs: Callable[..., Any], manager: ModelManager, name: str, *rest: Any, **named: Any
) -> Any:
    """The model ``folder@revision``, whose class may be ours."""
    folder, _, revision = name.partition("@")
    if named.get("gguf_file") is None:
        config = AutoConfig.from_pretrained(
            folder, revision=revision, trust_remote_code=manager.trust_remote_code
        )
        for architecture in (config.architectures or [])[:1]:
            _offer(architecture)
    return theirs(manager, name, *rest, **named)


@cache
def _rounding(bits: int) -> Callable[..., Any]:
    def load(theirs: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        model = theirs(*arguments, **named)
        return model if getattr(model, "is_quantized", False) else quantize(model, bits)

    return load


def _offer(architecture: str) -> None:
    """Put a class of ours where transformers looks; another's stays what it is."""
    if architecture.startswith(tuple(auto.MODEL_CLASSES)):
        setattr(transformers, architecture, getattr(auto, architecture))


def _start_batching(theirs: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    from fastapi import HTTPException

    try:
        theirs(*arguments, **named)
    except NotImplementedError as error:
        raise HTTPException(status_code=400, detail=str(error)) from error
