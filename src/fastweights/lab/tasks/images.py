"""Images: arrays in memory, and folders of files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import groupby, tee
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, Dataset

from fastweights.environment import require_package
from fastweights.lab.tasks.augmentation import Crop, Mixing, View
from fastweights.lab.tasks.base import Batch, BatchShare, Examples, ImageTask
from fastweights.layers import upcast
from fastweights.training.data.left_out import LeftOut, is_hidden
from fastweights.training.loop.seeds import random_seed_from

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
PART = 16
"""Images that a process reads at once; two such parts of each are ahead of what is asked for."""


@dataclass(frozen=True, eq=False)
class Images(ImageTask):
    """A classification task of square images in memory, normalised to (x / 255 - mean) / deviation.

    Attributes:
        pixels: ``[n c s s]`` uint8.
        labels: ``[n]`` classes.
        mean: Mean of the pixels, between 0 and 1.
        deviation: Standard deviation of the pixels.
    """

    pixels: np.ndarray
    labels: np.ndarray
    mean: float = 0.5
    deviation: float = 0.5

    @property
    def side(self) -> int:
        return self.pixels.shape[-1]

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        if count > len(self.pixels):
            raise ValueError(
                f"{count} different images are asked for; there are only {len(self.pixels)}"
            )
        rows = generator.permutation(len(self.pixels))[:count]
        pixels = torch.from_numpy(self.pixels[rows]).float().div(255)
        return Batch(
            (pixels - self.mean) / self.deviation,
            torch.from_numpy(self.labels[rows].astype(np.int64)),
        )


@dataclass(frozen=True)
class AllImages:
    """All images of a class."""

    def __call__(self, count: int) -> slice:
        """Return which of `count` images these are."""
        return slice(count)


@dataclass(frozen=True)
class ValidationImages(AllImages):
    """The last of a class's images, one in `every`, and at least one of two.

    Of ImageNet's 1.28 million, one in 25 are as many as it has for tests.
    """

    every: int = 25

    def __call__(self, count: int) -> slice:
        return slice(count - (max(count // self.every, 1) if count > 1 else 0), count)


@dataclass(frozen=True)
class TrainingImages(ValidationImages):
    """Those that are left for training."""

    def __call__(self, count: int) -> slice:
        return slice(super().__call__(count).start)


@dataclass(frozen=True)
class ImageFolder(ImageTask):
    """A classification task of images in ``folder/<class>/…``, read when they are drawn.

    Classes are in alphabetical order; pixels are normalised with ImageNet's statistics.

    Attributes:
        folder: The folder of the classes' folders.
        view: What is shown of each image.
        chosen: Which of the images of each class, in alphabetical order.
        mixing: How the images of a batch are mixed; None for not at all.
        smoothing: The part of every label that is spread over all classes (Szegedy et al., 2016).

    Raises:
        FileNotFoundError: If the folder has no images.
        ValueError: If the view needs a package that is not installed.
    """

    folder: Path
    view: View = Crop()
    chosen: AllImages = AllImages()
    mixing: Mixing | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for package in self.view.packages:
            require_package(package, type(self.view).__name__, "or show images by Crop")
        if not self.files:
            kinds = ", ".join(sorted(SUFFIXES))
            raise FileNotFoundError(
                f"{self.folder} has no images in folders of their classes ({kinds})"
            )

    @cached_property
    def names(self) -> list[str]:
        """The names of the classes."""
        return (
            sorted(p.name for p in self.folder.iterdir() if p.is_dir() and not is_hidden(p.name))
            if self.folder.is_dir()
            else []
        )

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """The path and class of every image."""
        return [file for own in self._by_class for file in own[self.chosen(len(own))]]

    @cached_property
    def _by_class(self) -> list[list[tuple[Path, int]]]:
        """The images that there are, of each class by itself."""
        labels = {name: label for label, name in enumerate(self.names)}
        found, left_out = list[tuple[Path, int]](), LeftOut()
        for path in sorted(path for path in self.folder.rglob("*") if not path.is_dir()):
            place = path.relative_to(self.folder)
            if reason := _why_unread(place):
                left_out.add(reason, place)
            else:
                found.append((path, labels[place.parts[0]]))
        left_out.warn(str(self.folder))
        return [list(own) for _, own in groupby(found, key=itemgetter(1))]

    def others(self, chosen: AllImages, view: View) -> ImageFolder:
        """Return the task of other images of the folder, which is not walked again."""
        other = copy(self)
        vars(other).update(chosen=chosen, view=view, mixing=None, smoothing=0.0)
        del vars(other)["files"]
        other.__post_init__()
        return other

    @property
    def side(self) -> int:
        return self.view.size

    @property
    def channels(self) -> int:
        return 3

    @property
    def classes(self) -> int:
        return len(self.names)

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        chosen = self.examples(generator, count)
        seed = generator.integers(1 << 32, size=2).tolist()
        return next(chosen.batches([torch.arange(count)], seed))

    def examples(self, generator: np.random.Generator, count: int) -> ImageFiles:
        if count > len(self.files):
            raise ValueError(
                f"{count} different images are asked for; {self.folder} has only {len(self.files)}"
            )
        chosen = generator.permutation(len(self.files))[:count]
        return ImageFiles([self.files[row] for row in chosen], self.view, self.classes, self.mixing)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        targets = batch.labels if batch.mixed is None else batch.mixed
        logits = upcast(self.logits(model, batch))
        return cross_entropy(logits, targets, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class ImageFiles(Examples):
    """Images that processes read from their files for every batch, each time with another view.

    Attributes:
        files: The path and class of every image.
        view: What is shown of each image.
        classes: Number of classes.
        mixing: How the images of a batch are mixed; None for not at all.
    """

    files: Sequence[tuple[Path, int]]
    view: View
    classes: int
    mixing: Mixing | None = None

    def __len__(self) -> int:
        return len(self.files)

    def batches(
        self, rows: Iterable[Tensor], seed: Sequence[int], share: BatchShare = BatchShare()
    ) -> Iterator[Batch]:
        """Yield the batches, of whose images processes read `PART` each at a time, ahead."""
        for package in self.view.packages:
            import_module(package)  # here, or every process that reads imports it again
        asked, due = tee((chosen, share(chosen)) for chosen in rows)
        parts = (self._part(part, seed) for _, own in asked for part in own.split(PART))
        reader = DataLoader(
            cast(Dataset[Tensor], ImageReader(self.view)),
            sampler=parts,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=_readers(),
            generator=torch.Generator(),  # the one of the models' draws stays where it is
        )
        images = iter(reader)
        for chosen, own in due:
            found = [next(images) for _ in own.split(PART)]
            yield self._together(own, found, [*seed, *chosen[:1].tolist()])

    def _part(self, rows: Tensor, seed: Sequence[int]) -> list[tuple[str, list[int]]]:
        return [(str(self._file(row)[0]), [*seed, row]) for row in rows.tolist()]

    def _file(self, row: int) -> tuple[Path, int]:
        return self.files[row % len(self.files)]

    def _together(self, rows: Tensor, found: Sequence[Tensor], seed: Sequence[int]) -> Batch:
        labels = torch.tensor([self._file(row)[1] for row in rows.tolist()], dtype=torch.long)
        images = torch.cat([*found, torch.empty(0, 3, self.view.size, self.view.size)])
        if self.mixing is None:
            return Batch(images, labels)
        classes = one_hot(labels, self.classes).float()
        images, mixed = self.mixing(images, classes, np.random.default_rng([*seed, 1]))
        return Batch(images, labels, mixed=mixed)


@dataclass(frozen=True)
class ImageReader:
    """Reads images from their files: what a process that reads them holds.

    Attributes:
        view: What is shown of each image.
    """

    view: View

    def __getitem__(self, part: Sequence[tuple[str, Sequence[int]]]) -> Tensor:
        """Return the views ``[n 3 s s]`` of images by their paths and the seeds of their draws."""
        return torch.stack([self._read(path, seed) for path, seed in part])

    def _read(self, path: str, seed: Sequence[int]) -> Tensor:
        number = random_seed_from(*seed)
        random.seed(number)
        np.random.seed(number % (1 << 32))
        torch.manual_seed(number)
        with Image.open(path) as image:
            return self.view(image.convert("RGB"))


def _as_it_is(images: Any) -> Tensor:
    return images


def _readers() -> int:
    """Processes that read, of each of those that train on this computer."""
    own = getattr(os, "sched_getaffinity", None)  # not everywhere
    cores = len(own(0)) if own else os.cpu_count() or 1
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _why_unread(place: Path) -> str:
    """The reason for which a file at this place in a folder of classes is left out; "" of an
    image."""
    if any(map(is_hidden, place.parts)):
        return "hidden files"
    if place.suffix.lower() not in SUFFIXES:
        return "files of other kinds"
    return "" if len(place.parts) > 1 else "images outside of the classes' folders"
