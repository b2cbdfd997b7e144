"""The run-time type checker of the tests: beartype, which rejects `Self` on a method decorated
without its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, BeartypeStrategy, beartype

_checked = beartype(conf=BeartypeConf(strategy=BeartypeStrategy.O1, is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments and result checked, as far as their annotations do not say
    `Self`.
    """
    hints = function.__annotations__.items()
    function.__annotations__ = {name: hint for name, hint in hints if "Self" not in str(hint)}
    return _checked(function)
