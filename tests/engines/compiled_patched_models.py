"""A patched model, compiled; `test_patched_tools` runs this file, away from the type checker."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from family_readings import distance, draw_text, learn
from fastweights import patch_transformers
from transformers_families import build_family

FAMILIES = ("qwen3_next", "bamba", "mamba")

CLOSE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler, of itself


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_equals_the_plain_one(family: str) -> None:
    """It is one graph, which serves every later call."""
    model, ids = build_family(family).train(), draw_text(2, 37)
    expected = learn(model, ids)
    with patch_transformers():
        compiled = torch.compile(model)
        found = learn(compiled, ids)
        assert max(map(distance, found, expected)) < CLOSE
        learn(compiled, ids.flip(0))
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        with torch.no_grad():
            logits = compiled.eval()(input_ids=ids, use_cache=False).logits
    assert distance(logits, expected[0]) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_other_lengths_share_a_graph(family: str) -> None:
    """The second length's is for all, as torch.compile makes it."""
    model = build_family(family).train()
    with patch_transformers():
        compiled = torch.compile(model, backend="eager")
        for length in (37, 41, 53, 70):
            compiled(input_ids=draw_text(2, length), use_cache=False)
    assert counters["stats"]["unique_graphs"] == 2
