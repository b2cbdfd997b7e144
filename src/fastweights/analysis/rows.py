"""A mixer's table row, read from its docstring."""

from __future__ import annotations

import re
from inspect import cleandoc

from fastweights.mixer import Mixer

DIMENSIONS = "dimensions"
SYMBOL = re.compile(r"f_\w+|o_t|[^\W\d](\(\w\))?")
DIMENSION = re.compile(r"d_\w( ?[=/]|,)")


def row(mixer: type[Mixer]) -> dict[str, str]:
    """Read a mixer's table row from its docstring: ``{"f_q": "x W_Q", …, "dimensions": "d_k = d/2,
    d_v = d"}``.

    In its first paragraph, two spaces or more separate ``f_q  x W_Q`` from ``f_α  …`` on the same
    line, and what begins with ``d_k =`` or the like states dimensions, to the end.

    Raises:
        ValueError: If the docstring does not begin with such a row.
    """
    found: dict[str, str] = {}
    key, named = "", False
    for token in _tokens(mixer):
        if not named and SYMBOL.fullmatch(token):
            key, named = token, True
        elif not named and DIMENSION.match(token) and key != DIMENSIONS:
            key, found[DIMENSIONS] = DIMENSIONS, token
        else:
            found[key], named = f"{found[key]} {token}" if key in found else token, False
    if not {"f_q", "f_k", "f_v", DIMENSIONS} <= found.keys():
        raise ValueError(
            f"the docstring of {mixer.__name__} does not begin with a table row (f_q, f_k, f_v,"
            " d_k, d_v)"
        )
    return found


def _tokens(mixer: type[Mixer]) -> list[str]:
    paragraph = cleandoc(mixer.__doc__ or "").split("\n\n")[0]
    return [token for line in paragraph.splitlines() for token in re.split(r"\s{2,}", line.strip())]
