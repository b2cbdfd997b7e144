"""One token of RWKV-4's rule at once is what the rule's definition makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights import kernels
from fastweights.kernels.native import library
from fastweights.layers import TokenContext, TokenShift
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import Amplified, Bonus, Decay, Normalized

TAKEN = "amplified bonus, one token (torch): taken"
COMPILED = "amplified bonus, one token (compiled): taken"
B, TOKENS, HEADS = 2, 30, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def record(
    values: int, heads: int = HEADS, *, decays: bool, spread: float, least: float = -torch.inf
) -> Amplified:
    k, v = drawn(B, TOKENS, heads, 1, seed=1), drawn(B, TOKENS, heads, values, seed=2)
    log_decay = -drawn(1, 1, heads, 1, seed=3).abs() if decays else None
    one, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), k.clamp(min=least)
    rule = Bonus(one, k, v, log_decay, drawn(1, 1, heads, 1, seed=4).exp())
    return Amplified(Normalized(rule), spread * drawn(B, TOKENS, heads, 1, seed=5))


MASKS = ["none", "padding", "documents", "both"]


def masked(rec: Amplified, masks: str) -> Amplified:
    keep, starts = drawn(B, TOKENS, seed=6) > -0.5, drawn(B, TOKENS, seed=7) > 1
    rec = rec.keep(keep) if masks in ("padding", "both") else rec
    return rec.restart(starts) if masks in ("documents", "both") else rec


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("values", [1, 3])
@pytest.mark.parametrize("masks", MASKS)
def test_tokens_agree_with_the_definition(
    masks: str, values: int, *, decays: bool, spread: float
) -> None:
    rec = masked(record(values, decays=decays, spread=spread), masks)
    want, end = evaluate(rec, None, Recurrent())
    state, outputs = None, []
    for token in rec.split(1):
        assert TAKEN in kernels.explain(token)
        o, state = evaluate(token, state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), want, rtol=1e-9, atol=1e-9)
    assert isinstance(state, tuple)
    torch.testing.assert_close(state, tuple(end), rtol=1e-9, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")
@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize(("values", "heads"), [(1, 1), (1, 131), (3, 20)])
@pytest.mark.parametrize("masks", MASKS)
def test_compiled_tokens_agree_with_the_definition(
    masks: str, values: int, heads: int, *, decays: bool, spread: float
) -> None:
    rec = masked(record(values, heads, decays=decays, spread=spread, least=0.1), masks)
    single = rec.map_streams(Tensor.float)
    want, end = evaluate(single.map_streams(Tensor.double), None, Recurrent())
    state, outputs = None, []
    for token in single.split(1):
        with torch.no_grad():
            assert COMPILED in kernels.explain(token)
            o, state = evaluate(token, state)
        outputs.append(o)
    assert isinstance(state, tuple)
    assert isinstance(end, tuple)
    found = torch.cat(outputs, 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    # another m may divide the state: what it stands for is the same
    memory = state[0] * (state[1].double() - end[1]).exp()[..., None]
    torch.testing.assert_close(memory, end[0], rtol=1e-4, atol=1e-5)


def test_autograd_is_left_to_torch() -> None:
    token = record(1, decays=True, spread=1.0)[:1].map_streams(Tensor.float)
    assert COMPILED not in kernels.explain(token)


def test_its_gradients_are_those_of_the_definition() -> None:
    rec = record(2, decays=True, spread=3.0)
    _, before = evaluate(rec[:9])
    found = []
    for method in (None, Recurrent()):
        token = record(2, decays=True, spread=3.0)[9:10].map_streams(
            lambda s: s.clone().requires_grad_()
        )
        o, (memory, _) = evaluate(token, before, *([] if method is None else [method]))
        leaves = [s for name, s in token.streams.items() if name != "q"]
        found.append(torch.autograd.grad(o.square().sum() + memory.sum(), leaves))
    torch.testing.assert_close(*found)


def test_other_rules_are_left_to_others() -> None:
    one = torch.ones(1, 1, 1, 1)
    decay = Amplified(Normalized(Decay(one, one, one, None)), one)
    floored = Amplified(Normalized(Bonus(one, one, one, None, one), floor=1.0), one)
    for rec in (decay, floored):
        assert TAKEN not in kernels.explain(rec)


def test_a_shifted_token_is_that_of_all_tokens() -> None:
    shift, x = TokenShift(6).double(), drawn(B, 7, 6)
    torch.nn.init.uniform_(shift.mu)
    shift.name = "shift"
    want, tails = shift(x, TokenContext.start(x)), {"shift": torch.zeros(B, 1, 6).double()}
    for t in range(7):
        past = TokenContext(x[:, t : t + 1], tails, None, None, None)
        torch.testing.assert_close(shift(x[:, t : t + 1], past), want[:, t : t + 1])
        tails = past.tails
