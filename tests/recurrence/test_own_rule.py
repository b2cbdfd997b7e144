"""A rule of a user's own is as good as one of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from cases import METHODS
from fastweights import kernels
from fastweights.analysis.conditions import groups
from fastweights.analysis.cost import cost
from fastweights.analysis.profile import profile
from fastweights.lab.bench.cases import RecurrenceCase
from fastweights.lab.bench.contenders import Inputs, Sizes
from fastweights.lab.bench.ops import errors_on
from fastweights.layers import HeadNorm, TokenContext, split_heads
from fastweights.methods import Auto, Recurrent, evaluate
from fastweights.mixer import Mixer
from fastweights.recurrence import (
    Amplified,
    Bonus,
    Decay,
    Delta,
    MatrixRule,
    Normalized,
    Recurrence,
    Signed,
)
from fastweights.recurrence.scales import Scales
from fastweights.recurrence.streams import heads_first
from tolerances import assert_close

KERNEL = "gated: decay's kernel"


@dataclass(frozen=True, eq=False)
class Gated(MatrixRule[Tensor]):
    """What is forgotten and what is written have a gate each.

    S_t = γ_t S_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t S_t
    """

    writes = ("beta",)

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        streams = (self.q, self.k, self.v, self.beta, self.log_decay)
        q, k, v, beta, log_decay = (heads_first(s, state.dtype) for s in streams)
        state = log_decay.exp() * state + k.mT * (beta * v)
        return (q @ state).transpose(1, 2).to(self.output), state

    def as_decay(self) -> Decay:
        return Decay(self.q, self.beta * self.k, self.v, self.log_decay)

    def chunk(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.as_decay().chunk(state)

    def attention_map(self) -> Tensor:
        return self.as_decay().attention_map()

    def ltv(self):
        return self.as_decay().ltv()

    def amplify(self, scales: Scales, log_decay: Tensor) -> tuple[Gated, Tensor]:
        return replace(self, beta=self.beta * scales.written, log_decay=log_decay), scales.after


class GatedAttention(Mixer):
    """
    f_q  x W_Q      f_α  σ(x W_γ), one per head
    f_k  x W_K      f_β  σ(x W_β), one per head
    f_v  x W_V      d_k = d_v = d
    """

    def __init__(self, d: int, heads: int = 2) -> None:
        super().__init__(d)
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.W_gamma, self.W_beta = nn.Linear(d, heads), nn.Linear(d, heads)
        self.norm = HeadNorm(d // heads, center=False, affine=True)

    def project(self, x: Tensor, past: TokenContext) -> tuple[Gated, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        gamma, beta = (W(x).sigmoid()[..., None] for W in (self.W_gamma, self.W_beta))
        return Gated(q, k, v, beta, gamma.log()), None


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


@pytest.fixture
def record() -> Gated:
    torch.manual_seed(0)
    streams = (positive(2, 37, 3, width) for width in (4, 4, 5, 1))
    return Gated(*streams, -positive(2, 37, 3, 1))


MASK = torch.arange(37) < torch.tensor([[37], [20]])
IDS = torch.arange(37)[None] // torch.tensor([[37], [13]])
GAIN = 9 * torch.linspace(-1, 1, 37, dtype=torch.float64)[None, :, None, None]
SIGN = torch.arange(37)[None, :, None, None] % 3 - 0.5

WRAPPED: dict[str, Callable[[MatrixRule[Tensor]], Recurrence]] = {
    "alone": lambda rule: rule,
    "padded": lambda rule: rule.keep(MASK),
    "packed": lambda rule: rule.segments(IDS),
    "normalised": Normalized,
    "amplified": lambda rule: Amplified(Normalized(rule), GAIN),
    "floored": lambda rule: Amplified(Normalized(rule, floor=1.0), GAIN),
    "signed": lambda rule: Signed(rule, SIGN),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_every_method_and_wrapper_takes_it(
    record: Gated, wrap: Callable[[MatrixRule[Tensor]], Recurrence]
) -> None:
    want, last = evaluate(wrap(record.as_decay()), method=Recurrent())
    for method in METHODS:
        o, state = evaluate(wrap(record), method=method)
        assert_close(o, want, f"o by {method}")
        for got, wanted in zip(
            state if isinstance(state, tuple) else (state,),
            last if isinstance(last, tuple) else (last,),
            strict=True,
        ):
            assert_close(got, wanted, f"the state by {method}")
    assert_close(wrap(record).attention_map(), wrap(record.as_decay()).attention_map(), "the map")
    rule = wrap(record)
    assert_close(rule.ltv().simulate(record.v)[0], evaluate(rule)[0], "the linear system")


def test_a_skip_is_of_the_sign_that_it_has() -> None:
    torch.manual_seed(0)
    q, k, v = (positive(1, 9, 2, 3) for _ in range(3))
    signed = Signed(Decay(q, k, v, None, positive(1, 9, 2, 1)), SIGN[:, :9])
    want, _ = evaluate(signed, method=Recurrent())
    for method in METHODS:
        assert_close(evaluate(signed, method=method)[0], want, str(method))
    assert_close(signed.ltv().simulate(v)[0], want, "the linear system")


@pytest.mark.usefixtures("unchecked")
def test_rules_that_a_wrapper_does_not_fit_are_named() -> None:
    x, beta = positive(1, 3, 1, 2), positive(1, 3, 1, 1)
    with pytest.raises(TypeError, match=r"Normalized\(Delta\)\): .* would erase as well as write"):
        Amplified(Normalized(Delta(x, x, x, beta)), beta)
    with pytest.raises(TypeError, match=r"Signed\(Bonus\): .* use Decay, Delta or Mesa"):
        Signed(Bonus(x, x, x, None, beta), beta)


def test_it_has_a_kernel_once_that_is_registered(record: Gated) -> None:
    def compute(rule: Gated, state: Tensor) -> tuple[Tensor, Tensor]:
        taken.append(rule)
        return kernels.run_fastest(rule.as_decay(), state)

    taken: list[Gated] = []
    assert kernels.select(record).name == "chunk loop (torch)"
    kernel = kernels.Kernel(KERNEL, Gated, compute, devices=("cpu",))
    kernels.register(kernel, before="step (torch)")
    assert kernels.select(record) is kernel
    assert f"{KERNEL}: taken" in kernels.explain(record).splitlines()
    assert "decay (compiled)" not in kernels.explain(record)
    assert KERNEL not in kernels.explain(record.as_decay())
    want, _ = evaluate(record, method=Recurrent())
    with kernels.only(KERNEL):
        assert_close(evaluate(record, method=Auto())[0], want, "o")
    evaluate(Normalized(record))
    assert len(taken) == 2
    with kernels.only("chunk loop (torch)"):
        evaluate(record)
    assert len(taken) == 2
    with pytest.raises(ValueError, match="already called"):
        kernels.register(replace(kernel, devices=()))
    with pytest.raises(LookupError, match="no kernel is called 'none'; there are"):
        kernels.register(replace(kernel, name="another"), before="none")


def test_it_can_be_profiled_and_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), GatedAttention(8))
    model.forward = lambda ids: model[1](model[0](ids))
    (layer,) = profile("mine", model, torch.arange(40)[None] % 11).layers
    assert layer.rule == "Gated"
    assert layer.memory is not None
    assert layer.solver is None
    assert groups(GatedAttention(8)) == {"Q", "K", "Λ_t"}
    found = cost(GatedAttention(8), context=100)
    assert found.state == 2 * 4 * 4
    assert found.decode == 2 * (4 * 8 * 8 + 2 * 8 * 2) + 5 * 2 * 4 * 4


def test_it_can_be_benchmarked() -> None:
    def draw(width: int) -> Callable[[Sizes, torch.Generator], Tensor]:
        return lambda sizes, generator: torch.rand(
            sizes.b, sizes.t, sizes.h, width, generator=generator
        )

    def make(x: Inputs) -> Gated:
        return Gated(x["q"], x["k"], x["v"], x["beta"], -x["log_decay"])

    widths = {"q": 8, "k": 8, "v": 6, "beta": 1, "log_decay": 1}
    draws = {name: draw(width) for name, width in widths.items()}
    case = RecurrenceCase("gated", draws, make, lambda sizes: 4.0 * sizes.k * sizes.v)
    inputs = case.inputs(Sizes(1, 50, 2, 8, 6), torch.float32, torch.device("cpu"))
    (ours,) = case.implementations(inputs)
    assert ours.name == "chunk loop (torch)"
    errors = errors_on(case, ours.load(), inputs)
    assert errors.output is not None
    assert errors.output < 1e-5
