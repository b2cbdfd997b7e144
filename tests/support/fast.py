"""``pytest --fast``: the first case of every test function that is not marked `long`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="the first case of every test that is not marked long"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        first = {_function(item): item for item in reversed(items)}.values()
        chosen = {item for item in first if "long" not in item.keywords}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
