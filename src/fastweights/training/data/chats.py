"""Conversations: what records say of them, and their text with the places of the answers in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from fastweights.errors import DataError

ASSISTANT = "assistant"
SENDERS = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""The role of each sender that ShareGPT's conversations name."""
OWN_OPTIONS = {"messages", *signature(PreTrainedTokenizerFast.apply_chat_template).parameters} - {
    "documents"
}
"""What a record cannot give a template beside its messages."""
Span = tuple[int, int]
"""The first character of a part of a text, and the one behind its last."""
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError)
"""What a template raises at messages that it does not take."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """What a record says of a conversation.

    Attributes:
        messages: As a chat template takes them.
        learnt: Numbers of the messages that a model should learn to write.
        options: What the template is given beside them, such as tools.
    """

    messages: Sequence[Mapping[str, Any]]
    learnt: Collection[int]
    options: Mapping[str, Any] = field(default_factory=dict)


def read_conversation(
    found: Sequence[Any], place: str, first: int = 0, options: Mapping[str, Any] | None = None
) -> Conversation:
    """Read messages, each of "role" and "content", or of ShareGPT's "from" and "value".

    Args:
        found: The messages.
        place: Where they stand, for messages of errors.
        first: Number of the message from which on answers are learnt.
        options: What the template is given beside them, such as tools; those that are None are not.

    Raises:
        DataError: If one is no message, or has what is no text.
    """
    messages = [_message(one, place) for one in found]
    learnt = [n for n, message in enumerate(messages) if n >= first and _is_learnt(message, place)]
    given = {name: one for name, one in (options or {}).items() if one is not None}
    return Conversation(messages, learnt, given)


def _message(found: Any, place: str) -> dict[str, Any]:
    match (
        {k: v for k, v in found.items() if v is not None} if isinstance(found, Mapping) else found
    ):
        case {"tool_calls": calls} if not isinstance(calls, list):
            pass
        case {"role": str(role), "content": str()} as message:
            _require_role(role, place)
            return message
        case {"role": str(role), "tool_calls": [_, *_]} as message if "content" not in message:
            _require_role(role, place)
            return message
        case {"role": str(role), "content": [_, *_] as parts} as message:
            _require_role(role, place)
            _require_text_parts(parts, place)
            return message
        case {"from": str(sender), "value": str(value), **others}:
            return {**others, "role": _role(sender, place), "content": value}
    raise DataError(
        f'{place}: every message is an object with "role" and "content", both text, or with "from"'
        ' and "value"; "content" may be a list of {"type": "text", "text": …}, too, and'
        ' "tool_calls" a list'
    )


def _require_role(role: str, place: str) -> None:
    """Refuse a role that templates know by another name, whose answers would not be learnt."""
    known = SENDERS.get(role.lower(), role)
    if role != known:
        raise DataError(f'{place}: a message has "role": {role!r}; write {known!r}')


def _role(sender: str, place: str) -> str:
    if sender not in SENDERS:
        raise DataError(
            f'{place}: a message is "from" {sender!r}; known are {", ".join(SENDERS)}: write one'
            " of these, or leave the record out"
        )
    return SENDERS[sender]


def _require_text_parts(parts: Sequence[Any], place: str) -> None:
    for part in parts:
        match part:
            case {"type": "text", "text": str()}:
                continue
            case {"type": str(kind)}:
                said = f'a part of type "{kind}"'
            case _:
                said = "a part without a type"
        raise DataError(
            f'{place}: a message has {said}; only {{"type": "text", "text": …}} is read, so leave'
            " the record out, or write what it says as text"
        )


def _is_learnt(message: Mapping[str, Any], place: str) -> bool:
    weight = message.get("weight", message.get("train", 1))
    if weight not in (0, 1):
        raise DataError(f'{place}: a message has "weight": {weight!r}; it is 0 or 1')
    return message["role"] == ASSISTANT and weight == 1


def write_lines(conversation: Conversation, place: str) -> Iterator[tuple[str, bool]]:
    """Write a conversation without a template, in ``role: content`` lines; yields their parts, and
    whether each is learnt.

    Raises:
        DataError: If there are tools.
    """
    if "tools" in conversation.options or any(map(_has_calls, conversation.messages)):
        raise DataError(
            f"{place} has tools, which only a chat template can write; take a tokenizer with one"
        )
    for number, message in enumerate(conversation.messages):
        header, line = f"{message['role']}: ", f"{_joined(message['content'])}\n"
        if number in conversation.learnt:
            yield header, False
            yield line, True
        else:
            yield header + line, False


def _has_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def write_by_template(
    conversation: Conversation, place: str, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[str, bool]]:
    """Write a conversation once, as the tokenizer's chat template has it; yields the answers that
    are learnt, each with what ends it, and what stands between them.

    An answer is what the template marks by ``{% generation %}``; else it begins behind what
    ``add_generation_prompt`` writes, or where another content would stand, and ends where the
    template ends the conversation up to it.

    Raises:
        DataError: If the template refuses the conversation, or does not let an answer be found.
    """
    text, answers = _write(conversation, place, tokenizer)
    behind = 0
    for start, end in answers:
        yield text[behind:start], False
        yield text[start:end], True
        behind = end
    yield text[behind:], False


def write_question(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> str:
    """Write messages as the tokenizer's chat template has them, up to where the answer to the last
    begins.

    Raises:
        DataError: If the template refuses them.
    """
    try:
        return _Template(tokenizer, {}).write(messages, add_generation_prompt=True)
    except _REFUSALS as error:
        raise DataError(
            f"the conversation does not fit the tokenizer's chat template: {error}"
        ) from error


def turn_end(tokenizer: PreTrainedTokenizerFast) -> str:
    """What the tokenizer's chat template writes behind an answer; empty if that is not known."""
    mark = _mark("")
    messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": mark}]
    written = _Template(tokenizer, {}).try_to_write(messages) or ""
    return written.rpartition(mark)[2].strip() if mark in written else ""


