"""Quantities in words."""

from __future__ import annotations

import re

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgtp])(i?)b?|b|bytes)?", re.IGNORECASE)


def bytes_in_words(count: float) -> str:
    """Say a number of bytes in decimal units, as disks and networks have them: ``25.28 GB``."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:,.4g} {_UNITS[unit]}"


def bytes_from_words(text: str) -> int:
    """Read a number of bytes: ``65536``, ``64MiB`` (64 · 1024²), ``64MB`` (64 · 1000²), ``1.5 GB``.

    Raises:
        ValueError: If the text is none, or says no whole byte.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes such as 64MiB or 1.5GB")
    number, unit, binary = found.groups()
    count = int(float(number) * (1024 if binary else 1000) ** " kmgtp".index((unit or " ").lower()))
    if count < 1:
        raise ValueError(f"{text!r} is less than a byte")
    return count
