"""The order of files: those with most tests marked `long` first.

Processes take whole files, and one that begins a slow file when no other is left keeps all others
waiting. Needs xdist's --no-loadscope-reorder, which by itself begins with the files of most tests.
"""

from __future__ import annotations

from collections import Counter

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = Counter(item.path for item in items if "long" in item.keywords)
    items.sort(key=lambda item: -long[item.path])
