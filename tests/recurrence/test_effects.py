"""What tokens do to whatever state is before them, beside reading them from that state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_own_rule import Gated

from beside import SOME
from cases import CASES, WITHOUT_EFFECT, Case, Shape, parts
from fastweights.methods import Auto, Chunkwise, evaluate
from fastweights.recurrence import Decay, Mesa, NoFiniteFormError, Recurrence, ShermanMorrison
from fastweights.recurrence.effects import Effect
from tolerances import error

LENGTH, MORE = 17, 5
SHAPE = Shape(t=LENGTH + MORE)
IDS = torch.tensor([[0] * 22, [0] * 5 + [1] * 17])
STARTS = torch.arange(22) == torch.tensor([[0], [4]])
MASK = torch.arange(22) % 4 != torch.tensor([[0], [2]])
VIEWS: dict[str, Callable[[Recurrence], Recurrence]] = {
    "plain": lambda record: record,
    "padded": lambda record: record.keep(MASK),
    "packed": lambda record: record.segments(IDS),
    "restarted": lambda record: record.keep(MASK).restart(STARTS),
}
FINITE = [c for c in CASES if c.name not in WITHOUT_EFFECT]


@pytest.mark.sampled
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", [*FINITE, *SOME], ids=str)
def test_effects_lead_to_the_same_state(case: Case, view: str) -> None:
    record = VIEWS[view](case.rule(**case.streams(SHAPE)))
    start = case.adjust(case.start(SHAPE))
    check(record, record[:LENGTH].adopt(start))
    if case in SOME:  # whose first tokens may be sinks
        check(record, record.initial_state())
        check(record, evaluate(record[:1])[1])


def check(record: Recurrence, start) -> None:
    """From the state after `LENGTH` tokens, by the effects of slices of any length, the others give
    the same output.
    """
    _, state = evaluate(record[:LENGTH], start)
    after = start
    for span in (slice(0, 1), slice(1, 9), slice(9, LENGTH)):
        after = record[span].effect(Auto().evaluate).after(after)
    rest = record[LENGTH:]
    want, _ = evaluate(rest, state, Chunkwise(2))
    got, _ = evaluate(rest, after, Chunkwise(2))
    assert error(got, want) < 1e-12
    assert [p.shape for p in parts(after)] == [p.shape for p in parts(state)]


@pytest.mark.parametrize("case", FINITE, ids=str)
def test_effects_are_as_large_whatever_the_length(case: Case) -> None:
    def size(t: int) -> list[torch.Size]:
        effect: Effect = case.rule(**case.streams(Shape(t=t))).effect(Auto().evaluate)
        return [tensor.shape for tensor in effect.tensors()]

    assert size(11) == size(29)


def test_a_rule_of_ones_own_has_an_effect() -> None:
    torch.manual_seed(0)
    q, k, v, beta = (torch.rand(2, 22, 3, w, dtype=torch.float64) for w in (4, 4, 5, 1))
    check(Gated(q, k, v, beta, -beta), torch.rand(2, 3, 4, 5, dtype=torch.float64))


def test_an_inverse_that_a_state_carries_is_that_of_its_gram() -> None:
    torch.manual_seed(0)
    q, k, v, beta = (torch.rand(2, 22, 3, w, dtype=torch.float64) for w in (4, 4, 5, 1))
    record = Mesa(q, k, v, beta, -beta, torch.ones(3, 4).double(), ShermanMorrison())
    _, state = evaluate(record)
    after = record.effect(Auto().evaluate).after(record.initial_state())
    assert all(error(a, b) < 1e-12 for a, b in zip(after, state, strict=True))


def test_rules_without_an_effect_say_what_to_do() -> None:
    softmax = next(c for c in CASES if c.name == "softmax")
    with pytest.raises(NoFiniteFormError, match=r"HeadSharded\(group\), or give"):
        softmax.rule(**softmax.streams()).effect(Auto().evaluate)
    levels = next(c for c in CASES if c.name == "loglinear-decay")
    with pytest.raises(NoFiniteFormError, match=r"how many are before them; evaluate it by Head"):
        levels.rule(**levels.streams()).effect(Auto().evaluate)
    network = next(c for c in CASES if c.name == "ttt")
    with pytest.raises(NoFiniteFormError, match=r"its weights at every minibatch; evaluate it by"):
        network.rule(**network.streams()).effect(Auto().evaluate)
    streams = next(c for c in CASES if c.name == "decay-scalar").streams()
    with pytest.raises(NoFiniteFormError, match=r"not known; state it in _Silent\.effect"):
        _Silent(**streams).effect(Auto().evaluate)


class _Silent(Decay):
    """A rule that says nothing of its effect."""

    effect = Recurrence.effect
