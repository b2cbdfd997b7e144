"""fastweights generate"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer

from fastweights.cli.arguments import add_device, add_plugins
from fastweights.generate import stream
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.mesa import set_tolerance
from fastweights.runs.checkpoint import model_folder, no_progress_bars
from fastweights.text.tokenizers import TextStream


def generate(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """Continue a prompt, token by token, in constant memory."""
    parser.add_argument(
        "checkpoint", help="a run, a checkpoint or model folder, or a name on the Hugging Face hub"
    )
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a new line)")
    parser.add_argument(
        "--tokens", type=int, default=300, help="how many tokens to generate (default: 300)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, help="draw among the K likeliest tokens only (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (default: 0)"
    )
    parser.add_argument(
        "--tol",
        type=float,
        help="Mesa layers: stop solving at this relative residual, such as 1e-4 (default: never)",
    )
    add_plugins(parser)
    add_device(parser)
    return _generate


@dataclass(frozen=True)
class Request:
    """A text to continue, as `stream` takes it."""

    prompt: str
    tokens: int
    temperature: float
    top_k: int | None
    seed: int
    tol: float | None = None


def write_continuation(source: str | Path, request: Request, device: torch.device) -> None:
    """Write the prompt and its continuation to standard output, as it comes."""
    with no_progress_bars():
        model = FastWeightsForCausalLM.from_pretrained(source).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(source)
    if request.tol is not None:
        set_tolerance(model, request.tol)
    prompt = tokenizer.encode(request.prompt, add_special_tokens=False)
    if not prompt:
        raise ValueError("the prompt is empty; leave out --prompt to begin on a new line")
    continuation = stream(
        model,
        torch.tensor([prompt], device=device),
        max_new_tokens=request.tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        generator=torch.Generator(device).manual_seed(request.seed),
    )
    text = TextStream(tokenizer)
    for token in chain(prompt, map(int, continuation)):
        sys.stdout.write(text.push(token))
        sys.stdout.flush()
    sys.stdout.write(text.close() + "\n")


def _generate(chosen: Namespace, _: Console) -> None:
    path = Path(chosen.checkpoint)
    source = model_folder(path) if path.exists() else chosen.checkpoint
    request = Request(
        chosen.prompt, chosen.tokens, chosen.temperature, chosen.top_k, chosen.seed, chosen.tol
    )
    write_continuation(source, request, chosen.device.torch())
