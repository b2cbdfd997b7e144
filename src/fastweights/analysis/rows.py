"""A mixer's table row, read from its docstring."""

from __future__ import annotations

import re
from inspect import cleandoc

from fastweights.mixer import Mixer

DIMENSIONS = "dimensions"
FUNCTION = re.compile(r"f_\w+|o_t")


def row(mixer: type[Mixer]) -> dict[str, str]:
    """``{"f_q": "x W_Q", …, "dimensions": "d_k = d/2, d_v = d"}`` from the first paragraph of the docstring.

    There, two spaces or more separate ``f_q  x W_Q`` from ``f_α  …`` on the same line, and what begins with d_ or H
    states dimensions. Raises ValueError for a docstring that is not such a row.
    """
    found: dict[str, str] = {}
    key = ""
    for token in _tokens(mixer):
        if FUNCTION.fullmatch(token):
            key = token
        elif re.match(r"d_\w ?[=/]|d_\w,", token) and key not in (DIMENSIONS,):
            key = DIMENSIONS
            found[key] = token
        else:
            found[key] = f"{found[key]} {token}" if key in found else token
    if not {"f_q", "f_k", "f_v", DIMENSIONS} <= found.keys():
        raise ValueError(f"the docstring of {mixer.__name__} does not begin with a table row (f_q, f_k, f_v, d_k, d_v)")
    return found


def _tokens(mixer: type[Mixer]) -> list[str]:
    paragraph = cleandoc(mixer.__doc__ or "").split("\n\n")[0]
    return [token for line in paragraph.splitlines() for token in re.split(r"\s{2,}", line.strip())]
