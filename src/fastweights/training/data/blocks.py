"""A text that is trained on while it is still being written, block by block in a stated order.

A block is a shard of the text; `data.writer` writes them in the background. What is read of a block
depends on the block alone, and who needs one that is not there yet waits for it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

from filelock import FileLock, Timeout

from fastweights.errors import CheckpointError, DataError, Stopped
from fastweights.training.data.documents import Batches, Span
from fastweights.training.data.holdout import all_of
from fastweights.training.data.index import JOURNAL, StoredTexts, open_shards, read_journal
from fastweights.training.data.shards import MAPPED
from fastweights.training.data.tokens import TokenText
from fastweights.training.data.windows import Windows
from fastweights.training.loop.files import read_json
from fastweights.training.loop.seeds import random_seed_from

AHEAD = 2
"""Blocks of a text that are written before they are needed, at most."""
FAILURE, LOCK, WANTED = "failure.json", "writer.lock", "wanted"
BETWEEN_LOOKS = 0.05
"""Seconds between two looks at how far another process has written."""


class Journal:
    """What of the texts in a folder is written, as another process goes on to write them.

    Args:
        folder: The folder.
        note: Hears what is waited for.
        writer: What has the texts written for as long as it lives, if this process has it.
    """

    def __init__(
        self, folder: Path, note: Callable[[str], None], writer: object | None = None
    ) -> None:
        self.folder, self.writer, self._note = folder, writer, note
        self._seen: tuple[int, int] | None = None

    @property
    def texts(self) -> StoredTexts:
        """What is written now."""
        there = (self.folder / JOURNAL).stat()
        if (seen := (there.st_ino, there.st_size)) != self._seen:
            found = read_journal(self.folder)
            assert found is not None
            self._texts, self._seen = found, seen
        return self._texts

    def wait_until(
        self,
        is_there: Callable[[StoredTexts], bool],
        what: str,
        stop: Callable[[], bool] = lambda: False,
    ) -> StoredTexts:
        """Return what is written, once that is enough.

        Args:
            is_there: Whether it is enough.
            what: What is waited for, for messages.
            stop: Called often; once it returns True, waiting ends.

        Raises:
            DataError: If the process that writes has failed, or is gone.
            Stopped: If waiting was stopped.
        """
        said = False
        while True:
            writing = is_writing(self.folder)
            if is_there(found := self.texts):
                return found
            self._require_writer(writing, what)
            if not said:
                self._note(f"waiting for {what} to be tokenized")
            if stop():
                raise Stopped
            said = True
            time.sleep(BETWEEN_LOOKS)

    def _require_writer(self, writing: bool, what: str) -> None:
        if (failure := read_failure(self.folder)) is not None:
            raise DataError(f"the text could not be read on: {failure}")
        if not writing:
            raise DataError(
                f"the process that tokenizes the text ended before {what}; look whether the machine"
                " ran out of memory, and start the run again to go on"
            )


def is_writing(folder: Path) -> bool:
    """Whether a process is there that writes the texts in `folder`."""
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except Timeout:
        return True


def read_failure(folder: Path) -> str | None:
    """Read why the texts in `folder` could not be written; None if they could."""
    try:
        return str(read_json(folder / FAILURE)["reason"])
    except (FileNotFoundError, CheckpointError):
        return None


def want(folder: Path, text: str, block: int) -> None:
    """Say that a block is needed: as many as `AHEAD` behind it may be written."""
    (folder / WANTED / f"{text}.{block}").touch()


def last_wanted(folder: Path) -> dict[str, int]:
    """The last block of each text that was said to be needed."""
    found = dict[str, int]()
    for path in (folder / WANTED).iterdir():
        found[path.stem] = max(int(path.suffix[1:]), found.get(path.stem, 0))
    return found


class BlockedText:
    """A text that is written while it is read, by blocks.

    Args:
        name: Its name in the folder.
        journal: What is written.
        first: What of its first block is trained on.

    Attributes:
        block: Returns a block by its number, once it is written; None if the text has ended before.
    """

    def __init__(self, name: str, journal: Journal, first: TokenText) -> None:
        self.name, self.journal, self._first = name, journal, first
        self.block = lru_cache(MAPPED)(partial(_wait_for_block, name, journal, first))

    @property
    def tokens(self) -> int | None:
        """Number of tokens; None as long as it is being written."""
        texts = self.journal.texts
        if self.name not in texts.ended:
            return None
        return len(self._first) + sum(record.tokens for record in texts.shards[self.name][1:])


def _wait_for_block(text: str, journal: Journal, first: TokenText, number: int) -> TokenText | None:
    want(journal.folder, text, number)
    if number == 0:
        return first
    texts = journal.wait_until(
        lambda texts: number < len(texts.shards[text]) or text in texts.ended,
        f"block {number} of {journal.folder / text}",
    )
    if number >= len(texts.shards[text]):
        return None
    return all_of(open_shards(journal.folder, journal.texts, text, number, 1))


@dataclass(frozen=True, eq=False)
class Blockwise(Batches):
    """The blocks of a text one after the other, over and over again; the sequences of each in an
    order of its own, as `Windows` has it.

    No sequence has tokens of two blocks. A last block that is shorter than a sequence is left out.

    Attributes:
        text: The text.
        seed: Seed of the order.
    """

    text: BlockedText
    length: int
    seed: int
    responses: bool = False
    boundaries: bool = True

    @property
    def tokens(self) -> int | None:
        return self.text.tokens

    def span(self, number: int) -> Span:
        epoch, block, place = self._locate(number)
        text, windows = self._open(block)
        [start] = windows.starts(epoch * windows.epoch + place, 1)
        return Span(text, start, start + self.length)

    def _locate(self, number: int) -> tuple[int, int, int]:
        """Epoch, block, and place among the sequences of the block in this epoch."""
        ends, epoch = self._ends, 0
        while number >= ends[-1]:
            if not self._add_end():
                epoch, number = divmod(number, ends[-1])
        block = bisect_right(ends, number) - 1
        return epoch, block, number - ends[block]

    def _add_end(self) -> bool:
        """Count the sequences of the next block; False if there is none."""
        block = len(self._ends) - 1
        text = self.text.block(block)
        if text is None or (block > 0 and len(text) < self.length):
            return False
        self._ends.append(self._ends[-1] + Windows(text, self.length, self.seed).epoch)
        return True

    @cached_property
    def _ends(self) -> list[int]:
        """Sequences of an epoch up to the end of each block that was looked at, from 0 on."""
        return [0]

    @cached_property
    def _open(self) -> Callable[[int], tuple[TokenText, Windows]]:
        return lru_cache(MAPPED)(partial(_order_block, self.text, self.length, self.seed))


def _order_block(
    text: BlockedText, length: int, seed: int, number: int
) -> tuple[TokenText, Windows]:
    block = text.block(number)
    assert block is not None
    return block, Windows(block, length, random_seed_from(seed, number))
