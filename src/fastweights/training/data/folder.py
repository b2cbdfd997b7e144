"""The text of a run in a folder: read and tokenized once, piece by piece, whatever its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.errors import DataError, Stopped
from fastweights.training.data.blocks import BETWEEN_LOOKS, BlockedText, Journal, is_writing
from fastweights.training.data.corpus import Corpus, Source, mix, split_corpus
from fastweights.training.data.index import (
    INDEX,
    JOURNAL,
    TOKENIZER,
    StoredTexts,
    add_end,
    add_shard,
    begin_journal,
    open_shards,
    read_index,
    read_journal,
    write_index,
)
from fastweights.training.data.packing import EncodedPart, encode_documents
from fastweights.training.data.request import (
    VALIDATION,
    Sources,
    describe,
    naming,
    read_alike,
)
from fastweights.training.data.shards import ShardRecord, Shards, write_shards
from fastweights.training.data.sources import read_documents, size_of
from fastweights.training.data.tokenizers import token_type
from fastweights.training.data.writer import Writer, WritingJob
from fastweights.training.loop.files import (
    atomic_folder,
    find_damage,
    hash_files,
    remove_folder,
)
from fastweights.training.loop.report import Reading, Reporter

VISIBLE = 60.0
"""Seconds after which a file that another machine has written must be seen."""
FORMER = 30.0
"""Seconds after which a process that tokenized for a killed run must have ended."""
_OFTEN = 1 << 20  # bytes of text between two events of progress


class TextFolder:
    """A folder for the text of a run, which one process fills while others keep out of it.

    Args:
        run: The run's folder, in which it is ``data``; neither need exist.
        sources: What is read.
        length: Tokens per sequence.
        make_tokenizer: Makes the tokenizer, unless the folder has it.
    """

    def __init__(
        self,
        run: Path,
        sources: Sources,
        length: int,
        make_tokenizer: Callable[[], PreTrainedTokenizerFast],
    ) -> None:
        sources.require_blocks(length)
        self.run, self.path, self.sources, self.length = run, run / "data", sources, length
        self._make_tokenizer = make_tokenizer

    @cached_property
    def texts(self) -> Mapping[str, list[str]]:
        """The sources of each text that is stored, file by file.

        Raises:
            DataError: If a source has no files.
        """
        return self.sources.texts(self.run)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that the folder has, or will have.

        Raises:
            DataError: If there is none yet and it cannot be made, or a source is missing.
        """
        texts = self._read_texts()
        if texts is None:
            _ = self.texts
            return self._make_tokenizer()
        streams = self.sources.stream is not None
        lasting = streams or texts.was_whole or self._is_unchanged(texts)
        if lasting and not find_damage(texts.tokenizer_files(self.path)):
            return _load_tokenizer(self.path / TOKENIZER)
        return self._make_tokenizer()

    def open(
        self,
        is_first: bool = True,
        reporter: Reporter = Reporter(),
        stop: Callable[[], bool] = lambda: False,
    ) -> Corpus:
        """Return the text, which is read and tokenized before as far as it is not in the folder.

        Args:
            is_first: Whether this process may write; others find what the first one wrote.
            reporter: Receives progress events.
            stop: Called often; once it returns True, reading ends, to be resumed another time.

        Raises:
            DataError: If the text cannot be read, is too short, or is damaged and no more what it
                was.
            Stopped: If reading was stopped.
        """
        if not is_first:
            self._require_visible()
        if self.sources.stream is not None:
            return self._stream(is_first, reporter, stop)
        if is_first:
            self._complete(reporter, stop)
        elif not (self.path / INDEX).exists():
            raise Stopped
        texts = read_index(self.path)
        if texts is None:
            raise DataError(
                f"{self.path / INDEX} is missing or damaged; run the command that made {self.run}"
                " again"
            )
        return mix(self.sources, self._divide(texts))

    def _divide(self, texts: StoredTexts, journal: Journal | None = None) -> Mapping[str, Corpus]:
        """Divide each text into what is trained on and what is validated on, by its name.

        Args:
            texts: What is written.
            journal: Of texts that are still being written, of whose first blocks alone something
                is held out.
        """
        tokenizer = _load_tokenizer(self.path / TOKENIZER)
        apart = self._open_validation(texts)
        found = dict[str, Corpus]()
        for collection in self.sources.collections:
            text = collection.text
            whole = open_shards(self.path, texts, text, count=None if journal is None else 1)
            with naming(collection.name):
                corpus = split_corpus(
                    tokenizer, whole, whole.bytes, apart, collection.held_out, self.length
                )
            blocks = () if journal is None else (BlockedText(text, journal, corpus.train),)
            found[text] = replace(corpus, sources=tuple(Source("", 1, one) for one in blocks))
        return found

    def _open_validation(self, texts: StoredTexts) -> Shards | None:
        return open_shards(self.path, texts, VALIDATION) if self.sources.validation else None

    def _require_visible(self) -> None:
        """Raise DataError if what the first process has written is not seen from here."""
        end = time.monotonic() + VISIBLE
        while not any((self.path / name).exists() for name in (JOURNAL, INDEX)):
            if time.monotonic() > end:
                raise DataError(
                    f"{self.path} is not here, though the first process has written it; the"
                    " processes of a run need a folder that all of them see: on several machines,"
                    " one of a file system that they share"
                )
            time.sleep(BETWEEN_LOOKS)

    def _stream(self, writes: bool, reporter: Reporter, stop: Callable[[], bool]) -> Corpus:
        """Open the text at its first blocks, while the rest is written in the background."""
        with ExitStack() as undo:
            writer = self._start_writer(reporter, stop) if writes else None
            if writer is not None:
                undo.callback(writer.end)
            journal = Journal(self.path, reporter.note, writer)
            journal.wait_until(self._has_begun, f"the beginning of {self.path}", stop)
            corpus = mix(self.sources, self._divide(journal.texts, journal))
            undo.pop_all()
        return corpus

    def _has_begun(self, texts: StoredTexts) -> bool:
        """Whether the first block of each text is there, and all that is validated on."""
        begun = all(texts.shards.get(name) for name in self.sources.names)
        return begun and (not self.sources.validation or VALIDATION in texts.ended)

    def _start_writer(self, reporter: Reporter, stop: Callable[[], bool]) -> Writer | None:
        """Have what is not there written in the background, behind what a former process left."""
        self._wait_for_former(stop)
        texts = self._read_texts()
        begun = (None if texts is None else self._sound(texts, reporter)) or self._begin(reporter)
        if begun == texts and set(begun.ended) == self.sources.names:
            self._tell_of_changes(begun, reporter)
            return None
        begin_journal(self.path, begun)
        assert self.sources.stream is not None
        return Writer(
            WritingJob(str(self.path), self.texts, self.sources.field, self.sources.stream)
        )

    def _wait_for_former(self, stop: Callable[[], bool]) -> None:
        """Wait until the process of a run that has just been killed has ended, too."""
        end = time.monotonic() + FORMER
        while is_writing(self.path):
            if stop():
                raise Stopped
            if time.monotonic() > end:
                raise DataError(
                    f"another process still tokenizes text in {self.path}; end the run, or the"
                    " Python session, that it belongs to"
                )
            time.sleep(BETWEEN_LOOKS)

    def _complete(self, reporter: Reporter, stop: Callable[[], bool]) -> None:
        """Write what is not there, or damaged."""
        index, texts = read_index(self.path), self._read_texts()
        sound = None if texts is None else self._sound(texts, reporter)
        if index is not None and sound == texts:
            self._tell_of_changes(index, reporter)
            return
        begun = sound or self._begin(reporter)
        begin_journal(self.path, begun)
        written = self._write_texts(begun, reporter, stop)
        if texts is not None and texts.was_whole and written.shards != texts.shards:
            begin_journal(self.path, begun)
            raise DataError(
                f"{self.path} was damaged, and its text reads otherwise now; put the text back as"
                f" it was, or remove {self.path} to go on with what it is now"
            )
        self._tell_if_little(written, reporter)
        write_index(self.path, replace(written, was_whole=False))

    def _read_texts(self) -> StoredTexts | None:
        """What is in the folder, by its index or else by its journal."""
        index = read_index(self.path)
        found = read_journal(self.path) if index is None else index
        if found is None and (self.path / INDEX).exists():
            raise DataError(
                f"{self.path / INDEX} is damaged; remove {self.path}, and the next run reads the"
                " text again"
            )
        if found is not None and set(found.ended) == self.sources.names:
            return replace(found, was_whole=True)
        return found

    def _sound(self, texts: StoredTexts, reporter: Reporter) -> StoredTexts | None:
        """What of these texts can stay; None to begin again."""
        damaged, unchanged = find_damage(texts.files(self.path)), self._is_unchanged(texts)
        checked = self.sources.stream is not None  # what is there, by the process that goes on
        if not damaged and (unchanged or texts.was_whole or checked):
            return texts
        if not unchanged and texts.was_whole:
            raise DataError(
                f"{min(damaged)} is missing or damaged, and the text that it was read from has"
                f" changed; put the text back as it was, or remove {self.path} to go on with what"
                " it is now"
            )
        if not unchanged and not checked:
            reporter.note("The text has changed since it was begun to be read; beginning again.")
            return None
        reporter.note(f"{min(damaged)} is missing or damaged; reading the text again from there.")
        lacks_tokenizer = damaged & texts.tokenizer_files(self.path).keys()
        if lacks_tokenizer and self._save_tokenizer() != texts.tokenizer:
            raise DataError(
                f"the tokenizer in {self.path} was damaged and cannot be made again as it was;"
                f" remove {self.path.parent} to begin again"
            )
        return texts.before(damaged)

    def _is_unchanged(self, texts: StoredTexts) -> bool:
        try:
            return read_alike(texts.sources, describe(self.texts))
        except DataError:
            return False

    def _tell_of_changes(self, texts: StoredTexts, reporter: Reporter) -> None:
        """Sources that are gone have not changed."""
        try:
            now = describe(self.texts)
        except DataError:
            return
        if not read_alike(texts.sources, now):
            reporter.note(
                "The text has changed since this run read it. The run goes on with what it read;"
                " to train on the text as it is now, choose another folder."
            )

    def _begin(self, reporter: Reporter) -> StoredTexts:
        """An empty folder, but for the tokenizer."""
        self._tell_of_template(reporter)
        remove_folder(self.path)
        self.path.mkdir(parents=True)
        return StoredTexts(
            dtype=np.dtype(token_type(self.tokenizer)).name,
            framing=self.sources.framing(self.tokenizer),
            sources=describe(self.texts),
            tokenizer=self._save_tokenizer(),
        )

    def _tell_of_template(self, reporter: Reporter) -> None:
        """Say what writes records that have prompts, by the first document of each text."""
        documents = (
            next(read_documents(files, self.tokenizer, self.sources.field))
            for files in self.texts.values()
        )
        first = [next(document) for document in documents]
        if any(piece.templated for piece in first):
            reporter.note(
                "template    chats and instructions are written by the tokenizer's chat template"
                " (--template none: as plain text)"
            )
        elif not all(piece.response for piece in first):
            reporter.note(
                "template    none: chats are written as lines, role: content, and instructions with"
                " Alpaca's prompt (--template FILE: by a chat template)"
            )

    def _save_tokenizer(self) -> Mapping[str, str]:
        with atomic_folder(self.path / TOKENIZER) as new:
            self.tokenizer.save_pretrained(new)
        return hash_files(self.path, [self.path / TOKENIZER])

    def _write_texts(
        self, begun: StoredTexts, reporter: Reporter, stop: Callable[[], bool]
    ) -> StoredTexts:
        watch = _Watch(begun, self.texts, reporter, stop)
        for name in [name for name in self.texts if name not in begun.ended]:
            done = begun.shards.get(name, ())
            for shard in self._write_text(name, done, begun, watch):
                add_shard(self.path, name, shard)
            add_end(self.path, name)
        written = read_journal(self.path)
        assert written is not None
        return written

    def _write_text(
        self, name: str, done: tuple[ShardRecord, ...], texts: StoredTexts, watch: _Watch
    ) -> Iterator[ShardRecord]:
        """The shards of a text behind those that are done."""
        (self.path / name).mkdir(exist_ok=True)
        documents = read_documents(
            self.texts[name], self.tokenizer, self.sources.field, watch.advance
        )
        skip = sum(shard.pieces for shard in done)
        parts = encode_documents(self.tokenizer, documents, texts.framing, skip)
        return write_shards(self.path / name, watch.follow(parts), np.dtype(texts.dtype), len(done))

    def _tell_if_little(self, texts: StoredTexts, reporter: Reporter) -> None:
        """Say how much is held out where that is far less than the usual tenth."""
        apart, found = self._open_validation(texts), self._divide(texts)
        for collection in self.sources.collections[: None if apart is None else 1]:
            corpus = found[collection.text]
            held = len(corpus.validation)
            whole = held + len(corpus.train) if apart is None else len(apart)
            if held < whole // 10 and held <= collection.held_out:
                of = f" of {collection.name}" if apart is None and collection.name else ""
                reporter.note(
                    f"validation  {held:,} of {whole:,} tokens{of} are held out to validate"
                )


