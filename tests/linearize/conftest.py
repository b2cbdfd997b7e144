"""What conversions of the tests begin with, and what they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversions import skip_pages, write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A very small softmax model on disk, with its tokenizer and a text."""
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture
def no_pages(monkeypatch) -> None:
    """Runs draw no page."""
    skip_pages(monkeypatch.setattr)
