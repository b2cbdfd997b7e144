"""A pytest plugin that puts the CPU in the GPU's place: what then passes is right but for what only
CUDA does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> torch.device | None:
    if fixturedef.argname != "cuda":
        return None
    cpu = torch.device("cpu")
    fixturedef.cached_result = cpu, fixturedef.cache_key(request), None
    return cpu