class _Watch:
    """Tells how far reading has come, and ends it when that is asked for."""

    def __init__(
        self,
        begun: StoredTexts,
        texts: Mapping[str, list[str]],
        reporter: Reporter,
        stop: Callable[[], bool],
    ) -> None:
        self._reporter, self._stop = reporter, stop
        left = (names for text, names in texts.items() if text not in begun.ended)
        self._total = size_of([name for names in left for name in names])
        self._read = self._text = self._told = 0
        self._began = time.perf_counter()
        self._tokens = sum(shard.tokens for shards in begun.shards.values() for shard in shards)

    def advance(self, count: int) -> None:
        """Hear how many bytes of files have just been read."""
        self._read += count

    def follow(self, parts: Iterable[EncodedPart]) -> Iterator[EncodedPart]:
        """Yield parts, and tell of them now and then."""
        for part in parts:
            yield part
            self._tokens += sum(len(run.tokens) for run in part.runs)
            self._text += part.bytes
            if self._text - self._told >= _OFTEN:
                self._tell()

    def _tell(self) -> None:
        self._told = self._text
        read = self._text if self._total is None else self._read
        seconds = time.perf_counter() - self._began
        self._reporter.reading(Reading(read, self._total, self._tokens, seconds))
        if self._stop():
            raise Stopped


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        return AutoTokenizer.from_pretrained(folder)  # type: ignore[return-value]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{folder} is damaged ({reason}); remove it, and the next run will make it again"
        ) from error
