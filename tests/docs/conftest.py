"""What pages and examples register is forgotten after them."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from fastweights import MIXERS


@pytest.fixture(autouse=True)
def own_mixers() -> Iterator[None]:
    with patch.dict(MIXERS):
        yield
