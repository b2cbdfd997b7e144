"""Sources of text as documents: files of every common format, folders, globs, data sets.

`read_records` is the one place that knows where records come from, `document_of` the one that knows
what they look like; both go record by record, whatever follows.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError

BUNDLED = {"shakespeare": "tinyshakespeare.txt.gz"}
SUFFIXES = tuple(kind + packed for kind in (".txt", ".jsonl", ".json") for packed in ("", ".gz"))
HUB = "hub:"
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


Document = Sequence[TextPiece]


def read_documents(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerFast | None = None
) -> Iterator[Document]:
    """Yield the documents of `sources`, one after the other.

    Args:
        sources: Files of text (.txt) or of records (.jsonl, .json; any of them .gz), folders,
            globs, the bundled "shakespeare", or "hub:NAME" and "hub:NAME:SPLIT" for a data set of
            the Hugging Face hub or a folder that `datasets` saved. A record has "text", or
            "instruction" and "output" (Alpaca), or "prompt" and "response", or "messages" of "role"
            and "content" (chat).
        tokenizer: Its chat template writes the turns of a chat; without one, they are ``role:
            content`` lines.

    Raises:
        DataError: If a source cannot be read (the message names file and line), or there is no text
            at all.
    """
    empty = True
    for source in sources:
        for place, record in read_records(source):
            document = document_of(record, place, tokenizer)
            empty = empty and not any(piece.text for piece in document)
            yield document
    if empty:
        raise DataError(f"there is no text in {', '.join(sources)}")


def read_records(source: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record of a source; a text file is one record with "text"."""
    if source.startswith(HUB):
        for number, record in enumerate(_data_set(source.removeprefix(HUB)), 1):
            yield f"{source}, record {number}", record
        return
    for path in paths(source):
        text = contents(path)
        if path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
            yield from _json_records(path, text)
        else:
            yield str(path), {"text": text}


def paths(source: str) -> list[Path]:
    """List the files that a source names, in alphabetical order.

    Raises:
        DataError: If there are none.
    """
    if source in BUNDLED:
        with as_file(files("fastweights") / "data" / BUNDLED[source]) as path:
            return [path]
    if not source.strip():
        raise DataError("a source of text is empty; name a file, or . for the working folder")
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    texts = sorted(p for p in found if p.is_file() and p.name.endswith(SUFFIXES))
    if not texts:
        raise DataError(
            f"no text found at {source!r}; give files, folders or globs of {', '.join(SUFFIXES)},"
            f" a data set as {HUB}NAME, or a name: {', '.join(BUNDLED)}"
        )
    return texts


def contents(path: Path) -> str:
    """Read the text of a file, which may be gzipped.

    Raises:
        DataError: If the file has no readable text; the message names it.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise DataError(f"{path} is empty; leave it out")
    return text


def document_of(record: Any, place: str, tokenizer: PreTrainedTokenizerFast | None) -> Document:
    """Split a record, in any of the formats of `read_documents`, into the pieces of a document.

    Raises:
        DataError: If the record has another format; the message names its place.
    """
    match record:
        case {"messages": [*messages]} if messages:
            return _chat(messages, place, tokenizer)
        case {"instruction": str(instruction), "output": str(output)}:
            prompt = _alpaca(instruction, str(record.get("input") or ""))
            return [TextPiece(prompt, False), TextPiece(output, True)]
        case {"prompt": str(prompt), "response": str(response)}:
            return [TextPiece(prompt, False), TextPiece(response, True)]
        case {"text": str(text)}:
            return [TextPiece(text, True)]
    raise DataError(
        f'{place} has {_describe(record)}; a record has "text", "instruction" and "output",'
        ' "prompt" and "response" (all of them strings), or "messages"'
    )


def _describe(record: Any) -> str:
    """The fields of a record and their types, or its type."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    return "{" + ", ".join(f'"{k}": {type(record[k]).__name__}' for k in sorted(record)) + "}"


def _json_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Of a JSON array, or of one JSON value per line; each with its place."""
    if text.lstrip().startswith("["):
        for number, record in enumerate(_parse(text, str(path)), 1):
            yield f"{path}, record {number}", record
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse(line, place)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{place}, is neither a JSON array nor one JSON object per line: {error}"
        ) from error


def _data_set(name: str) -> Iterable[Any]:
    """The records of a data set; ``NAME:SPLIT`` of another split than "train"."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{HUB}{name} needs the datasets library: pip install datasets") from error
    place, _, split = name.partition(":")
    if Path(place).is_dir():
        found = datasets.load_from_disk(place)
        return found[split or "train"] if isinstance(found, datasets.DatasetDict) else found
    return datasets.load_dataset(place, split=split or "train")


def _alpaca(instruction: str, given: str) -> str:
    more = ", paired with an input that provides further context" if given else ""
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(more=more, instruction=instruction, input=section)


def _chat(
    messages: Sequence[Mapping[str, str]], place: str, tokenizer: PreTrainedTokenizerFast | None
) -> Document:
    """Turns as the tokenizer's chat template has them, or else ``role: content`` lines; the
    assistant's are learnt.
    """
    try:
        ends = [_render_chat(messages[:count], tokenizer) for count in range(len(messages) + 1)]
    except (KeyError, TypeError) as error:
        raise DataError(f'{place}: every message is an object with "role" and "content"') from error
    pieces = list[TextPiece]()
    for message, before, after in zip(messages, ends, ends[1:], strict=False):
        if message["role"] != "assistant":
            pieces.append(TextPiece(after[len(before) :], False))
            continue
        start = _opening(before, message, after)
        pieces += [TextPiece(after[len(before) : start], False), TextPiece(after[start:], True)]
    return pieces


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
