"""Patched models give what transformers' own code gives, family by family."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from family_readings import difference, modelling_file, read, widen
from fastweights.engines.transformers import patch_transformers
from transformers_families import build_family, present_families

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module", params=present_families())
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_family(request.param)
    torch.set_num_threads(threads)


def test_float32_is_theirs_and_comes_back(model: nn.Module) -> None:
    before, functions = read(model), dict(vars(modelling_file(model)))
    with patch_transformers(model) as patch:
        assert patch.replaced
        assert not patch.left
        found = read(model)
    assert difference(found, before) <= (1e-5, "")
    assert torch.equal(found["tokens"], before["tokens"])
    after = read(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(vars(modelling_file(model))[name] is f for name, f in functions.items())


def test_float64_is_theirs(model: nn.Module) -> None:
    theirs, ours = (read(widen(model, patched=patched)) for patched in (False, True))
    assert difference(ours, theirs) <= (1e-10, "")
    assert torch.equal(ours["tokens"], theirs["tokens"])
