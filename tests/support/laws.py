"""Properties that hold for every value of a kind, tried on random ones.

`law` makes two tests of a property: on a few values, the same in every run, and, marked `slow`, on
many others each time. What fails is shrunk and printed with the line that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

CALLS: dict[str, int] = {}
"""How often the slow suite tries each law, by its name."""
COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def law(
    *, calls: int, few: int = 20, **values: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Make tests of a function that raises where a property does not hold.

    Args:
        calls: How many values the slow suite tries.
        few: How many every run tries.
        values: What the function's arguments are drawn from.
    """
    many = settings(max_examples=calls, print_blob=True, **COMMON)
    always = settings(max_examples=few, derandomize=True, **COMMON)

    def make(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize(
            "profile",
            [pytest.param(always, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)],
        )
        def test(profile: settings) -> None:
            profile(given(**values)(check))()

        test.__name__, test.__qualname__ = check.__name__, check.__qualname__
        test.__module__, test.__doc__ = check.__module__, check.__doc__
        CALLS[f"{check.__module__}:{check.__name__}"] = calls
        return test

    return make