def _write(
    conversation: Conversation, place: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, list[Span]]:
    """The text, and where the answers stand in it."""
    template = _Template(tokenizer, conversation.options)
    messages = template.fit(conversation.messages)
    try:
        text = template.write(messages)
        marked = template.marked_spans(messages)
        unwritten = template.unwritten_tools(messages, text)
    except _REFUSALS as error:
        raise DataError(f"{place} does not fit the tokenizer's chat template: {error}") from error
    if unwritten:
        raise DataError(
            f"{place} has {unwritten}, which the tokenizer's chat template does not write; take a"
            " template that does, or leave them out"
        )
    if marked is not None:
        return text, _select_marked(conversation, marked, place)
    written = _Written(template, messages, text)
    return text, written.find_answers(conversation.learnt, place)


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _select_marked(conversation: Conversation, marked: Sequence[Span], place: str) -> list[Span]:
    """Of the spans that a template marks, those of the messages that are learnt."""
    answers = [n for n, one in enumerate(conversation.messages) if one["role"] == ASSISTANT]
    if answers and list(conversation.learnt) == answers and marked:
        return list(marked)
    if len(marked) != len(answers):
        raise DataError(
            f"{place}: the tokenizer's chat template marks {len(marked)} answers by"
            f" {{% generation %}}, the conversation has {len(answers)}, of which"
            f" {len(conversation.learnt)} are learnt; mark each of them in the template"
        )
    return [span for n, span in zip(answers, marked, strict=True) if n in conversation.learnt]


