"""Quantities in words."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def bytes_in_words(count: float) -> str:
    """Say a number of bytes in decimal units, as disks and networks have them: ``25.28 GB``."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:,.4g} {_UNITS[unit]}"
