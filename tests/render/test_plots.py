"""The look of figures."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from fastweights.render.plots import PALETTE

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def cielab(colour: str) -> np.ndarray:
    """A colour of sRGB as (L, a, b), whose distances are about those that people see."""
    code = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(code > 0.04045, ((code + 0.055) / 1.055) ** 2.4, code / 12.92)
    xyz = TO_XYZ @ linear / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_many_series_have_colours_that_can_be_told_apart() -> None:
    pairs = combinations([cielab(colour) for colour in (*PALETTE, "#ffffff")], 2)
    assert len(PALETTE) >= 12
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 20
