"""Readers of data sets in their authors' archives: IMDB, the ACL Anthology Network, CIFAR-10,
MNIST."""

from __future__ import annotations

import csv
import gzip
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastweights.lab.tasks.stored import Rows, pad_rows
from fastweights.training.data.left_out import is_hidden

PAD, UNKNOWN, END = 0, 1, 2


@dataclass(frozen=True)
class Characters:
    """A vocabulary of characters; the first ids are padding, unknown and end.

    Attributes:
        ids: The id of each character.
    """

    ids: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[str], least: int = 15) -> Characters:
        """Build the vocabulary of the characters that occur at least `least` times in `texts`."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        return cls(
            {
                char: 3 + i
                for i, char in enumerate(sorted(c for c, n in counts.items() if n >= least))
            }
        )

    def __len__(self) -> int:
        return 3 + len(self.ids)

    def encode(self, texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens ``[n t]``, lengths ``[n]``): the first length - 1 characters and an end
        token."""
        return pad_rows(
            [[*(self.ids.get(c, UNKNOWN) for c in text[: length - 1]), END] for text in texts],
            length,
        )


def imdb(archive: Path, length: int = 4096) -> tuple[Rows, Rows, int]:
    """Read aclImdb_v1.tar.gz character by character: (training, tests, vocabulary size).

    Raises:
        ValueError: If the archive is another one.
    """
    texts: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = member.name.split("/")
            if (
                len(parts) == 4
                and parts[1] in texts
                and parts[2] in ("neg", "pos")
                and member.isfile()
                and not is_hidden(parts[3])
            ):
                file = tar.extractfile(member)
                assert file is not None
                texts[parts[1]].append((file.read().decode(), int(parts[2] == "pos")))
    if not all(texts.values()):
        raise ValueError(
            f"{archive} has no aclImdb/train/pos/*.txt and the like; give the original"
            " aclImdb_v1.tar.gz"
        )
    characters = Characters.of(text for text, _ in texts["train"])
    train, test = (_characters(rows, characters, length) for rows in texts.values())
    return train, test, len(characters)


def _characters(rows: list[tuple[str, int]], characters: Characters, length: int) -> Rows:
    tokens, lengths = characters.encode([text for text, _ in rows], length)
    return Rows(tokens, np.array([label for _, label in rows]), lengths)


def aan(folder: Path, length: int = 4000) -> tuple[Rows, Rows, Rows, int]:
    """Read the pairs of papers in new_aan_pairs.{train,eval,test}.tsv of lra_release.

    Returns:
        Training rows, validation rows, test rows and the vocabulary size.
    """
    parts = [
        list(_pairs(folder / f"new_aan_pairs.{part}.tsv")) for part in ("train", "eval", "test")
    ]
    characters = Characters.of(text for _, first, second in parts[0] for text in (first, second))
    train, validation, test = (_encode_pairs(part, characters, length) for part in parts)
    return train, validation, test, len(characters)


def _pairs(path: Path) -> Iterator[tuple[int, str, str]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file, delimiter="\t"):
            if len(row) != 5:
                raise ValueError(
                    f"{path} has a line of {len(row)} columns; there are label, two ids and two"
                    " texts"
                )
            yield int(float(row[0])), row[3], row[4]


def _encode_pairs(pairs: list[tuple[int, str, str]], characters: Characters, length: int) -> Rows:
    first, second = (
        characters.encode(texts, length) for texts in ([p[1] for p in pairs], [p[2] for p in pairs])
    )
    width = max(first[0].shape[1], second[0].shape[1])
    tokens = np.stack(
        [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t, _ in (first, second)], axis=1
    )
    return Rows(
        tokens, np.array([label for label, *_ in pairs]), np.stack([first[1], second[1]], axis=1)
    )


def cifar10(archive: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read cifar-10-binary.tar.gz: (training images ``[n 3 32 32]`` uint8, labels, test images,
    labels).

    The archive's Python version holds pickles, which may run code, and is refused.

    Raises:
        ValueError: If the archive is another one.
    """
    parts: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.split("/")[-1]
            if name.endswith(".bin") and (file := tar.extractfile(member)):
                parts[name] = file.read()
    train = b"".join(parts[name] for name in sorted(parts) if name.startswith("data_batch"))
    if not train or "test_batch.bin" not in parts:
        raise ValueError(
            f"{archive} has no data_batch_1.bin and the like; give the original"
            " cifar-10-binary.tar.gz"
        )
    return (*_cifar(train), *_cifar(parts["test_batch.bin"]))


def _cifar(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def grey(images: np.ndarray) -> np.ndarray:
    """Convert ``images [n 3 s s]`` uint8 to grey ``[n s s]``: ITU-R 601 luma, rounded as Pillow's
    mode L."""
    red, green, blue = (images[:, channel].astype(np.uint32) for channel in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read MNIST's four IDX files: (training images ``[n 28 28]`` uint8, labels, test images,
    labels).

    The files may be gzipped.

    Raises:
        FileNotFoundError: If one of the files is missing.
        ValueError: If a file is not in the IDX format.
    """
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    train, train_labels, test, test_labels = (_idx(folder, f"{name}-ubyte") for name in names)
    return train, train_labels, test, test_labels


def _idx(folder: Path, name: str) -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, the type 8, the number of axes, their
    big-endian sizes.
    """
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.exists()]
    if not found:
        raise FileNotFoundError(f"{folder} has no {name} or {name}.gz; MNIST is four such files")
    raw = (
        gzip.decompress(found[0].read_bytes())
        if found[0].suffix == ".gz"
        else found[0].read_bytes()
    )
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{found[0]} is not an IDX file of bytes: it begins with {raw[:4]!r}")
    sizes = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(*map(int, sizes))
