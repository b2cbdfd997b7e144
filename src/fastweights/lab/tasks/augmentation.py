"""What a model sees of an image: the middle of it in tests, DeiT's augmentations in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's red, green and blue, between 0 and 1."""


class View(ABC):
    """What is shown of an image, normalised with ImageNet's statistics.

    Attributes:
        size: Side of what is shown, in pixels.
        packages: The optional packages that it needs.
    """

    size: int
    packages: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, image: Image.Image) -> Tensor:
        """Return what is shown of an RGB image, ``[3 size size]`` float32.

        It may draw from the generators of `random`, NumPy and PyTorch.
        """


@dataclass(frozen=True)
class Crop(View):
    """The middle of an image at 8/7 of the size (DeiT's tests)."""

    size: int = 224

    def __call__(self, image: Image.Image) -> Tensor:
        side = min(image.size) * 7 / 8
        left, top = ((length - side) / 2 for length in image.size)
        box = (left, top, left + side, top + side)
        shown = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.asarray(shown).transpose(2, 0, 1).copy()).float().div_(255)
        mean, deviation = (torch.tensor(part)[:, None, None] for part in IMAGENET)
        return pixels.sub_(mean).div_(deviation)


@dataclass(frozen=True)
class DeiTAugmentation(View):
    """DeiT's view of a training image, by timm (Touvron et al., 2021, Table 9): a random crop of 8
    to 100 % of the area, mirrored half of the time, RandAugment, and a random part erased.

    Attributes:
        policy: RandAugment in timm's notation: magnitude 9 of 10 with a deviation of 0.5, ops whose
            effect grows with it.
        erased: Probability that a part is erased.
    """

    packages: ClassVar[tuple[str, ...]] = ("timm",)
    size: int = 224
    policy: str = "rand-m9-mstd0.5-inc1"
    erased: float = 0.25

    def __call__(self, image: Image.Image) -> Tensor:
        return self._transform(image)

    @cached_property
    def _transform(self) -> Callable[[Image.Image], Tensor]:
        from timm.data.transforms_factory import create_transform

        made = create_transform(
            self.size,
            is_training=True,
            auto_augment=self.policy,
            interpolation="bicubic",
            re_prob=self.erased,
            re_mode="pixel",
        )
        for op in (op for step in made.transforms for op in getattr(step, "ops", ())):
            if op.name == "PosterizeIncreasing":
                op.aug_fn = posterize
        return made


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep so many bits of every colour; of none, as timm asks at magnitude 10, Pillow 13 makes no
    black."""
    return ImageOps.posterize(image, bits) if bits else image.point(lambda value: 0)


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., 2018) or, as often, CutMix (Yun et al., 2019) of each batch with itself
    from its end to its beginning, as timm mixes DeiT's batches.

    Attributes:
        mixup: Parameter of mixup's Beta distribution.
        cutmix: Parameter of CutMix's.
    """

    mixup: float = 0.8
    cutmix: float = 1.0

    def __call__(
        self, images: Tensor, shares: Tensor, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed images ``[n c s s]``, and the shares ``[n classes]`` of classes in
        them."""
        others = images.flip(0)
        if generator.random() < 0.5:
            kept = generator.beta(self.mixup, self.mixup)
            images = images.lerp(others, 1 - kept)
        else:
            rows, columns = self._box(images.shape[-1], generator)
            images = images.clone()
            images[..., rows, columns] = others[..., rows, columns]
            kept = 1 - others[0, 0, rows, columns].numel() / others[0, 0].numel()
        return images, shares.lerp(shares.flip(0), 1 - kept)

    def _box(self, side: int, generator: np.random.Generator) -> tuple[slice, slice]:
        """A square of 1 - λ of the area around a random place, as far as it lies inside."""
        length = int(side * np.sqrt(1 - generator.beta(self.cutmix, self.cutmix)))
        middles = generator.integers(side, size=2)
        first, second = (
            slice(max(middle - length // 2, 0), min(middle + (length + 1) // 2, side))
            for middle in middles.tolist()
        )
        return first, second
