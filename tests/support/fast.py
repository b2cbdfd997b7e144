"""``pytest --fast``: the first case of every test function that is not marked `long`; and of those
marked `sampled`, one case in six: the others are marked `slow`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from zlib import crc32

import pytest

GOLDEN, SHARE = (math.sqrt(5) - 1) / 2, 1 / 6
"""Multiples of the first, less their whole parts, lie evenly: whatever is repeated in the order of
cases, the share of them below the second has some of all. They begin elsewhere for every test, so
that tests of the same cases share them out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="the first case of every test that is not marked long"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for name, own in cases.items():
        sampled = [x for x in own if "sampled" in x.keywords and "slow" not in x.keywords]
        first = crc32(name.encode()) % max(len(sampled), 1)
        for number, item in enumerate(sampled[first:] + sampled[:first]):
            if number * GOLDEN % 1 >= SHARE:
                item.add_marker("slow")
    if config.getoption("--fast"):
        first = (own[0] for own in cases.values())
        chosen = {item for item in first if "long" not in item.keywords}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
