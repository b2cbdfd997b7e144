"""fastweights chat"""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console

from fastweights.cli.chat_session import ChatSession, Message
from fastweights.cli.load import (
    load_model,
    model_identity,
    require_tokenizer,
    rounded_bits,
    rounded_source,
)
from fastweights.cli.verbs.generate import note
from fastweights.errors import CheckpointError, DataError
from fastweights.generate import Sampler
from fastweights.models.graph import refuse_static
from fastweights.training.loop.signals import StopOnSignal

UNSAVED = Path("runs", "chats")
"""Where a conversation is kept that Ctrl-C ends."""
INTERRUPTED = 130


def chat(chosen: Namespace, _: Console) -> int:
    """Talk with a model, line by line; the exit status."""
    talk = Talk(chosen)
    note("/save FILE, /load FILE, /exit; Ctrl-C stops an answer, and ends the chat between them")
    with suppress(ImportError):
        importlib.import_module("readline")  # which lets lines be edited
    try:
        status = talk.run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status:
        talk.keep()
    return status


class Talk:
    """A chat on a terminal.

    Attributes:
        chosen: The options.
        session: The conversation.
        saved: How many of its messages are in a file.
    """

    def __init__(self, chosen: Namespace) -> None:
        self.chosen, self.saved = chosen, 0
        bits = rounded_bits(chosen)
        self.source = rounded_source(chosen.checkpoint, bits)
        if not require_tokenizer(self.source).chat_template:
            raise ValueError(
                f"the tokenizer of {chosen.checkpoint} has no chat template, which says where"
                " answers begin and end; continue texts by `fastweights generate`, or train the"
                " model on chats with --template FILE"
            )
        model, tokenizer = load_model(self.source, chosen.device.torch(), bits=bits)
        generator = torch.Generator(model.device).manual_seed(chosen.seed)
        sampler = Sampler(chosen.temperature, chosen.top_k, generator=generator)
        told: list[Message] = [{"role": "system", "content": chosen.system}]
        self.session = ChatSession(model, tokenizer, sampler, told if chosen.system else (), note)
        if chosen.load is not None:
            self._load(chosen.load)

    @cached_property
    def _model_id(self) -> str:
        return model_identity(self.source, rounded_bits(self.chosen))

    def run(self) -> int:
        """Answer lines until there are no more; the exit status."""
        while (line := _read_line()) is not None:
            match line.split(maxsplit=1):
                case []:
                    continue
                case ["/exit"]:
                    break
                case ["/save" | "/load" as verb, file]:
                    self._try(verb, Path(file.strip()).expanduser())
                case ["/save" | "/load" as verb]:
                    note(f"{verb} needs a file: {verb} chat.safetensors")
                case _ if status := self._answer(line):
                    return status
        return 0

    def _answer(self, line: str) -> int:
        """Write the answer to a line; the exit status if another signal than Ctrl-C came."""
        said = ""
        with StopOnSignal() as stop:
            try:
                for piece in self.session.ask(line, self.chosen.tokens, stop):
                    said += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            except DataError as error:
                note(str(error))
                return 0
        print(flush=True)
        if not said and not stop():
            note("the model ended its answer at once, with the token that ends a turn")
        self._tell_of_memory()
        return stop.exit_status if stop() and stop.exit_status != INTERRUPTED else 0

    def _tell_of_memory(self) -> None:
        """Say after the first answer if the memory grows."""
        answers = sum(message["role"] == "assistant" for message in self.session.messages)
        decoder = self.session.decoder
        if answers == 1 and (why := refuse_static(decoder.model, decoder.cache)):
            note(
                f"memory grows with this conversation: {why}; `fastweights linearize` changes that"
            )

    def _try(self, verb: str, file: Path) -> None:
        try:
            self._save(file) if verb == "/save" else self._load(file)
        except (OSError, CheckpointError) as error:
            note(str(error))

    def _save(self, file: Path) -> None:
        note(f"{self.session.save(file, self._model_id)} in {file}")
        self.saved = len(self.session.messages)

    def _load(self, file: Path) -> None:
        self.session.load(file, self._model_id)
        self.saved = len(self.session.messages)
        state = "with their state" if self.session.text else "to be read again"
        note(f"{self.saved} messages from {file}, {state}")

    def keep(self) -> None:
        """Write a conversation that no file has, and say where."""
        if len(self.session.messages) > max(self.saved, 1):
            file = UNSAVED / time.strftime("%Y-%m-%d-%H-%M-%S.safetensors")
            file.parent.mkdir(parents=True, exist_ok=True)
            self._save(file)


def _read_line() -> str | None:
    """The next line of standard input; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
