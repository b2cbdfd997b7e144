"""The loss that keeps experts equally busy, beside that of transformers."""

from __future__ import annotations

import pytest
import torch

from fastweights.importers import import_model
from fastweights.models.balance import balance_loss, router_logits
from reference_models import ORIGINALS, PRECISIONS, prompt
from tiny import tiny
from tolerances import assert_close

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_that_of_the_original(padded: bool) -> None:
    original, dtype = ORIGINALS["Qwen3-Next, experts"], torch.float32
    with PRECISIONS[dtype]():
        theirs = original.build()
    ours, ids = import_model(theirs), prompt()
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    wanted = theirs(ids, attention_mask=mask, output_router_logits=True).aux_loss
    with router_logits(ours) as logits:
        ours(ids, attention_mask=mask)
    found = balance_loss(logits, chosen=2, keep=mask if padded else None)
    assert_close(found, wanted.detach(), "loss")
    assert [tuple(one.shape) for one in logits] == [(ids.numel(), 6)] * 2


def test_it_reaches_the_routers_and_what_is_before_them() -> None:
    experts = {"name": "experts", "width": 6, "routing": {"count": 4, "chosen": 2}}
    model = tiny("hybrid", mlps=[experts])
    with router_logits(model) as logits:
        model(prompt() % 31)
    balance_loss(logits, chosen=2).backward()
    for block in model.model.layers:
        assert block.mlp.router.W.weight.grad.any()
    assert model.model.embed_tokens.weight.grad.any()
    assert model.lm_head.weight.grad is None


def test_equally_busy_experts() -> None:
    logits = torch.eye(4, dtype=torch.float64) * 100
    assert balance_loss([logits], chosen=1) == pytest.approx(1)
    assert balance_loss([logits[:1]], chosen=1) == pytest.approx(4)


def test_a_model_without_experts_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"no layer of this .* is a mixture of experts"),
        router_logits(tiny("hybrid")),
    ):
        pass
