"""What does not fit is named, with the rule and what would fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastweights.kernels import TABLE, explain, only, select, takers
from fastweights.methods import Chunkwise, evaluate
from fastweights.recurrence import (
    DPLR,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    Normalized,
    ShapeError,
    Softmax,
    WindowedLinear,
)

pytestmark = pytest.mark.usefixtures("unchecked")


def stream(*shape: int) -> Tensor:
    return torch.zeros(shape)


q, k, v, beta = stream(2, 5, 2, 3), stream(2, 5, 2, 3), stream(2, 5, 2, 4), stream(2, 5, 2, 1)
decay = Decay(q, k, v, None)

WRONG: list[tuple[str, Callable[[], object]]] = [
    ("q has shape \\[5, 2, 3\\]; streams are", lambda: Decay(q[0], k, v, None)),
    ("k has width 2, must be 3", lambda: Decay(q, k[..., :2], v, None)),
    ("log_decay has width 2, must be 1 or 3", lambda: Decay(q, k, v, k[..., :2])),
    ("log_decay has width 1, must be 3", lambda: Decay(q, None, v, beta)),
    ("skip has width 3, must be 1 or 4", lambda: Decay(q, k, v, None, k)),
    (
        "must agree, or have length 1, .* got q .* k .* v \\[2, 4, 2, 4\\]",
        lambda: Decay(q, k, v[:, :4], None),
    ),
    ("must agree, or have length 1", lambda: Decay(q, k, stream(3, 5, 2, 4), None)),
    ("must agree, or have length 1", lambda: Delta(q, k, stream(2, 5, 3, 4), beta)),
    ("beta has width 3, must be 1", lambda: Delta(q, k, v, k)),
    ("log_decay has width 4, must be 1 or 3", lambda: Delta(q, k, v, beta, v)),
    ("b has width 4, must be 3", lambda: DPLR(q, k, v, k, v)),
    ("a has width 1, must be 3", lambda: DPLR(q, k, v, beta, None)),
    ("log_decay has width 4, must be 1 or 3", lambda: DPLR(q, k, v, k, k, v)),
    (
        "H stays symmetric only under one decay per head",
        lambda: Mesa(q, k, v, beta, k, stream(2, 3)),
    ),
    ("ridge has width 4, must be 1 or 3", lambda: Mesa(q, k, v, beta, None, stream(2, 4))),
    (
        "real; got a complex one",
        lambda: Mesa(q.to(torch.complex64), k, v, beta, None, stream(2, 3)),
    ),
    ("k has width 4, must be 3", lambda: Softmax(q, v, v)),
    ("fk has width 4, must be 3", lambda: WindowedLinear(q, k, v, q, v, beta, 2)),
    (
        "the state of WindowedLinear is",
        lambda: evaluate(WindowedLinear(q, k, v, q, k, beta, 2), stream(2, 2, 3, 4)),
    ),
    (
        "q has 2 heads and k, v 3; the latter must divide",
        lambda: Softmax(q, stream(2, 5, 3, 3), stream(2, 5, 3, 4)),
    ),
    (
        "skip \\(of a Normalized\\) has width 4, must be 1",
        lambda: Normalized(Decay(q, k, v, None, v)),
    ),
    ("floor has width 4, must be 1", lambda: Normalized(decay, v)),
    ("skip \\(of a map\\) has width 4, must be 1", lambda: Decay(q, k, v, None, v).attention_map()),
    (
        "keep mask has shape \\[2, 4\\], must be \\[batch, time\\] = \\[2, 5\\]",
        lambda: decay.keep(stream(2, 4) > 0),
    ),
    ("segment ids has shape \\[3, 5\\]", lambda: decay.segments(stream(3, 5).long())),
    (
        "state shapes \\[\\(2, 2, 3, 4\\)\\], got \\[\\(2, 2, 4, 3\\)\\]",
        lambda: evaluate(decay, stream(2, 2, 4, 3)),
    ),
    ("state shapes", lambda: evaluate(decay, (stream(2, 2, 3, 4), stream(2, 2, 3, 4)))),
    ("state shapes", lambda: evaluate(Mesa(q, k, v, beta, None, stream(2, 3)), stream(2, 2, 3, 4))),
    ("the state of Softmax is \\(keys", lambda: evaluate(Softmax(q, k, v), stream(2, 2, 3, 4))),
    (
        "Softmax here has state shapes",
        lambda: evaluate(
            Softmax(q, k, v), (stream(2, 2, 1, 3), stream(2, 2, 1, 3), stream(2, 1).long())
        ),
    ),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message for message, _ in WRONG])
def test_shapes_that_do_not_fit(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("needs k, or log_decay for the tied key", lambda: Decay(q, None, v, None)),
        ("floor of a normaliser is above 0", lambda: Normalized(decay, 0.0)),
        ("a query sees at least itself", lambda: Softmax(q, k, v, window=0)),
        (
            "a number of tokens; use window ≥ 0",
            lambda: WindowedLinear(q, k, v, q, k, beta, window=-1),
        ),
        ("a chunk has at least one token", lambda: Chunkwise(0)),
        ("not be negative", lambda: ConjugateGradient(-1)),
        ("not be negative", lambda: ConjugateGradient(3, -1e-3)),
    ],
)
def test_values_that_make_no_sense(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_explain_says_which_kernel_is_taken() -> None:
    taken = select(decay).name
    lines = explain(decay).splitlines()
    assert len(lines) == sum(isinstance(decay, kernel.rule) for kernel in TABLE) + 1
    assert [line for line in lines if line.endswith(": taken")] == [f"{taken}: taken"]


def test_only_allows_one_kernel() -> None:
    last = takers(decay)[-1].name
    with only(last):
        assert select(decay).name == last
        assert sum("is allowed here" in line for line in explain(decay).splitlines()) == sum(
            kernel.name != last for kernel in takers(decay)
        )
    with (
        pytest.raises(
            LookupError, match=f"no kernel is called 'none'; there are .*{last.split()[0]}"
        ),
        only("none"),
    ):
        pass
