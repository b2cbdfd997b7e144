"""Quantities in words."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgtp])(i?)b?|b|bytes)?", re.IGNORECASE)


def significant(number: float, digits: int) -> str:
    """Write a number to so many digits, large ones without an exponent: ``12,350``."""
    return f"{float(f'{number:.{digits}g}'):,.15g}"


def millions(count: float) -> str:
    """Say a number of parameters to four digits: ``70.43M``."""
    return f"{significant(count / 1e6, 4)}M"


def bytes_in_words(count: float) -> str:
    """Say a number of bytes in decimal units, as disks and networks have them: ``25.28 GB``."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{significant(count, 4)} {_UNITS[unit]}"


def layers_in_words(numbers: Iterable[int]) -> str:
    """Say which layers: ``layer 5``, ``layers 0–4, 6, 7``; three and more in a row as a range."""
    found = sorted(numbers)
    return f"layer{'s' * (len(found) != 1)} {in_ranges(found)}"


def layers_by_reason(reasons: Iterable[tuple[int, str]]) -> list[str]:
    """Say which layers have which reason, those of each together: ``layers 0–4: it slides``."""
    found: dict[str, list[int]] = {}
    for layer, reason in reasons:
        found.setdefault(reason, []).append(layer)
    return [f"{layers_in_words(layers)}: {reason}" for reason, layers in found.items()]


def in_ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers, three and more in a row as a range: ``0–4, 6, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = (f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(said)


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
