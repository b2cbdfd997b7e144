"""fastweights generate"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fastweights.cli.load import load_model
from fastweights.generate import stream
from fastweights.linearize.convert.model_classes import LinearizedModel
from fastweights.mixers.mesa import set_tolerance
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.data.packing import framing_of_each
from fastweights.training.data.tokenizers import TextStream


@dataclass(frozen=True)
class Request:
    """A text to continue, as `stream` takes it.

    Attributes:
        tol: the relative residual at which Mesa layers stop solving; None for all their steps
    """

    prompt: str
    tokens: int
    temperature: float
    top_k: int | None
    seed: int
    tol: float | None = None


def write_continuation(
    model: Any,
    tokenizer: Any,
    request: Request,
    read: Callable[[Any, Tensor], Any] | None = None,
) -> None:
    """Write the prompt and its continuation to standard output, as it comes.

    `read` makes the cache after all tokens ``[1 t]`` of the prompt but the last, where the model
    does not read them itself.
    """
    if request.tol is not None:
        set_tolerance(model, request.tol)
    prompt = encode_prompt(request.prompt, tokenizer)
    ids, cache = torch.tensor([prompt], device=model.device), None
    if read is not None and len(prompt) > 1:
        ids, cache = ids[:, -1:], read(model, ids[:, :-1])
    continuation = stream(
        model,
        ids,
        max_new_tokens=request.tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        generator=torch.Generator(model.device).manual_seed(request.seed),
        cache=cache,
    )
    text = TextStream(tokenizer)
    for token in chain(prompt, map(int, continuation)):
        sys.stdout.write(text.push(token))
        sys.stdout.flush()
    sys.stdout.write(text.close() + "\n")


def encode_prompt(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt as a document begins; an empty one is the token that begins a text.

    Raises:
        ValueError: If the prompt has no token.
    """
    begin = framing_of_each(tokenizer).before
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    tokens = tokens if begin and tuple(tokens[: len(begin)]) == begin else [*begin, *tokens]
    if not tokens and tokenizer.bos_token_id is None:
        raise ValueError(
            "the prompt is empty, and the tokenizer has no token that begins a text; leave out"
            " --prompt to begin on a new line"
        )
    return tokens or [tokenizer.bos_token_id]


def generate(chosen: Namespace, _: Console) -> None:
    """Continue a text with one of our models, or with a linearized one."""
    model, tokenizer = load_model(chosen.checkpoint, chosen.device.torch(), int8=chosen.int8)
    if not isinstance(model, FastWeightsForCausalLM | LinearizedModel):
        raise ValueError(
            f"{chosen.checkpoint} is a {model.config.model_type} model, whose memory grows with"
            " the text; convert it by `fastweights import` or `fastweights linearize` first"
        )
    request = Request(
        chosen.prompt, chosen.tokens, chosen.temperature, chosen.top_k, chosen.seed, chosen.tol
    )
    write_continuation(model, tokenizer, request)
