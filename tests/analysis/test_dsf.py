"""Every mixer as a linear time-varying system, in every form and by every algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import oracles.dsf
from cases import CASES, LINEAR, Case, Shape, normal
from fastweights.analysis import dsf
from fastweights.analysis.algorithms import (
    ALGORITHMS,
    Algorithm,
    ChunkwiseParallel,
    FourierConvolution,
    algorithm_support,
)
from fastweights.analysis.capture import capture_projections
from fastweights.methods import Recurrent
from fastweights.mixer import Mixer
from fastweights.mixers import MIXERS, make
from fastweights.recurrence import (
    LTV,
    Decay,
    DelayedTransition,
    Delta,
    DenseLTV,
    DiagonalTransition,
    ErasingTransition,
    NoFiniteFormError,
    ShiftRegister,
    Substeps,
)
from fastweights.recurrence.ltv import kron
from tiny import tiny, tokens
from tolerances import array, assert_close

D, T = 16, 6
WITHOUT_LTV = {
    *("softmax", "swa", "olmo2", "mla", "fox", "loglinear_mamba2", "loglinear_gdn"),
    *("ttt_linear", "ttt_mlp"),
}
SIZES: dict[str, dict[str, Any]] = {
    "based": {"keys": 2},
    "dss": {"state": 4},
    "h3": {"heads": 8, "state": 4},
    "hyena": {"length": 4},
    "lolcats": {"window": 2},
    "lru": {"state": 8},
    "mamba": {"state": 3},
    "mamba2": {"state": 3},
    "performer": {"features": 5},
    "rfa": {"features": 6},
    "s4": {"state": 4},
    "s4d": {"state": 4},
    "s5": {"state": 8},
}
CONSTANT = {"dss", "lru", "s4", "s4d", "s5"}
VARYING = MIXERS.keys() - CONSTANT
WITH_LTV = sorted(MIXERS.keys() - WITHOUT_LTV)
each_mixer = pytest.mark.parametrize("name", WITH_LTV)
each_linear = pytest.mark.parametrize("case", LINEAR, ids=str)
each_system = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.startswith(("softmax", "loglinear", "ttt"))], ids=str
)
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)


def moved(name: str, **arguments: Any) -> Mixer:
    """The mixer in float64 with its parameters off their start."""
    torch.manual_seed(0)
    mixer, g = make(name, D, **SIZES.get(name, {}) | arguments), Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * normal(*parameter.shape, generator=g))
    return mixer.double()


def inputs(t: int = T, d: int = D) -> Tensor:
    return normal(2, t, d, generator=Generator().manual_seed(3))


def all_heads(values: Tensor, system: LTV) -> Tensor:
    return values.to(system.B.dtype).expand(*system.B.shape[:3], -1)


@pytest.mark.parametrize("name", sorted(WITHOUT_LTV))
def test_softmax_is_no_finite_system(name: str) -> None:
    with pytest.raises(NoFiniteFormError):
        moved(name).project_all(inputs()).recurrence.ltv()


@pytest.mark.sampled
@each_mixer
def test_the_layer_is_its_system_read_by_the_mixer(name: str) -> None:
    mixer, x = moved(name), inputs(t=21)
    driven = mixer.project_all(x)
    system = driven.recurrence.ltv()
    y = system.simulate(all_heads(driven.recurrence.streams["v"], system))[0]
    y = y.to(driven.recurrence.output)
    if isinstance(driven.recurrence, Substeps):
        # its system is that of the steps, of which each token's last is read
        y, _ = driven.recurrence.read_tokens((y, None))
    assert_close(mixer.read(y, driven.gate, driven.unmasked), mixer(x, method=Recurrent())[0], "y")


@pytest.mark.sampled
@each_algorithm
@each_mixer
def test_algorithms_agree_or_refuse(name: str, algorithm: Algorithm) -> None:
    record = moved(name).project_all(inputs(t=21)).recurrence
    system = record.ltv()
    u = all_heads(record.streams["v"], system)
    if algorithm.refuses(system) is None:
        assert_close(algorithm.compute(system, u), system.simulate(u)[0], "y")
    else:
        assert algorithm in (ChunkwiseParallel(), FourierConvolution())
        negative = (
            isinstance(system.A, DiagonalTransition | ErasingTransition)
            and (system.A.decay.real < 0).any()
        )
        assert (
            name in VARYING
            if algorithm == FourierConvolution()
            else negative or isinstance(system.A, DelayedTransition | ShiftRegister)
        )


@pytest.mark.sampled
@each_algorithm
@pytest.mark.parametrize("t", [1, 2, 13])
@each_linear
def test_algorithms_agree_on_every_rule(case: Case, algorithm: Algorithm, t: int) -> None:
    streams = case.streams(Shape(t=t, k=2, v=3))
    system, u = case.rule(**streams).ltv(), streams["v"]
    if algorithm.refuses(system) is None:
        assert_close(algorithm.compute(system, all_heads(u, system)), system.simulate(u)[0], "y")


@pytest.mark.sampled
@each_mixer
def test_kronecker_forms_agree(name: str) -> None:
    """DSF's matrices of N = n·d, per head and joined, as a recurrence and as the kernel of
    blocks.
    """
    record = moved(name).project_all(inputs(t=3)).recurrence
    system = record.ltv()
    u = all_heads(record.streams["v"], system)
    want, dense = system.simulate(u)[0], system.dense(u.shape[-1])
    assert_close(dense.simulate(u), want, "dense")
    whole = dense.join_heads()
    assert whole.A.shape[2] == 1
    assert_close(whole.simulate(u.flatten(2)[:, :, None]).view_as(want), want, "joined")
    phi = dense.kernel()
    assert_close(torch.einsum("bhtsij,bshj->bthi", phi, u), want, "kernel")


@each_mixer
def test_dense_transitions_have_the_systems_eigenvalues(name: str) -> None:
    system = moved(name).project_all(inputs()).recurrence.ltv()
    got = system.eigenvalues().abs()
    got = F.pad(got, (0, system.A.width - got.shape[-1])).sort(-1).values
    want = torch.linalg.eigvals(system.A.dense().expand(*system.B.shape, -1)).abs().sort(-1).values
    assert_close(got, want, "eigenvalues")


@pytest.mark.sampled
@pytest.mark.parametrize("masked", [False, True])
@each_system
def test_transitions_do_what_their_matrices_do(case: Case, masked: bool) -> None:
    record = case.rule(**case.streams(Shape(t=5)))
    if masked:
        record = record.keep(torch.tensor([[True, True, False, True, True]]).expand(2, -1))
        record = record.segments(torch.tensor([[0, 0, 0, 1, 1]]).expand(2, -1))
    A = record.ltv().A
    states = normal(2, 5, 2, A.width, 2, generator=Generator().manual_seed(1)).to(A.dense().dtype)
    matrices = A.dense().expand(2, 5, 2, -1, -1)
    assert_close(A.apply(states), matrices @ states, "apply")
    assert_close(A.apply_adjoint(states), matrices.mH @ states, "adjoint")
    assert_close(A.after(A).dense().expand_as(matrices), matrices @ matrices, "product")
    assert_close(A[2:4].dense(), matrices[:, 2:4], "span")
    assert_close(A.heads([1]).dense(), matrices[:, :, [1]], "heads")
    assert_close(A.extend(2).dense(), F.pad(matrices, (0, 2, 0, 2)), "extended")


def test_negative_decays_of_an_erasing_transition() -> None:
    streams = {c.name: c for c in LINEAR}["delta-vector"].streams()
    A = Delta(**streams).ltv().A
    flipped = replace(A, decay=-A.decay)
    got, want = (torch.linalg.eigvals(-A.dense()).real, flipped.eigenvalues().real)
    assert_close(got.sort(-1).values, want.sort(-1).values, "eigenvalues")
    system = replace(Delta(**streams).ltv(), A=flipped)
    assert "negative" in str(ChunkwiseParallel().refuses(system))


@pytest.mark.parametrize("name", ["dplr-vector", "dplr-one-key", "dplr-before"])
def test_rank_one_transitions_run_in_chunks(name: str) -> None:
    case = next(c for c in LINEAR if c.name == name)
    streams = case.streams()
    system = case.rule(**streams).ltv()
    assert ChunkwiseParallel().refuses(system) is None
    y = ChunkwiseParallel(7).compute(system, streams["v"])
    assert_close(y, system.simulate(streams["v"])[0], "y")


def test_convolution_takes_what_is_constant_in_time() -> None:
    g = Generator().manual_seed(0)
    one = [normal(1, 1, 2, 3, generator=g) for _ in range(3)]
    q, k, log_decay = one[0], one[1], -one[2].exp()
    v = normal(2, 17, 2, 4, generator=g)
    system = Decay(q, k, v, log_decay, skip=v[:1, :1, :1, :1]).ltv()
    assert FourierConvolution().refuses(system) is None
    assert_close(FourierConvolution().compute(system, v), system.simulate(v)[0], "y")
    moving = Decay(q, k, v, log_decay * v[..., :1].sigmoid()).ltv()
    assert "A change over time" in str(FourierConvolution().refuses(moving))


def test_structure_decides_which_algorithms_run() -> None:
    streams = {c.name: c for c in LINEAR}["delta-scalar"].streams()
    verdicts = {a.algorithm.name: a for a in algorithm_support(Delta(**streams).ltv())}
    assert verdicts["convolution (FFT)"].refusal is not None
    assert verdicts["chunkwise parallel"].refusal is None
    assert "fill up" in verdicts["associative scan"].cost
    system = Delta(**streams).ltv()
    assert "not β k" in str(ChunkwiseParallel().refuses(replace(system, B=2 * system.B)))
    negative = LTV(
        DiagonalTransition(-torch.ones(1, 4, 1, 2), 2),
        torch.ones(1, 4, 1, 2),
        torch.ones(1, 4, 1, 2),
    )
    assert "negative" in str(ChunkwiseParallel().refuses(negative))


# The papers' own formulas.


def agree(system: DenseLTV, u: Tensor, want: Tensor | np.ndarray) -> None:
    """The dense system maps u to `want`, by its recurrence and by its kernel."""
    assert_close(system.simulate(u[:, :, None])[:, :, 0], want, "recurrence")
    assert_close(torch.einsum("btsij,bsj->bti", system.kernel()[:, 0], u), want, "kernel")


def matrices(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = Generator().manual_seed(11)
    return [0.5 * normal(*shape, generator=g) for shape in shapes]


def as_dense(mixer: Mixer, u: Tensor, values: int) -> DenseLTV:
    """The mixer's system as one of column vectors u, with heads of so many values joined."""
    system = mixer.project_all(u).recurrence.ltv()
    return system.dense(values).join_heads().compose_input(mixer.W_v.weight.detach())


