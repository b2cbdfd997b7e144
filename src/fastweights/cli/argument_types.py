"""Types of arguments: each turns the text of an argument into a value, or says what is wrong."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Types of numbers by their names in torch."""


@dataclass(frozen=True)
class Device:
    """Where to compute: the accelerator if there is one, or the CPU whatever there is."""

    cpu: bool

    def torch(self) -> torch.device:
        """The device as torch names it."""
        import torch

        accelerator = (
            None if self.cpu else torch.accelerator.current_accelerator(check_available=True)
        )
        return torch.device("cpu") if accelerator is None else accelerator


def device(text: str) -> Device:
    """``auto`` or ``cpu``."""
    if text not in ("auto", "cpu"):
        raise ArgumentTypeError(
            f"{text!r} is not auto or cpu; choose among several GPUs with torchrun"
        )
    return Device(cpu=text == "cpu")


def dtype_name(text: str) -> str:
    """The name of one of `DTYPES`."""
    if text not in DTYPES:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return text


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,2,5") from None


def tokenizer(text: str) -> str:
    """``byte``, ``bpe:N`` or the path of a saved tokenizer."""
    if text.startswith("bpe:") and not text[4:].isdecimal():
        raise ArgumentTypeError(
            f"{text!r}: after bpe: comes the number of tokens, such as bpe:1024"
        )
    return text


def mixer_name(text: str) -> str:
    """A mixer's name; ``package.module:Class``, one of the user's own, is registered by this."""
    if ":" not in text:
        return text
    from fastweights import mixers

    try:
        return mixers.plugin(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def mixer_list(text: str) -> tuple[dict[str, object], ...]:
    """``metala,softmax`` or ``[{"name": "metala", "heads": 2}, …]``, names as `mixer_name` takes
    them.
    """
    found = _mixers(text)
    for mixer in found:
        mixer_name(str(mixer["name"]))
    return found


def _mixers(text: str) -> tuple[dict[str, object], ...]:
    if not text.lstrip().startswith("["):
        return tuple({"name": name.strip()} for name in text.split(","))
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not a JSON list: {error}") from error
    if not found or not all(isinstance(mixer, dict) and "name" in mixer for mixer in found):
        raise ArgumentTypeError(
            'every entry must be an object with a "name", such as [{"name": "metala"}]'
        )
    return tuple(found)
