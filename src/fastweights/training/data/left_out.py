"""What of a text's sources is not read, counted and said in one line."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

SHOWN = 3
"""How many of what is left out for the same reason are named."""
_OF_SYSTEMS = ("__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "lost+found")
_SAID: dict[Any, Any] = {}  # what has been said in this process


class LeftOutWarning(UserWarning):
    """Something that was among the sources of a text is not read."""


class LeftOut:
    """What is not read, by reason."""

    def __init__(self) -> None:
        self._counts = defaultdict[str, int](int)
        self._names = defaultdict[str, list[str]](list)

    def add(self, reason: str, name: object) -> None:
        """Count one of this name; the reason is a plural such as "hidden files"."""
        self._counts[reason] += 1
        if self._counts[reason] <= SHOWN:
            self._names[reason].append(str(name))

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __str__(self) -> str:
        return ", ".join(map(self._count, self._counts))

    def _count(self, reason: str) -> str:
        more = ["…"] if self._counts[reason] > SHOWN else []
        return f"{reason}: {self._counts[reason]:,} ({'; '.join(self._names[reason] + more)})"

    def warn(self, place: str) -> None:
        """Say what is left out of a place, once."""
        if self:
            message = f"left out of {place}: {self}"
            warnings.warn_explicit(message, LeftOutWarning, "fastweights", 0, registry=_SAID)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is none of the user's own: it begins with a dot, or
    holds what a system keeps beside them."""
    return (name.startswith(".") and name.strip(".") != "") or name in _OF_SYSTEMS
