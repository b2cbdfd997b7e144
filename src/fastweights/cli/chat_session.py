"""A conversation with a model, whose state is handed from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import CheckpointError, reason_of
from fastweights.generate import Decoder, Sampler
from fastweights.models.cache import BatchFirstCache
from fastweights.models.continuation import continuation_of
from fastweights.models.graph import parts_of
from fastweights.recurrence.effects import tensors_mapped_by
from fastweights.training.data.chats import (
    ASSISTANT,
    Conversation,
    read_conversation,
    turn_end,
    write_question,
)
from fastweights.training.data.tokenizers import TextStream
from fastweights.training.loop.files import atomic_file

PIECE = 256
"""Tokens of a question that are read between two looks at whether to stop."""
COUNTS = ("tokens", "cumulative_length")
"""Attributes of a cache's parts that count what they have read."""
Message = Mapping[str, Any]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: those of the model, and of the tokenizer's chat template."""
    settings = model.generation_config
    known = None if settings is None else settings.eos_token_id
    found = [*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id]
    tail = tokenizer.encode(turn_end(tokenizer), add_special_tokens=False)[:1]
    added = [token for token in tail if token in tokenizer.added_tokens_decoder]
    return sorted({token for token in (*found, *added) if token is not None})


class ChatSession:
    """A conversation, and the state of a model that has read it.

    Attributes:
        messages: What was said, as a chat template takes it.
        decoder: Has read `text`.
        text: What the model has read; None where that is not known, because it was stopped.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampler: Sampler,
        messages: Sequence[Message] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.tokenizer, self.sampler = model, tokenizer, sampler
        self.messages: list[Message] = [*messages]
        self._note, self._ends = note, end_tokens(model, tokenizer)
        self.decoder, self.text = Decoder(model), ""

    def ask(
        self, question: str, most: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[str]:
        """Yield the answer to a question as it comes.

        Where `stop` returns True the answer ends, or the question is taken back if it is still
        being read.

        Raises:
            DataError: If the chat template refuses the question.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        wanted = write_question(asked, self.tokenizer)
        logits = self._read(wanted, stop)
        if logits is None:
            self._note("stopped while the question was read, which is taken back")
            return
        self.messages = asked
        yield from self._answer(wanted, logits, most, stop)

    def _read(self, wanted: str, stop: Callable[[], bool]) -> Tensor | None:
        """The logits after a text, of which only what is new is read; None if it was stopped."""
        known, why = self.text or "", ""
        if not wanted.startswith(known):
            known, why = "", "; its template writes earlier turns otherwise now"
        if not known:
            self.decoder = Decoder(self.model)
        ids = self.tokenizer.encode(wanted[len(known) :], add_special_tokens=False)
        if not known and len(self.messages) > 1:
            self._note(f"reading the whole conversation again, {len(ids):,} tokens{why}")
        self.text, logits = "", None
        for piece in self._pieces(torch.tensor([ids], device=self.model.device)):
            if stop():
                return None
            logits = self.decoder.read(piece)
        return logits

    def _pieces(self, ids: Tensor) -> tuple[Tensor, ...]:
        return continuation_of(self.model).split(ids, PIECE) if ids.shape[1] > PIECE else (ids,)

    def _answer(
        self, wanted: str, logits: Tensor, most: int, stop: Callable[[], bool]
    ) -> Iterator[str]:
        stream, tokens, said = TextStream(self.tokenizer), list[int](), ""
        try:
            for token in map(int, self.decoder.decode(logits, self.sampler)):
                # the last token is not read, and so is no part of the answer
                if token in self._ends or len(tokens) == most or stop():
                    break
                tokens.append(token)
                new = stream.push(token)
                said += new
                yield new
        finally:
            rest = stream.close()
            self.messages.append({"role": ASSISTANT, "content": said + rest})
        yield rest
        self.text = wanted + self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def save(self, path: Path, model: str) -> str:
        """Write the conversation, with the state if there is one that can be written; says what was
        written.

        Args:
            path: The file.
            model: What tells the model from others.
        """
        states = [] if not self.text else _tensors_of(self.decoder.cache)
        counts = [_counts_of(part) for part in parts_of(self.decoder.cache)] if states else []
        tensors = {f"state.{n:04d}": x.detach().clone().contiguous() for n, x in enumerate(states)}
        metadata = {"messages": self.messages, "text": self.text, "counts": counts, "model": model}
        stored = {name: json.dumps(value) for name, value in metadata.items()}
        with atomic_file(path.resolve()) as new:
            save_file(tensors, new, stored)
        return f"{len(self.messages)} messages and {sum(x.nbytes for x in states):,} bytes of state"

    def load(self, path: Path, model: str) -> None:
        """Go on with a conversation that was saved; one with another model is read again.

        Raises:
            CheckpointError: If it cannot be read.
        """
        messages, text, counts, by, tensors = _read_file(path)
        self.messages, self.text, self.decoder = messages, "", Decoder(self.model)
        if text and by == model and tensors:
            self.decoder.read(torch.zeros(1, 1, dtype=torch.long, device=self.model.device))
            cache = self.decoder.cache
            if len(_tensors_of(cache)) == len(tensors):
                _restore(cache, tensors, counts)
                self.decoder, self.text = Decoder(self.model, cache), text


def _read_file(path: Path) -> tuple[list[Message], str, Any, str, list[Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            tensors = [file.get_tensor(name) for name in sorted(file.keys())]
        conversation: Conversation = read_conversation(stored["messages"], str(path))
        return (
            [*conversation.messages],
            stored["text"],
            stored["counts"],
            stored["model"],
            tensors,
        )
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no conversation ({reason_of(error)})") from error


def _tensors_of(cache: Any) -> list[Tensor]:
    """The tensors of a cache; none if one of its parts is of a kind that is not known."""
    known: list[bool] = []
    found = tensors_mapped_by(
        lambda note: known.extend(_replace(part, note) for part in parts_of(cache))
    )
    return found if all(known) else []


def _replace(part: Any, f: Callable[[Tensor], Tensor]) -> bool:
    """Put `f` of every tensor of a cache's part in its place; whether it is of a known kind."""
    if isinstance(part, BatchFirstCache):
        part.apply(f)
        return True
    if not hasattr(part, "keys"):
        return False
    part.keys, part.values = f(part.keys), f(part.values)
    return True


def _counts_of(part: Any) -> dict[str, int]:
    return {name: int(vars(part)[name]) for name in COUNTS if name in vars(part)}


def _restore(cache: Any, tensors: Sequence[Tensor], counts: Sequence[Mapping[str, int]]) -> None:
    rest = iter(tensors)
    for part, numbers in zip(parts_of(cache), counts, strict=True):
        _replace(part, lambda old: next(rest).to(old))
        vars(part).update(numbers)