@pytest.mark.parametrize("heads", [1, 4], ids=["15 and 16", "28"])
def test_equations_15_16_and_28_are_the_linear_transformer(heads: int) -> None:
    mixer, u = moved("linear", heads=heads), inputs()
    weights = [W.weight.detach().chunk(heads) for W in (mixer.W_q, mixer.W_k, mixer.W_v)]
    systems = [dsf.linear_attention(u, *own) for own in zip(*weights, strict=True)]
    joined, ours = dsf.multi_head(systems), as_dense(mixer, u, D // heads)
    assert joined.A.shape[-1] == D * D // heads
    assert_close(joined.kernel(), ours.kernel(), "Φ")
    for system, own in zip(systems, zip(*weights, strict=True), strict=True):
        agree(system, u, oracles.dsf.linear_attention(*map(array, (u, *own))))


@pytest.mark.parametrize(
    "normaliser",
    [dsf.exponential_normaliser, dsf.softplus_normaliser, dsf.sigmoid_normaliser],
    ids=["22", "29", "30"],
)
def test_equations_17_and_22_divide_by_a_learnt_normaliser(normaliser: Any) -> None:
    u = inputs(d=4)
    W_Q, W_K, W_V, W_eta = matrices((3, 4), (3, 4), (4, 4), (4,))
    eta = normaliser(u, W_eta)
    system = dsf.general_linear_attention(u, W_Q, W_K, W_V, eta)
    record = Decay(*((u @ W.mT)[:, :, None] for W in (W_Q, W_K, W_V)), None)
    ours = replace(record, q=record.q / eta[..., None, None]).ltv().dense(4).compose_input(W_V)
    assert_close(system.kernel(), ours.kernel(), "Φ")
    agree(system, u, oracles.dsf.normalized_attention(*map(array, (u, W_Q, W_K, W_V, eta))))


def test_equation_22_is_normalized_attention() -> None:
    mixer, u = moved("normalized", heads=1), inputs()
    weights = [W.weight.detach() for W in (mixer.W_q, mixer.W_k, mixer.W_v)]
    eta = dsf.exponential_normaliser(u, mixer.W_eta.weight.detach()[0])
    system = dsf.general_linear_attention(u, *weights, eta=eta)
    assert_close(system.kernel(), as_dense(mixer, u, D).kernel(), "Φ")


def test_equation_18_approaches_softmax_attention() -> None:
    u = inputs(d=3)
    weights = [W / 2 for W in matrices((3, 3), (3, 3), (3, 3))]
    want = oracles.dsf.softmax_attention(*map(array, (u, *weights)))
    errors = [
        np.abs(
            array(dsf.softmax_attention(u, *weights, order=order).simulate(u[:, :, None])[:, :, 0])
            - want
        ).max()
        for order in (0, 2, 4)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


def test_taylor_features_are_the_truncated_exponential() -> None:
    q, k = normal(2, 3, generator=Generator().manual_seed(0))
    product, features = q @ k, [dsf.taylor_features(x, 4) for x in (q, k)]
    assert features[0].shape == (1 + 3 + 9 + 27 + 81,)
    want = 1 + product + product**2 / 2 + product**3 / 6 + product**4 / 24
    assert_close(features[0] @ features[1], array(want), "φ(q)ᵀφ(k)")


def test_equation_19_is_mamba() -> None:
    mixer, x = moved("mamba", state=3), inputs()
    driven = mixer.project_all(x)
    inner = driven.gate.chunk(2, -1)[1].detach()
    delta = F.softplus(mixer.W_Delta_2(mixer.W_Delta_1(inner))).detach()
    A, W_B, W_C, skip = (
        p.detach() for p in (mixer.log_A.exp(), mixer.W_B.weight, mixer.W_C.weight, mixer.D)
    )
    system = dsf.s6(inner, delta, A, W_B, W_C, skip)
    ours = driven.recurrence.ltv().dense(1).join_heads()
    assert_close(system.A, ours.A, "Λ")
    assert_close(system.C, ours.C, "C")
    assert_close(system.B, ours.B * delta[:, :, None, None], "B")
    agree(system, inner, oracles.dsf.s6(*map(array, (inner, delta, A, W_B, W_C, skip))))


def test_equation_20_is_the_qlstm() -> None:
    u = inputs(d=4)
    W_f, W_i, W_o, W_u = matrices((4, 4), (4, 4), (4, 4), (4, 4))
    f, i, o = ((u @ W.mT).sigmoid() for W in (W_f, W_i, W_o))
    system = dsf.qlstm(u, f, i, o, W_u)
    agree(system, u, oracles.dsf.qlstm(*map(array, (u, W_f, W_i, W_o, W_u))))


@pytest.mark.parametrize("reversed_sigmoid", [False, True], ids=["20", "23"])
def test_equations_20_and_23_are_the_qlstm_of_this_library(reversed_sigmoid: bool) -> None:
    mixer, u = moved("qlstm", reversed=reversed_sigmoid), inputs()
    f = mixer.W_f(u).detach()
    f = dsf.reverse_sigmoid(f, mixer.a.detach()) if reversed_sigmoid else f.sigmoid()
    i, o = (W(u).sigmoid().detach() for W in (mixer.W_i, mixer.W_q))
    system = dsf.qlstm(u, f, i, o, mixer.W_v.weight.detach())
    ours = as_dense(mixer, u, 1)
    for name in ("A", "B", "C", "D"):
        assert_close(getattr(system, name), getattr(ours, name), name)


def test_equation_21_is_the_rg_lru() -> None:
    u = inputs(d=4)
    W_R, W_B, A = matrices((4, 4), (4, 4), (4,))
    system = dsf.rg_lru((u @ W_R.mT).sigmoid(), (u @ W_B.mT).sigmoid(), A)
    agree(system, u, oracles.dsf.rg_lru(*map(array, (u, W_R, W_B, A))))


def test_equation_21_is_the_rg_lru_of_this_library() -> None:
    mixer, x = moved("rglru", conv=1), inputs()
    inner = (x @ mixer.W_u.weight.T + mixer.W_u.bias) * mixer.conv.weight[0] + mixer.conv_bias
    heads = inner.unflatten(-1, (mixer.heads, -1))
    r, i = (
        (torch.einsum("bthi,hij->bthj", heads, weight).flatten(2) + bias).sigmoid()
        for weight, bias in ((mixer.W_a, mixer.b_a), (mixer.W_x, mixer.b_x))
    )
    system = dsf.rg_lru(r, i, -mixer.Lambda)
    ours = mixer.project_all(x).recurrence.ltv().dense(1).join_heads()
    assert_close(system.A, ours.A, "Λ")
    assert_close(system.B, ours.B * i[:, :, None, None], "B")
    assert_close(system.C, ours.C, "C")


def test_equation_23_reverses_the_sigmoid() -> None:
    x = inputs()[0]
    assert_close(dsf.reverse_sigmoid(x, 0.7), (1 / (1 + np.exp(array(x)))) ** 0.7, "σ(-x)^a")


def test_kronecker_product() -> None:
    a, b = matrices((2, 3), (4, 5))
    assert_close(kron(a, b), np.kron(array(a), array(b)), "a ⊗ b")


# What a model evaluates.


def test_capture_records_every_mixer_as_it_ran() -> None:
    model, ids = tiny("hybrid"), tokens(2, 9)
    seen = []
    hooks = [
        block.mixer.register_forward_hook(
            lambda mixer, args, kwargs, out: seen.append((args[0], out[0])), with_kwargs=True
        )
        for block in model.model.layers
    ]
    with capture_projections(model) as found, torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    assert list(found) == [f"model.layers.{i}.mixer" for i in range(len(model.model.layers))]
    for (x, y), (path, driven) in zip(seen, found.items(), strict=True):
        mixer = model.get_submodule(path)
        assert_close(
            mixer.project_all(x).recurrence.streams["q"], driven.recurrence.streams["q"], "q"
        )
        assert y.shape == x.shape
    with torch.no_grad():
        model(ids[:, :4])
    assert {len(driven.recurrence) for driven in found.values()} == {9}


def test_capture_sees_padding_and_continued_sequences() -> None:
    model, ids = tiny("metala"), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with capture_projections(model) as padded, torch.no_grad():
        model(ids, attention_mask=mask)
    first = next(iter(padded.values())).recurrence
    assert (first.streams["log_decay"][0, :3] == 0).all()
    with capture_projections(model) as whole, torch.no_grad():
        model(ids)
    with capture_projections(model) as rest, torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        model(ids[:, 5:], past_key_values=cache)
    for one, two in zip(whole.values(), rest.values(), strict=True):
        assert_close(two.recurrence.streams["q"], one.recurrence[5:].streams["q"], "q")
