"""Optional packages."""

from __future__ import annotations

import pytest

from fastweights.environment import require_package


def test_a_missing_package_says_how_to_get_it() -> None:
    require_package("torch", "everything", "or do without")
    with pytest.raises(ValueError, match="Ray needs not_there: pip install not_there, or leave"):
        require_package("not_there", "Ray", "or leave out --ray")
