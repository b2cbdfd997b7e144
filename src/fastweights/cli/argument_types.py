"""Types of arguments: each turns the text of an argument into a value, or says what is wrong."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastweights import ranges
from fastweights.render.units import bytes_from_words

if TYPE_CHECKING:
    from torch import device

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Types of numbers by their names in torch."""


@dataclass(frozen=True)
class Device:
    """Where to compute: the accelerator if there is one, or the CPU whatever there is."""

    cpu: bool

    def torch(self) -> device:
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


@dataclass(frozen=True)
class Number:
    """A type of arguments: a number of a range."""

    range: ranges.Range

    def __call__(self, text: str) -> int | float:
        try:
            return self.range.read(text)
        except ValueError:
            raise ArgumentTypeError(
                f"{text!r} does not fit; it must be {self.range.words}"
            ) from None


Count = Annotated[int, Number(ranges.POSITIVE_INTEGER)]
CountOrZero = Annotated[int, Number(ranges.NON_NEGATIVE_INTEGER)]
Length = Annotated[int, Number(ranges.SEQUENCE_LENGTH)]
Depths = Annotated[int, Number(ranges.DEPTHS)]
Positive = Annotated[float, Number(ranges.POSITIVE_NUMBER)]
NonNegative = Annotated[float, Number(ranges.NON_NEGATIVE_NUMBER)]
Fraction = Annotated[float, Number(ranges.FRACTION)]


@dataclass(frozen=True)
class NumberList:
    """A type of arguments: numbers of a range with commas between them."""

    each: ranges.Range

    def __call__(self, text: str) -> tuple[int | float, ...]:
        try:
            return tuple(map(Number(self.each), text.split(",")))
        except ArgumentTypeError as error:
            raise ArgumentTypeError(
                f"{text!r} is not a list of numbers such as 1,2,5: {error}"
            ) from None


Counts = Annotated[tuple[int, ...], NumberList(ranges.POSITIVE_INTEGER)]
CountsOrZero = Annotated[tuple[int, ...], NumberList(ranges.NON_NEGATIVE_INTEGER)]
Positives = Annotated[tuple[float, ...], NumberList(ranges.POSITIVE_NUMBER)]


def given(text: str) -> str:
    """A text that says something: an empty one may be a shell's variable that was never set."""
    if not text.strip():
        raise ArgumentTypeError(
            f"{text!r} is empty; name something, or leave the option out (a variable of the shell"
            " that is not set is empty, too)"
        )
    return text


Given = Annotated[str, given]


def model_name(text: str) -> str:
    """A name of a model; what a GGUF file is read with is asked for at once."""
    if given(text).lower().endswith(".gguf"):
        from fastweights.importers.gguf import require_gguf

        try:
            require_gguf(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
    return text


def model_path(text: str) -> Path:
    """As `model_name`, of a model of this machine."""
    return Path(model_name(text))


ModelName = Annotated[str, model_name]
ModelPath = Annotated[Path, model_path]


def size(text: str) -> int:
    """A number of bytes, such as ``64MiB``."""
    try:
        return bytes_from_words(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def utf8(text: str) -> str:
    """A text, of bytes that are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentTypeError(f"{text!r} is not UTF-8; check the terminal's encoding") from None
    return text


def path(text: str) -> Path:
    """The path of a file or folder."""
    return Path(given(text))


Place = Annotated[Path, path]


def chat_template(text: str) -> str:
    """The text of a file with a chat template; empty for ``none``."""
    if given(text) == "none":
        return ""
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(
            f"{text!r} is neither none nor a file with a chat template ({error})"
        ) from None


def tokenizer_name(text: str) -> str:
    """``byte``, ``bpe:N`` or the path of a saved tokenizer."""
    given(text)
    if text.startswith("bpe:") and not text[4:].isdecimal():
        raise ArgumentTypeError(
            f"{text!r}: after bpe: comes the number of tokens, such as bpe:1024"
        )
    return text


def mixer_name(text: str) -> str:
    """A mixer's name; ``package.module:Class``, one of the user's own, is registered by this."""
    return own_mixer(text) if ":" in text else given(text)


def own_mixer(text: str) -> str:
    """``package.module:Class``, a mixer of the user's own, which is registered by this."""
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
        raise ArgumentTypeError(f"{text!r} is not a JSON list: {error}") from error
    if not found or not all(isinstance(mixer, dict) and "name" in mixer for mixer in found):
        raise ArgumentTypeError(
            f'{text!r}: every entry must be an object with a "name", such as [{{"name": "metala"}}]'
        )
    return tuple(found)
