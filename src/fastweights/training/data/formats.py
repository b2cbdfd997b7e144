"""What records look like: text, instructions, prompts and chats, as pieces of documents."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from fastweights.errors import DataError
from fastweights.training.data.chats import (
    ASSISTANT,
    OWN_OPTIONS,
    Conversation,
    read_conversation,
    write_by_template,
    write_lines,
)
from fastweights.training.data.tokenizers import pieces

UNREAD = ("images", "videos", "audios")
BESIDE_MESSAGES = ("tools", "chat_template_kwargs", *UNREAD)
FORMATS = {
    ("messages",): ("system", *BESIDE_MESSAGES),
    ("instruction", "output"): ("input", "system", "history"),
    ("prompt", "response"): (),
    ("text",): (),
    ("conversations",): ("system", *BESIDE_MESSAGES),
    ("prompt", "completion"): ("label", *BESIDE_MESSAGES),
}
"""The columns of each format, and those that it may have beside."""
ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately"
    " completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""Stanford Alpaca's prompt, with and without an input."""
_PREFERRED = (
    "{place} has {record}, answers that are preferred to others, which nothing here learns from;"
    ' write those that are to be learnt as "messages", or "prompt" and "completion"'
)


class TextPiece(NamedTuple):
    """A part of a document.

    Attributes:
        text: The text.
        response: Whether a model should learn to write it.
        templated: Whether a chat template has written the document, with all that begins and ends
            it.
    """

    text: str
    response: bool
    templated: bool = False


def needed_columns(names: Collection[str], field: str | None = None) -> list[str]:
    """Select, of the columns that there are, those that documents are made of; none where a
    format's columns are missing.
    """
    formats = FORMATS if field is None else {(field,): BESIDE_MESSAGES}
    needed = {
        name
        for columns, optional in formats.items()
        if set(columns) <= set(names)
        for name in (*columns, *optional)
    }
    return [name for name in names if name in needed]


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
            return _chat(record, _with_system(record, messages, place), place, tokenizer)
        case {"instruction": str(), "output": str(), **others} if unread := [
            name for name in ("system", "history") if others.get(name)
        ]:
            raise DataError(
                f'{place} has "{unread[0]}" beside an instruction, which is not read; write the'
                ' record as "messages"'
            )
        case {"instruction": str(instruction), "output": str(output)}:
            given = str(record.get("input") or "")
            return _instruction(instruction, given, output, place, tokenizer)
        case {"prompt": str(prompt), "response": str(response)}:
            return _answered(prompt, response)
        case {"text": str(text)}:
            return _plain(text)
        case {"conversations": [*messages]} if messages:
            return _chat(record, _with_system(record, messages, place), place, tokenizer)
        case {"prompt": _, "completion": _, "label": value} if _is_verdict(value):
            raise DataError(_PREFERRED.format(place=place, record=_describe(record)))
        case {"chosen": _, "rejected": _}:
            raise DataError(_PREFERRED.format(place=place, record=_describe(record)))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return _answered(prompt, completion)
        case {"prompt": [*asked], "completion": [*answers]} if answers:
            return _completion(record, asked, answers, place, tokenizer)
    raise DataError(
        f'{place} has {_describe(record)}; a record has "text", "instruction" and "output",'
        ' "prompt" and "response" or "completion" (all of them strings), or "messages" or'
        ' "conversations" (lists); --field NAME takes the text from another column'
    )


def _is_verdict(value: Any) -> bool:
    """Whether a label says how good an answer is."""
    return isinstance(value, bool | int | float) or str(value).lower() in {"true", "false"}


def _with_system(record: Mapping[str, Any], messages: Sequence[Any], place: str) -> Sequence[Any]:
    """The messages, behind what a column beside them says to the model."""
    match record.get("system") or None, messages[0]:
        case None, _:
            return messages
        case system, {"role": "system", "content": found} | {"from": "system", "value": found}:
            if system == found:
                return messages
            raise DataError(
                f'{place} has "system" beside messages that begin with another one; leave one out'
            )
        case system, _:
            return [{"role": "system", "content": system}, *messages]


def _options(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What a chat template is given beside the messages; tools may be written as JSON."""
    tools, more = record.get("tools") or None, record.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        tools = "no JSON"
    if not isinstance(tools, list | None) or not isinstance(more, Mapping):
        raise DataError(
            f'{place}: "tools" is a list of JSON schemas, and "chat_template_kwargs" an object'
        )
    if own := sorted(OWN_OPTIONS & more.keys()):
        raise DataError(
            f'{place}: "chat_template_kwargs" has "{own[0]}", which is not for a record to say;'
            " leave it out"
        )
    return {**more, "tools": tools or None}


def _column(
    record: Any, place: str, tokenizer: PreTrainedTokenizerFast | None, field: str
) -> list[TextPiece]:
    match record.get(field) if isinstance(record, dict) else None:
        case str(text):
            return _plain(text)
        case [*messages] if messages:
            return _chat(record, messages, place, tokenizer)
    raise DataError(
        f'{place} has {_describe(record)}; --field {field} asks for text (or messages) in "{field}"'
    )


def _answered(prompt: str, answer: str) -> list[TextPiece]:
    return [TextPiece(prompt, False), TextPiece(answer, True)]


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


def _instruction(
    instruction: str,
    given: str,
    output: str,
    place: str,
    tokenizer: PreTrainedTokenizerFast | None,
) -> list[TextPiece]:
    """As a chat of two messages where there is a chat template, or else as Alpaca has it."""
    if tokenizer is None or tokenizer.chat_template is None:
        return _answered(_alpaca(instruction, given), output)
    question = f"{instruction}\n\n{given}" if given else instruction
    messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": output}]
    return _templated(Conversation(messages, [1]), place, tokenizer)


def _alpaca(instruction: str, given: str) -> str:
    more = ", paired with an input that provides further context" if given else ""
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(more=more, instruction=instruction, input=section)


def _chat(
    record: Mapping[str, Any],
    messages: Sequence[Any],
    place: str,
    tokenizer: PreTrainedTokenizerFast | None,
    first: int = 0,
) -> list[TextPiece]:
    """The turns as the tokenizer's chat template writes them, or else ``role: content`` lines; the
    assistant's are learnt, from number `first` on.
    """
    if unread := [name for name in UNREAD if record.get(name)]:
        raise DataError(f'{place} has "{unread[0]}", and only text is read; leave the record out')
    conversation = read_conversation(messages, place, first, _options(record, place))
    if tokenizer is None or tokenizer.chat_template is None:
        return [TextPiece(*part) for part in write_lines(conversation, place)]
    return _templated(conversation, place, tokenizer)


def _completion(
    record: Mapping[str, Any],
    asked: Sequence[Any],
    answers: Sequence[Any],
    place: str,
    tokenizer: PreTrainedTokenizerFast | None,
) -> list[TextPiece]:
    document = _chat(record, [*asked, *answers], place, tokenizer, first=len(asked))
    if not any(piece.response for piece in document):
        raise DataError(f'{place}: no message of its "completion" is an assistant\'s to be learnt')
    return document


def _templated(
    conversation: Conversation, place: str, tokenizer: PreTrainedTokenizerFast
) -> list[TextPiece]:
    parts = write_by_template(conversation, place, tokenizer)
    return [TextPiece(text, learnt, templated=True) for text, learnt in parts if text]
