"""Pathfinder (Linsley et al., 2018; Long Range Arena): are two dots the ends of one dashed
curve?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fastweights.lab.tasks.base import Batch, BatchShare, Examples, SequenceTask

FINE = 4
ANGLES = np.arange(-85, 86, 10) * np.pi / 180
TRIES = 20


@dataclass(frozen=True)
class Scene:
    """The contents of a Pathfinder picture; places are (row, column) in pixels.

    Attributes:
        curves: ``[s 2 2]`` each, dashes by their two ends; the first two curves are long, the
            others distract.
        markers: ``[2 2]``, the two dots.
        label: 1 if both dots are at ends of one curve, otherwise 0.
    """

    curves: list[np.ndarray]
    markers: np.ndarray
    label: int


@dataclass(frozen=True)
class Pathfinder(SequenceTask):
    """Pathfinder: whether two dots are the ends of one dashed curve, from a grey picture, pixel by
    pixel.

    A picture has two long dashed curves among shorter ones; the label is 1 if one curve has both
    dots. Sizes are those of the Long Range Arena's hardest pictures of 32 pixels (contour length
    14, five distractors of 4 dashes, dashes of 2 pixels and 0.5 wide with 1 between them). The turn
    from dash to dash has probability ∝ cos² of it, as in the reference; where curves would touch
    they are drawn anew. The generator is our own: the distributions of positions differ where the
    reference abandons a curve earlier or later.

    Attributes:
        side: Side of the picture in pixels.
        dashes: Dashes of a long curve.
        distractors: Number of short curves.
        distractor_dashes: Dashes of a short curve.
        dash: Length of a dash in pixels.
        gap: Pixels between two dashes of a curve.
        width: Width of a dash in pixels.
        apart: Pixels between the first ends of the two long curves.
        radius: Radius of a dot in pixels.
    """

    side: int = 32
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    dash: float = 2.0
    gap: float = 1.0
    width: float = 0.5
    apart: float = 7.0
    radius: float = 1.5

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def classes(self) -> int:
        return 2

    @property
    def length(self) -> int:
        return self.side**2

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        return as_tokens(self._pictures(generator, count))

    def examples(self, generator: np.random.Generator, count: int) -> Pictures:
        return Pictures(self._pictures(generator, count))

    def _pictures(self, generator: np.random.Generator, count: int) -> Batch:
        """A byte per pixel."""
        pixels, labels = np.empty((count, self.length), np.uint8), torch.empty(count).long()
        for number in range(count):
            scene = self.scene(generator)
            pixels[number] = self.picture(scene).ravel()
            labels[number] = scene.label
        return Batch(torch.from_numpy(pixels), labels)

    def scene(self, generator: np.random.Generator) -> Scene:
        """Draw a random scene; starts again until the two long curves fit."""
        while True:
            first = self._curve(generator, [], self.dashes, None)
            second = (
                None if first is None else self._curve(generator, [first], self.dashes, first[0, 0])
            )
            if first is not None and second is not None:
                break
        curves = [first, second]
        for _ in range(self.distractors * TRIES):
            if len(curves) == 2 + self.distractors:
                break
            short = self._curve(generator, curves, self.distractor_dashes, None)
            curves += [] if short is None else [short]
        label, start = (int(generator.integers(2)) for _ in range(2))
        end = start if label else 1 - start
        return Scene(curves, np.stack([curves[start][0, 0], curves[end][-1, 1]]), label)

    def picture(self, scene: Scene) -> np.ndarray:
        """Draw the scene as ``[side side]`` uint8; strokes are brighter than white before
        anti-aliasing."""
        centres = (np.arange(self.side * FINE) + 0.5) / FINE
        bright = np.zeros((self.side * FINE, self.side * FINE))
        dashes = [(low, high, self.width / 2) for low, high in np.concatenate(scene.curves)]
        for low, high, reach in [*dashes, *((dot, dot, self.radius) for dot in scene.markers)]:
            rows, columns = (_around(low[axis], high[axis], reach) for axis in (0, 1))
            points = np.stack(np.meshgrid(centres[rows], centres[columns], indexing="ij"), axis=-1)
            bright[rows, columns][_distances(points, low, high) <= reach] = 1.5
        shown = bright.reshape(self.side, FINE, self.side, FINE).mean((1, 3))
        return np.minimum(255 * shown, 255).astype(np.uint8)

    def _curve(
        self,
        generator: np.random.Generator,
        others: list[np.ndarray],
        dashes: int,
        near: np.ndarray | None,
    ) -> np.ndarray | None:
        """``[dashes 2 2]``, or None if it does not fit; its first end lies `apart` from `near`."""
        taken = np.concatenate([_points(other) for other in others]) if others else np.empty((0, 2))
        for _ in range(TRIES):
            start, heading = self._start(generator, near), generator.uniform(-np.pi, np.pi)
            curve = [np.stack([start, start + self.dash * _towards(heading)])]
            if self._free(curve[0], taken):
                while len(curve) < dashes and (
                    step := self._step(generator, curve, heading, taken)
                ):
                    heading = step[1]
                    curve.append(step[0])
                if len(curve) == dashes:
                    return np.stack(curve)
        return None

    def _start(self, generator: np.random.Generator, near: np.ndarray | None) -> np.ndarray:
        if near is None:
            return generator.uniform(1, self.side - 1, size=2)
        return near + self.apart * _towards(generator.uniform(-np.pi, np.pi))

    def _step(
        self,
        generator: np.random.Generator,
        curve: list[np.ndarray],
        heading: float,
        taken: np.ndarray,
    ) -> tuple[np.ndarray, float] | None:
        """The next dash, and its heading; None in a dead end."""
        own = _points(np.stack(curve[:-1])) if len(curve) > 1 else np.empty((0, 2))
        weights = np.cos(ANGLES) ** 2
        for turn in generator.choice(
            ANGLES, size=len(ANGLES), replace=False, p=weights / weights.sum()
        ):
            towards = _towards(heading + turn)
            low = curve[-1][1] + self.gap * towards
            dash = np.stack([low, low + self.dash * towards])
            if self._free(dash, np.concatenate([taken, own])):
                return dash, heading + turn
        return None

    def _free(self, dash: np.ndarray, taken: np.ndarray) -> bool:
        """Whether a dash lies in the picture, and further from all others than the gap within a
        curve.
        """
        inside = ((dash >= 1) & (dash <= self.side - 1)).all()
        return bool(inside) and not (
            len(taken) and _distances(taken, *dash).min() < self.gap + self.width
        )


@dataclass(frozen=True)
class Pictures(Examples):
    """Pictures that take a byte per pixel until they are asked for: 2.6 GB are all of Path-X's.

    Attributes:
        stored: The pictures and labels.
    """

    stored: Batch

    def __len__(self) -> int:
        return len(self.stored)

    def batches(
        self, rows: Iterable[Tensor], seed: Sequence[int], share: BatchShare = BatchShare()
    ) -> Iterator[Batch]:
        return map(as_tokens, self.stored.batches(rows, seed, share))


def as_tokens(pictures: Batch) -> Batch:
    """Pictures whose pixels are the models' tokens."""
    return replace(pictures, inputs=pictures.inputs.long())


def _around(low: float, high: float, reach: float) -> slice:
    """The fine pixels within `reach` of an interval, along one axis."""
    first, last = min(low, high) - reach, max(low, high) + reach
    return slice(max(0, int(first * FINE)), int(last * FINE) + 1)


def _towards(heading: float) -> np.ndarray:
    return np.array([np.sin(heading), np.cos(heading)])


def _points(dashes: np.ndarray) -> np.ndarray:
    """``[n 2]``: five points on each of ``dashes [s 2 2]``."""
    along = np.linspace(0, 1, 5)[:, None]
    return (dashes[:, None, 0] * (1 - along) + dashes[:, None, 1] * along).reshape(-1, 2)


def _distances(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """``[…]``: of ``points [… 2]`` from the segment between low and high, which may be one
    point.
    """
    along = np.clip(
        (points - low) @ (high - low) / max((high - low) @ (high - low), np.finfo(float).tiny), 0, 1
    )
    return np.sqrt(((points - low - along[..., None] * (high - low)) ** 2).sum(-1))
