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

from fastweights.cli.chat_session import end_tokens
from fastweights.cli.load import load_model, rounded_bits
from fastweights.generate import stream
from fastweights.mixers.mesa import set_tolerance
from fastweights.training.data.chats import write_question
from fastweights.training.data.packing import framing_of_each
from fastweights.training.data.tokenizers import TextStream


@dataclass(frozen=True)
class Request:
    """A text to continue, as `stream` takes it.

    Attributes:
        tol: the relative residual at which Mesa layers stop solving; None for all their steps
        raw: whether a prompt is continued as it is where the tokenizer has a chat template
    """

    prompt: str
    tokens: int
    temperature: float
    top_k: int | None
    seed: int
    tol: float | None = None
    raw: bool = False


def write_continuation(
    model: Any,
    tokenizer: Any,
    request: Request,
    read: Callable[[Any, Tensor], Any] | None = None,
) -> None:
    """Write the prompt and its continuation to standard output, as it comes; of a prompt that the
    tokenizer's chat template makes a question, the answer alone.

    `read` makes the cache after all tokens ``[1 t]`` of the prompt but the last, where the model
    does not read them itself.
    """
    if request.tol is not None:
        set_tolerance(model, request.tol)
    asks = bool(tokenizer.chat_template and request.prompt.strip()) and not request.raw
    ends = end_tokens(model, tokenizer)
    if asks:
        note("the prompt is a user's message in the tokenizer's chat template (--raw: as it is)")
        model.generation_config.eos_token_id = ends
    prompt = (encode_question if asks else encode_prompt)(request.prompt, tokenizer)
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
    text, shown = TextStream(tokenizer), [] if asks else prompt
    count = token = 0
    for token in chain(shown, map(int, continuation)):
        if not asks or token not in ends:
            sys.stdout.write(text.push(token))
            sys.stdout.flush()
        count += 1
    sys.stdout.write(text.close() + "\n")
    if count == len(shown) + 1 and token in ends:
        note(f"the model ended the text at once, with {tokenizer.decode(token)}")


def note(line: str) -> None:
    """Say something beside a text, on standard error."""
    sys.stderr.write(f"{line}\n")


def encode_question(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt as the only message of a conversation."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.encode(write_question(messages, tokenizer), add_special_tokens=False)


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
            f"the prompt {prompt!r} has no token, and the tokenizer none that begins a text; give"
            " --prompt another"
        )
    return tokens or [tokenizer.bos_token_id]


def generate(chosen: Namespace, _: Console) -> None:
    """Continue a text with a model, or answer it."""
    model, tokenizer = load_model(
        chosen.checkpoint, chosen.device.torch(), bits=rounded_bits(chosen)
    )
    request = Request(
        prompt=chosen.prompt,
        tokens=chosen.tokens,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        seed=chosen.seed,
        tol=chosen.tol,
        raw=chosen.raw,
    )
    write_continuation(model, tokenizer, request)
