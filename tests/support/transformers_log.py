"""What transformers says, which goes to a logger of its own whose level other code may change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def transformers_warnings() -> Iterator[list[str]]:
    """A list that gets every warning of transformers within a block."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
