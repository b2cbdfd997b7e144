"""Images: arrays in memory, and folders of files with DeiT's crops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastweights.lab.tasks.base import Batch, Examples, ImageTask
from fastweights.training.data.left_out import LeftOut, is_hidden

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
AHEAD = 2
"""Batches of files that are read before they are asked for."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


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
class Crop:
    """The part of an image that a model sees, resized to `size` pixels square.

    Attributes:
        size: Side of the result in pixels.
        random: True for a random part (8 % to 100 % of the area, sides 3:4 to 4:3), mirrored half
            of the time (DeiT, training); False for the middle of the image at 8/7 of the size
            (DeiT, tests).
    """

    size: int = 224
    random: bool = False

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> np.ndarray:
        """Return the part as ``[3 size size]`` uint8."""
        box = self._part(image.size, generator) if self.random else self._middle(image.size)
        shown = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = np.asarray(shown).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if self.random and generator.random() < 0.5 else pixels

    def _middle(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        side = min(size) * 7 / 8
        left, top = ((s - side) / 2 for s in size)
        return left, top, left + side, top + side

    def _part(
        self, size: tuple[int, int], generator: np.random.Generator
    ) -> tuple[float, float, float, float]:
        """The first of ten random boxes that lies inside, or the middle (as torchvision)."""
        for _ in range(10):
            area = generator.uniform(0.08, 1.0) * size[0] * size[1]
            ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
            width, height = float(np.sqrt(area * ratio)), float(np.sqrt(area / ratio))
            if width <= size[0] and height <= size[1]:
                left, top = (
                    generator.uniform(0, free) for free in (size[0] - width, size[1] - height)
                )
                return left, top, left + width, top + height
        return self._middle(size)


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
        crop: The part of each image that is shown.
        chosen: Which of the images of each class, in alphabetical order.

    Raises:
        FileNotFoundError: If the folder has no images.
    """

    folder: Path
    crop: Crop = Crop()
    chosen: AllImages = AllImages()

    def __post_init__(self) -> None:
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

    def others(self, chosen: AllImages, crop: Crop) -> ImageFolder:
        """Return the task of other images of the folder, which is not walked again."""
        other = copy(self)
        vars(other).update(chosen=chosen, crop=crop)
        del vars(other)["files"]
        other.__post_init__()
        return other

    @property
    def side(self) -> int:
        return self.crop.size

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
        return ImageFiles([self.files[row] for row in chosen], self.crop)


@dataclass(frozen=True)
class ImageFiles(Examples):
    """Images that are read from their files for every batch, each time with another crop.

    Attributes:
        files: The path and class of every image.
        crop: The part of each image that is shown.
    """

    files: Sequence[tuple[Path, int]]
    crop: Crop

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, rows: Iterable[Tensor], seed: Sequence[int]) -> Iterator[Batch]:
        """Yield the batches, the next `AHEAD` of which threads read meanwhile."""
        pool, ahead = ThreadPoolExecutor(), deque[tuple[Tensor, Iterator[np.ndarray]]]()
        try:
            for chosen in rows:
                ahead.append((chosen, pool.map(partial(self._read, seed), chosen.tolist())))
                if len(ahead) > AHEAD:
                    yield self._together(*ahead.popleft())
            while ahead:
                yield self._together(*ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, seed: Sequence[int], row: int) -> np.ndarray:
        generator = np.random.default_rng([*seed, row])
        with Image.open(self.files[row][0]) as image:
            return self.crop(image.convert("RGB"), generator)

    def _together(self, rows: Tensor, pictures: Iterator[np.ndarray]) -> Batch:
        pixels = torch.from_numpy(np.stack(list(pictures))).float().div_(255)
        mean, deviation = (torch.tensor(part)[:, None, None] for part in IMAGENET)
        labels = torch.tensor([self.files[row][1] for row in rows.tolist()])
        return Batch(pixels.sub_(mean).div_(deviation), labels)


def _why_unread(place: Path) -> str:
    """The reason for which a file at this place in a folder of classes is left out; "" of an
    image."""
    if any(map(is_hidden, place.parts)):
        return "hidden files"
    if place.suffix.lower() not in SUFFIXES:
        return "files of other kinds"
    return "" if len(place.parts) > 1 else "images outside of the classes' folders"
