"""Arguments that verbs share."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from fastweights.mixers import plugin


class Parser(ArgumentParser):
    """A parser whose first argument may be left out.

    Attributes:
        implied: the sub-verb that is meant where none is named
    """

    implied: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if (
            self.implied is not None
            and args
            and args[0] not in self._verbs
            and not args[0].startswith("-")
        ):
            args = [self.implied, *args]
        return super().parse_known_args(args, namespace)

    @property
    def _verbs(self) -> Collection[str]:
        return [name for action in self._actions for name in action.choices or ()]


@dataclass(frozen=True)
class Device:
    """Where to compute: the accelerator if there is one, or the CPU whatever there is."""

    cpu: bool

    def torch(self) -> torch.device:
        accelerator = (
            None if self.cpu else torch.accelerator.current_accelerator(check_available=True)
        )
        return torch.device("cpu") if accelerator is None else accelerator


def add_device(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_device,
        default=Device(cpu=False),
        metavar="auto|cpu",
        help="auto (default) prefers a GPU",
    )


def mixer_name(text: str) -> str:
    """A mixer's name; ``package.module:Class``, one of the user's own, is known from then on."""
    try:
        return plugin(text) if ":" in text else text
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def add_plugins(parser: ArgumentParser) -> None:
    """Mixers that a checkpoint needs and the library lacks."""
    parser.add_argument(
        "--mixer",
        action="append",
        type=mixer_name,
        metavar="PACKAGE.MODULE:CLASS",
        help="a mixer of your own that a model has; may be repeated",
    )


def mixer_list(text: str) -> tuple[dict[str, object], ...]:
    """``metala,softmax`` or ``[{"name": "metala", "heads": 2}, …]``, names as `mixer_name` takes
    them.
    """
    mixers = _mixers(text)
    for mixer in mixers:
        mixer_name(str(mixer["name"]))
    return mixers


def _mixers(text: str) -> tuple[dict[str, object], ...]:
    if not text.lstrip().startswith("["):
        return tuple({"name": name.strip()} for name in text.split(","))
    try:
        mixers = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not a JSON list: {error}") from error
    if not mixers or not all(isinstance(mixer, dict) and "name" in mixer for mixer in mixers):
        raise ArgumentTypeError(
            'every entry must be an object with a "name", such as [{"name": "metala"}]'
        )
    return tuple(mixers)


def _device(text: str) -> Device:
    if text not in ("auto", "cpu"):
        raise ArgumentTypeError(
            f"{text!r} is not auto or cpu; choose among several GPUs with accelerate launch"
        )
    return Device(cpu=text == "cpu")
