"""What records look like: text, instructions, prompts and chats, as pieces of documents."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.text.tokenizers import pieces

FORMATS = (("messages",), ("instruction", "output"), ("prompt", "response"), ("text",))
"""The columns of each format."""
ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately"
    " completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""Stanford Alpaca's prompt, with and without an input."""


class TextPiece(NamedTuple):
    """A part of a document.

    Attributes:
        text: The text.
        response: Whether a model should learn to write it.
    """

    text: str
    response: bool


def needed_columns(names: Collection[str], field: str | None = None) -> list[str]:
    """Select, of the columns that there are, those that documents are made of; none where a
    format's columns are missing.
    """
    formats = FORMATS if field is None else ((field,),)
    whole = {name for columns in formats if set(columns) <= set(names) for name in columns}
    optional = {"input"} if "instruction" in whole else set[str]()
    return [name for name in names if name in whole | optional]


def document_of(
    record: Any, place: str, tokenizer: PreTrainedTokenizerFast | None, field: str | None = None
) -> list[TextPiece]:
    """Split a record into the pieces of a document, in any format that `read_documents` knows.

    Raises:
        DataError: If the record has another format, or text that is none; the message names its
            place.
    """
    document = (
        _known_format(record, place, tokenizer)
        if field is None
        else _column(record, place, tokenizer, field)
    )
    for piece in document:
        _check_characters(piece.text, place)
    return document


def _known_format(
    record: Any, place: str, tokenizer: PreTrainedTokenizerFast | None
) -> list[TextPiece]:
    match record:
        case {"messages": [*messages]} if messages:
            return _chat(messages, place, tokenizer)
        case {"instruction": str(instruction), "output": str(output)}:
            prompt = _alpaca(instruction, str(record.get("input") or ""))
            return [TextPiece(prompt, False), TextPiece(output, True)]
        case {"prompt": str(prompt), "response": str(response)}:
            return [TextPiece(prompt, False), TextPiece(response, True)]
        case {"text": str(text)}:
            return _plain(text)
    raise DataError(
        f'{place} has {_describe(record)}; a record has "text", "instruction" and "output",'
        ' "prompt" and "response" (all of them strings), or "messages"; --field NAME takes the text'
        " from another column"
    )


def _column(
    record: Any, place: str, tokenizer: PreTrainedTokenizerFast | None, field: str
) -> list[TextPiece]:
    match record.get(field) if isinstance(record, dict) else None:
        case str(text):
            return _plain(text)
        case [*messages] if messages:
            return _chat(messages, place, tokenizer)
    raise DataError(
        f'{place} has {_describe(record)}; --field {field} asks for text (or messages) in "{field}"'
    )


def _plain(text: str) -> list[TextPiece]:
    return [TextPiece(piece, True) for piece in pieces(text)] or [TextPiece("", True)]


def _describe(record: Any) -> str:
    """The fields of a record and their types, or its type."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    return (
        "{" + ", ".join(f'"{k}": {type(record[k]).__name__}' for k in sorted(record, key=str)) + "}"
    )


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has half a character ({text[error.start]!r}, a lone surrogate); write the"
            " whole character, or leave the record out"
        ) from error


def _alpaca(instruction: str, given: str) -> str:
    more = ", paired with an input that provides further context" if given else ""
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(more=more, instruction=instruction, input=section)


def _chat(
    messages: Sequence[Mapping[str, str]], place: str, tokenizer: PreTrainedTokenizerFast | None
) -> list[TextPiece]:
    """Turns as the tokenizer's chat template has them, or else ``role: content`` lines; the
    assistant's are learnt.
    """
    if not all(map(_is_message, messages)):
        raise DataError(f'{place}: every message is an object with "role" and "content", both text')
    try:
        ends = [_render_chat(messages[:count], tokenizer) for count in range(len(messages) + 1)]
    except TemplateError as error:
        raise DataError(f"{place} does not fit the tokenizer's chat template: {error}") from error
    pieces = list[TextPiece]()
    for message, before, after in zip(messages, ends, ends[1:], strict=False):
        if message["role"] != "assistant":
            pieces.append(TextPiece(after[len(before) :], False))
            continue
        start = _opening(before, message, after)
        pieces += [TextPiece(after[len(before) : start], False), TextPiece(after[start:], True)]
    return pieces


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def _opening(before: str, message: Mapping[str, str], after: str) -> int:
    """Where the answer itself begins, behind what the template writes before it."""
    found = after.find(message["content"], len(before))
    return len(before) if found < 0 else found


def _render_chat(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerFast | None
) -> str:
    if tokenizer is None or tokenizer.chat_template is None or not messages:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False))