@dataclass(frozen=True)
class _Template:
    """The chat template of a tokenizer, with what it is given beside the messages."""

    tokenizer: PreTrainedTokenizerFast
    options: Mapping[str, Any]

    def write(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        found = [dict(message) for message in messages]
        return str(
            self.tokenizer.apply_chat_template(found, tokenize=False, **self.options, **given)
        )

    def try_to_write(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str | None:
        """None if the template refuses them."""
        try:
            return self.write(messages, **given)
        except _REFUSALS:
            return None

    def marked_spans(self, messages: Sequence[Mapping[str, Any]]) -> list[Span] | None:
        """What stands between ``{% generation %}`` and its end; None if the template has none."""
        source = self.tokenizer.get_chat_template(None, self.options.get("tools"))
        if not _MARKER.search(source):
            return None
        options: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.options}
        _, [spans] = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=source,
            return_assistant_tokens_mask=True,
            **options,
        )
        return [(int(start), int(end)) for start, end in spans if start < end]

    def unwritten_tools(self, messages: Sequence[Mapping[str, Any]], text: str) -> str:
        """What of tools leaves no trace in the text; "" if all does."""
        plain = _Template(self.tokenizer, {**self.options, "tools": None})
        if "tools" in self.options and plain.try_to_write(messages) == text:
            return '"tools"'
        for number, message in enumerate(messages):
            changed = [*messages]
            changed[number] = {k: v for k, v in message.items() if k != "tool_calls"}
            if _has_calls(message) and self.try_to_write(changed) == text:
                return f'"tool_calls" in message {number + 1}'
        return ""

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages, with the parts of contents joined where the template does not take them."""
        joined = [
            {**one, "content": _joined(one["content"])} if one.get("content") else one
            for one in messages
        ]
        return [
            one if isinstance(one.get("content"), list) and self._takes_parts(joined, n) else plain
            for n, (one, plain) in enumerate(zip(messages, joined, strict=True))
        ]

    def _takes_parts(self, messages: Sequence[Mapping[str, Any]], number: int) -> bool:
        mark, changed = _mark(""), [*messages]
        parts = [{"type": "text", "text": mark}]
        changed[number] = {**messages[number], "content": parts}
        return mark in (self.try_to_write(changed) or "")


@dataclass(frozen=True)
class _Written:
    """A conversation as a template has written it."""

    template: _Template
    messages: Sequence[Mapping[str, Any]]
    text: str

    def find_answers(self, learnt: Collection[int], place: str) -> list[Span]:
        spans, behind = list[Span](), 0
        for number in learnt:
            start, end = self._start(number), self._end(number)
            if start is None or end is None or not behind <= start <= end:
                raise DataError(
                    f"{place}: the tokenizer's chat template writes message {number + 1} so that"
                    " it cannot be told which part of the text is the answer; put {% generation %}"
                    " and {% endgeneration %} around answers in the template, or leave the record"
                    " out"
                )
            spans.append((start, end))
            behind = end
        return spans

    def _start(self, number: int) -> int | None:
        """Behind what asks for the answer; where the template does not ask, where it begins."""
        before = self.messages[:number]
        asked = self.template.try_to_write(before, add_generation_prompt=True)
        if asked is not None and self.text.startswith(asked):
            unasked = self.template.try_to_write(before) or ""
            if not unasked.startswith(asked):
                return len(asked)
        return self._start_of_content(number)

    def _start_of_content(self, number: int) -> int | None:
        """Where the text differs from that with another content, if it does so in one place."""
        head, mark, tail = self._marked(number, self.messages).partition(_mark(self.text))
        found = mark and mark not in tail and len(head) + len(tail) <= len(self.text)
        fits = found and self.text.startswith(head) and self.text.endswith(tail)
        return len(head) if fits else None

    def _end(self, number: int) -> int | None:
        """Where the conversation would end if it ended with the answer."""
        until = self.messages[: number + 1]
        is_last = len(until) == len(self.messages)
        text = self.text if is_last else self.template.try_to_write(until)
        if text is not None and self.text.startswith(text):
            return _Written(self.template, until, text)._end_of_last()
        return self._end_by_tail(number)

    def _end_of_last(self) -> int | None:
        """The end of the text, without what asks for another answer; None if it has what others say
        behind the last message."""
        mark, other = _mark(self.text), _mark(self.text + _mark(self.text))
        others = [
            {**one, "content": other} if one.get("content") else one for one in self.messages[:-1]
        ]
        messages = [*others, {**self.messages[-1], "content": mark}]
        before, there, tail = (self.template.try_to_write(messages) or "").rpartition(mark)
        asks = before.rpartition(other)[2]
        if there and other in tail:
            return None
        if not (there and asks and tail.endswith(asks) and self.text.endswith(tail)):
            return len(self.text)
        more = [*messages, {"role": "user", "content": other}]
        rest = (self.template.try_to_write(more) or "").rpartition(mark)[2]
        shared = self._shared(tail, rest)
        return None if shared is None else len(self.text) - len(tail) + shared

    def _end_by_tail(self, number: int) -> int | None:
        """Behind what follows the content both at the end of a conversation and here."""
        mark = _mark(self.text)
        _, here, rest = self._marked(number, self.messages).rpartition(mark)
        _, last, tail = self._marked(number, self.messages[: number + 1]).rpartition(mark)
        if not (here and last and self.text.endswith(rest)):
            return None
        shared = self._shared(tail, rest)
        return None if shared is None else len(self.text) - len(rest) + shared

    def _shared(self, tail: str, rest: str) -> int | None:
        """Length of what two texts begin with: the first, or up to white space or the end of an
        added token."""
        if rest.startswith(tail):
            return len(tail)
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(tail, rest, strict=False))
        added = sorted(self.template.tokenizer.get_added_vocab(), key=len, reverse=True)
        whole = re.compile("|".join([*map(re.escape, added), r"\s"]))
        return max((found.end() for found in whole.finditer(tail[: len([*alike])])), default=None)

    def _marked(self, number: int, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text with a mark as the content of one message; empty if that is refused."""
        changed = list(messages)
        changed[number] = {**messages[number], "content": _mark(self.text)}
        return self.template.try_to_write(changed) or ""


def _mark(text: str) -> str:
    """A character that does not occur in a text."""
    return next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)
