"""Pictures of one pixel, since to draw a real one takes longer than to train a very small model."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.figure import Figure
from PIL import Image


def _encode_pixel() -> bytes:
    buffer = BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG")
    return buffer.getvalue()


PIXEL = _encode_pixel()
_SAVE = Figure.savefig


def draw_pixels() -> None:
    """Have figures made as ever, and saved as a pixel."""
    Figure.savefig = _save_pixel


def draw_all(set_attribute: Callable[..., None]) -> None:
    """Have figures saved as they are, for as long as an attribute stays set."""
    set_attribute(Figure, "savefig", _SAVE)


def _save_pixel(_: Figure, target: str | Path | BinaryIO, **__: Any) -> None:
    if isinstance(target, str | Path):
        Path(target).write_bytes(PIXEL)
    else:
        target.write(PIXEL)
