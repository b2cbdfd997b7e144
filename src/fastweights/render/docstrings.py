"""What docstrings say, for tables and for the command's help."""

from __future__ import annotations

from inspect import cleandoc


def first_paragraph(documented: object) -> str:
    """The first paragraph of an object's own docstring, on one line; empty without one."""
    return cleandoc(documented.__doc__ or "").split("\n\n")[0].replace("\n", " ")
