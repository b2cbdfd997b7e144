"""Every mixer × every property."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from cases import each, normal, parts
from fastweights.layers.arguments import require_annotated
from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent
from fastweights.mixer import Mixer, MixerState
from fastweights.mixers import MIXERS, make, register
from fastweights.recurrence import ShapeError
from kinds import slow_but
from oracles import (
    attention,
    decays,
    deltas,
    forgetting,
    hyena,
    kalman,
    kimi,
    latent,
    layers,
    loglinear,
    mesanet,
    rwkv7,
    slots,
    state_space,
    ttt,
)
from tolerances import array, assert_close

pytestmark = pytest.mark.sampled

D = 16
METHODS = [Recurrent(), Chunkwise(4), Parallel(), Auto()]
slowly = [Auto(), *(pytest.param(m, marks=pytest.mark.slow) for m in (Recurrent(), Chunkwise(4)))]
each_method = pytest.mark.parametrize("method", slowly, ids=str)
"""Of padding and packing, which rules are held to by every method every time."""


@dataclass(frozen=True)
class Layer:
    """A mixer with arguments, and the oracle with the same ones."""

    name: str
    oracle: Callable[..., np.ndarray]
    arguments: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype = torch.float64) -> Mixer:
        """The mixer with every parameter moved off its start, so that none is idle."""
        torch.manual_seed(0)
        g = Generator().manual_seed(7)
        mixer = make(self.name, D, **self.arguments)
        with torch.no_grad():
            for parameter in mixer.parameters():
                drawn = 0.3 * normal(*parameter.shape, generator=g)
                parameter.copy_(drawn + (parameter.mean() if parameter.dim() == 1 else 0))
        return mixer.to(dtype)

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{name}={value}" for name, value in self.arguments.items())])


def layer(name: str, oracle: Callable[..., np.ndarray], **arguments: Any) -> Layer:
    told = {n: value for n, value in arguments.items() if n in inspect.signature(oracle).parameters}
    return Layer(name, oracle, arguments, told)


LAYERS = [
    layer("softmax", layers.softmax, heads=4),
    layer("softmax", layers.softmax, heads=4, kv_heads=2),
    layer("softmax", layers.softmax, heads=4, kv_heads=1, window=3),
    layer(
        "softmax",
        layers.softmax,
        heads=2,
        width=10,
        bias=True,
        rope={"base": 100.0, "fraction": 0.4},
    ),
    layer("softmax", layers.softmax, heads=2, qk_norm=1e-3, gated=True),
    layer("softmax", layers.softmax, heads=4, kv_heads=2, keys=8, qk_norm=1e-3),
    layer("olmo2", layers.olmo2, heads=4, kv_heads=2, eps=1e-2),
    layer("mla", latent.mla, heads=4, width=4, rope_dim=2),
    layer(
        *("mla", latent.mla),
        heads=2,
        rank=10,
        query_rank=7,
        width=5,
        rope_dim=4,
        value_width=6,
        gated=True,
        rope={"base": 100.0, "fraction": 0.5},
    ),
    layer("fox", forgetting.fox, heads=2, sinks=True, eps=1e-2),
    layer("fox", forgetting.fox, heads=4, window=3, qk_norm=False, gated=False),
    layer(
        *("fox", forgetting.fox), heads=2, qk_norm=False, shifted=False, normed=False, gated=False
    ),
    layer("lolcats", layers.lolcats, heads=4, kv_heads=2, window=3),
    layer("lolcats", layers.lolcats, heads=2, window=3, shared=False),
    layer("linear", attention.linear_attention, heads=2),
    layer("shortconv", attention.shortconv),
    layer("shortconv", attention.shortconv, conv=4, bias=True),
    layer("linear", attention.relu_attention, heads=4, feature_map="relu", keys=8),
    layer("swa", layers.softmax, heads=2, window=4),
    layer("performer", attention.performer, heads=2, features=20, seed=3),
    layer("rfa", attention.rfa, heads=2, features=24),
    layer("rfa", attention.rfa, heads=4, features=12, gated=True, seed=1),
    layer("cosformer", attention.cosformer, heads=2, length=32),
    layer("based", attention.based, heads=2, keys=3),
    layer("normalized", attention.normalized, heads=2),
    layer("normalized", attention.normalized, heads=4, eta="softplus", keys=8, bias=1.5),
    layer("normalized", attention.normalized, heads=2, eta="sigmoid"),
    layer("retnet", attention.retnet, heads=2),
    layer("retnet", attention.retnet, heads=4, expand_v=1.0),
    layer("retnet", attention.retnet, heads=2, center=False, affine=True, eps=1e-2),
    layer("transnormer", attention.transnormer, heads=2, depth=0.75),
    layer("transnormer", attention.transnormer, heads=2, feature_map="elu"),
    layer("hyena", hyena.hyena, heads=4, length=7, width=5, bands=2, frequency=3.0),
    layer("hyena", hyena.hyena, heads=16, length=5, width=2, bands=1, conv=2),
    layer("lightning", attention.lightning, heads=2),
    layer("lightning", attention.lightning, heads=4, width=6, depth=0.75, eps=1e-2),
    layer("gla", layers.gla, heads=2, tau=8.0, rank=3),
    layer("gsa", slots.gsa, heads=2, slots=5),
    layer("gsa", slots.gsa, heads=4, slots=3, kv_heads=2, tau=2.0, eps=1e-2),
    layer("raven", slots.raven, heads=2, slots=6, active=2),
    layer("raven", slots.raven, heads=4, slots=3, active=3, eps=1e-2),
    layer("gla", layers.gla, heads=4, center=False, eps=1e-2, keys=16),
    layer("hgrn", attention.hgrn),
    layer("hgrn", attention.hgrn, lower_bound=0.6, tied=False),
    layer("hgrn2", attention.hgrn2, heads=2),
    layer("hgrn2", attention.hgrn2, heads=4, lower_bound=0.9),
    layer("hgrn2", attention.hgrn2, heads=2, lower_bound=None, eps=1e-2),
    layer("metala", layers.metala, heads=2),
    layer("metala", layers.metala, heads=4, conv=1, keys=16),
    layer("metala", layers.metala, heads=2, augmented=False),
    layer("metala", layers.metala, heads=2, restore_key=True, conv=2, tau=4.0),
    layer("metala", layers.metala, heads=2, scaled=True),
    layer("mamba", layers.mamba, state=3, conv=3),
    layer("mamba", layers.mamba, state=2, expand=1, rank=5),
    layer("deltanet", attention.deltanet, heads=2),
    layer("deltanet", attention.deltanet, heads=4, conv=2, negative=True),
    layer("deltanet", attention.deltanet, heads=2, eps=1e-2, floor=1e-2),
    layer("dss", state_space.dss, state=3),
    layer("s4", state_space.s4, state=4),
    layer("s4d", state_space.s4d, state=4),
    layer("s4d", state_space.s4d, state=6, bilinear=True, inverse=True),
    layer("h3", state_space.h3, heads=4, state=4, shift=3),
    layer("h3", state_space.h3, heads=16, state=2, shift=2),
    layer("s5", state_space.s5, state=6),
    layer("s5", state_space.s5, state=2),
    layer("mamba2", state_space.mamba2, heads=4, state=3, conv=3),
    layer("mamba2", state_space.mamba2, heads=4, state=2, groups=2, expand=1, scaled=False),
    layer("mamba2", state_space.mamba2, heads=2, state=3, decays=False),
    layer("mamba2", state_space.mamba2, heads=2, state=3, eps=1e-2),
    layer("mamba3", decays.mamba3, heads=4, state=6),
    layer(
        "mamba3",
        decays.mamba3,
        heads=4,
        state=4,
        groups=2,
        expand=1,
        partial_rotation=False,
        eps=1e-2,
    ),
    layer("mamba3", decays.mamba3, heads=2, state=6, expand=1, rank=2),
    layer(
        "mamba3",
        decays.mamba3,
        heads=4,
        state=4,
        groups=2,
        partial_rotation=False,
        rank=3,
        eps=1e-2,
    ),
    layer("longhorn", decays.longhorn, state=3, conv=3),
    layer("longhorn", decays.longhorn, state=2, expand=1, rank=5),
    layer("rodimus", decays.rodimus, state=6),
    layer("rodimus", decays.rodimus, state=3, expand=1, conv=2, rank=5, eps=1e-2),
    layer("loglinear_mamba2", loglinear.loglinear_mamba2, heads=4, state=3, groups=2, levels=6),
    layer("loglinear_gdn", loglinear.loglinear_gdn, heads=2, levels=3, eps=1e-2),
    layer("lru", state_space.lru, state=5, r_min=0.2, r_max=0.8, max_phase=1.0),
    layer("lru", state_space.lru, state=1),
    layer("rglru", state_space.rglru, heads=2, expand=1.5, c=4.0),
    layer("rglru", state_space.rglru, heads=4, whole_start=True),
    layer("qlstm", state_space.qlstm),
    layer("qlstm", state_space.qlstm, reversed=True),
    layer("rwkv4", state_space.rwkv4),
    layer("rwkv4_channel", state_space.rwkv4_channel, width=24),
    layer("rwkv6", state_space.rwkv6, heads=2, rank=3, decay_rank=5),
    layer("rwkv6", state_space.rwkv6, heads=4, rank=2, decay_rank=3, expand_k=0.5, eps=1e-2),
    layer("rwkv7", rwkv7.rwkv7, heads=2, decay_rank=3, rate_rank=4, gate_rank=5),
    layer("rwkv7", rwkv7.rwkv7, heads=4, eps=1e-2, floor=1e-2),
    layer("rwkv7_channel", rwkv7.channel, width=24),
    layer("mlstm", state_space.mlstm, heads=2),
    layer("mlstm", state_space.mlstm, heads=2, conv=1, expand_k=0.5, bias=False, cap=0.5, eps=1e-2),
    layer("mlstm", state_space.mlstm, heads=1, conv=2, exponential_forget=True),
    layer("gated_deltanet", layers.gated_deltanet, heads=2),
    layer(
        *("gated_deltanet", layers.gated_deltanet),
        heads=2,
        value_heads=4,
        expand_v=1.0,
        negative=True,
        eps=1e-2,
        floor=1e-2,
    ),
    layer("kda", kimi.kda, heads=2),
    layer(
        *("kda", kimi.kda),
        heads=2,
        width=6,
        value_heads=4,
        conv=2,
        negative=True,
        lowest=2.0,
        low_rank=False,
        eps=1e-2,
    ),
    layer("gated_deltaproduct", deltas.gated_deltaproduct, heads=2),
    layer(
        *("gated_deltaproduct", deltas.gated_deltaproduct),
        heads=4,
        steps=3,
        expand_v=1.0,
        negative=False,
        eps=1e-2,
        floor=1e-2,
    ),
    layer("gdn2", deltas.gdn2, heads=2),
    layer("gdn2", deltas.gdn2, heads=4, expand_v=1.5, negative=True, eps=1e-2, floor=1e-2),
    layer("comba", deltas.comba, heads=2),
    layer("comba", deltas.comba, heads=4, expand_v=1.0, eps=1e-2, floor=1e-2),
    layer("comba", deltas.comba, heads=2, renormalized=True, floor=1e-2),
    layer("pgdn", deltas.pgdn, heads=2),
    layer("pgdn", deltas.pgdn, heads=4, negative=True, spread=2.0, eps=1e-2, floor=1e-2),
    layer("pkda", deltas.pkda, heads=2),
    layer("pkda", deltas.pkda, heads=4, expand_v=1.5, negative=True, spread=1.2, floor=1e-2),
    layer("mom", deltas.mom, heads=2),
    layer("mom", deltas.mom, heads=4, memories=6, active=3, expand_k=1.0, eps=1e-2, floor=1e-2),
    layer("mesa", layers.mesa, heads=2),
    layer("mesanet", mesanet.mamba2, heads=2, rule="mamba2"),
    layer("mesanet", mesanet.gla, heads=4, rule="gla"),
    layer("mesanet", mesanet.deltanet, heads=2, rule="deltanet"),
    layer("mesanet", mesanet.gated_deltanet, heads=4, rule="gated_deltanet"),
    layer("mesanet", mesanet.mlstm, heads=2, rule="mlstm"),
    layer("mesa", layers.mesa, heads=2, bound=1.0, eps=1e-2, floor=1e-2),
    layer("mesa_signed", layers.mesa_signed, heads=2),
    layer("kalmanet", kalman.kalmanet, heads=2),
    layer("ttt_linear", ttt.learner, heads=2, minibatch=4),
    layer(
        *("ttt_linear", ttt.learner),
        heads=4,
        minibatch=3,
        conv=0,
        gated=False,
        rate=0.5,
        eps=1e-2,
    ),
    layer("ttt_mlp", ttt.learner, heads=2, minibatch=4, rate=0.1, expand=2, eps=1e-3),
    layer("kalmanet", kalman.kalmanet, heads=4, ratio=0.5, steps=3, conv=2, eps=1e-2, floor=1e-2),
]
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
FIRST = {one.name: one for one in reversed(LAYERS)}.values()
each_mixer = pytest.mark.parametrize("layer", slow_but(LAYERS, FIRST), ids=str)
"""With its first arguments every time, and with all others as slow tests."""


def inputs(b: int = 2, t: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return normal(b, t, D, generator=Generator().manual_seed(seed)).to(dtype)


def tensors(state: MixerState) -> list[Tensor]:
    return [*parts(state.memory), *state.tails.values(), state.position]


def assert_same_state(got: MixerState, want: MixerState) -> None:
    for number, (a, b) in enumerate(zip(tensors(got), tensors(want), strict=True)):
        assert_close(a, b, f"state tensor {number}", torch.float64)


def gradients(mixer: Mixer, x: Tensor, method: Method, **given: Any) -> dict[str, Tensor]:
    """d (a fixed functional of y and the final state) / d (x, every parameter)."""
    leaves = {"x": x.clone().requires_grad_(), **dict(mixer.named_parameters())}
    y, state = mixer(leaves["x"], method=method, **given)
    loss = (y * normal(*y.shape, generator=Generator().manual_seed(1)).to(y.dtype)).sum()
    loss = loss + sum(s.real.sin().sum() for s in tensors(state) if s.dtype != torch.long)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_every_mixer_is_here() -> None:
    assert {one.name for one in LAYERS} == set(MIXERS)


@each_layer
def test_is_its_papers_layer(layer: Layer) -> None:
    for dtype, methods in ((torch.float64, METHODS), (torch.float32, [Auto()])):
        mixer, x = layer.build(dtype), inputs(dtype=dtype)
        named = {n: array(p) for n, p in mixer.state_dict().items()}
        want = layer.oracle(array(x), named, **layer.told)
        for method in methods:
            assert_close(mixer(x, method=method)[0], want, f"y by {method}")


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@each_layer
def test_gradients_agree(layer: Layer, dtype: torch.dtype) -> None:
    want = gradients(layer.build(dtype).double(), inputs(dtype=dtype).double(), Recurrent())
    for method in (Chunkwise(4), Auto()):
        for name, gradient in gradients(layer.build(dtype), inputs(dtype=dtype), method).items():
            assert_close(gradient, want[name], f"gradient of {name} by {method}", dtype)


@each_layer
def test_every_parameter_matters(layer: Layer) -> None:
    for name, gradient in gradients(layer.build(), inputs(), Auto()).items():
        assert gradient.norm() > 1e-6, name


@each_mixer
def test_any_cut_of_the_sequence(layer: Layer) -> None:
    mixer, x = layer.build(), inputs()
    whole, final = mixer(x)
    for cut in (0, 1, 5, 11):
        left, between = mixer(x[:, :cut])
        right, end = mixer(x[:, cut:], between)
        assert_close(torch.cat([left, right], 1), whole, "y")
        assert_same_state(end, final)


@each_layer
def test_token_by_token(layer: Layer) -> None:
    mixer, x = layer.build(), inputs()
    whole, final = mixer(x)
    state, outputs = None, []
    for t in range(x.shape[1]):
        y, state = mixer(x[:, t : t + 1], state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), whole, "y")
    assert state is not None
    assert_same_state(state, final)


def masks(b: int, t: int) -> Tensor:
    """Left padding, none, right padding, all, and at random."""
    at_random = torch.rand(b, t, generator=Generator().manual_seed(2)) < 0.5
    at_random[:4] = True
    at_random[0, :4] = False
    at_random[2, -3:] = False
    at_random[3] = False
    return at_random


@each_method
@each_mixer
def test_padding_is_as_if_absent(layer: Layer, method: Method) -> None:
    mixer, x, more = layer.build(), inputs(5), inputs(5, 3, seed=3)
    _, start = mixer(inputs(5, 4, seed=4))
    keep = masks(*x.shape[:2])
    y, state = mixer(x.masked_fill(~keep[..., None], torch.nan), start, keep=keep, method=method)
    assert torch.isfinite(y[keep]).all()
    continued, _ = mixer(more, state, method=method)
    for row in range(5):
        alone = slice(row, row + 1)
        want, end = mixer(
            x[alone, keep[row]], start.map(lambda s, one=alone: s[one]), method=method
        )
        assert_close(y[alone, keep[row]], want, "y")
        assert_close(continued[alone], mixer(more[alone], end, method=method)[0], "continuation")
        assert state.position[row] == end.position[0] == 4 + keep[row].sum()


@each_mixer
def test_gradients_under_padding_are_finite_and_reach_no_padding(layer: Layer) -> None:
    x, keep = inputs(5), masks(5, 11)
    want = gradients(layer.build(), x, Recurrent(), keep=keep)
    got = gradients(layer.build(), x, Auto(), keep=keep)
    for name, gradient in got.items():
        assert_close(gradient, want[name], f"gradient of {name}")
    assert (got["x"][~keep] == 0).all()


@each_method
@each_mixer
def test_packed_documents_do_not_see_each_other(layer: Layer, method: Method) -> None:
    mixer, x, more = layer.build(), inputs(1), inputs(1, 3, seed=3)
    _, start = mixer(inputs(1, 4, seed=4))
    ids = torch.tensor([[7, 7, 7, 2, 5, 5, 5, 5, 5, 7, 7]])
    y, state = mixer(x, start, segments=ids, method=method)
    end = None
    for first, last in pairwise([0, 3, 4, 9, 11]):
        want, end = mixer(x[:, first:last], start if first == 0 else None, method=method)
        assert_close(y[:, first:last], want, "y")
    assert_close(
        mixer(more, state, method=method)[0], mixer(more, end, method=method)[0], "continuation"
    )


@each_mixer
def test_padding_and_packing_together(layer: Layer) -> None:
    mixer, x, more = layer.build(), inputs(1), inputs(1, 3, seed=3)
    ids = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]])
    keep = torch.tensor([[False, True, True, False, True, False, True, True, False, True, False]])
    y, state = mixer(x, keep=keep, segments=ids)
    end = None
    for document in (1, 2, 3):
        chosen = keep & (ids == document)
        want, end = mixer(x[chosen][None])
        assert_close(y[chosen][None], want, "y")
    assert_close(mixer(more, state)[0], mixer(more, end)[0], "continuation")


@each_mixer
def test_state_of_some_of_the_sequences(layer: Layer) -> None:
    mixer, x, more = layer.build(), inputs(3), inputs(3, 2, seed=3)
    _, state = mixer(x)
    order = torch.tensor([2, 0])
    chosen, _ = mixer(more[order], state.map(lambda s: s[order]))
    assert_close(chosen, mixer(more, state)[0][order], "y")
    assert state.map(lambda s: s[order]).nbytes * 3 == state.nbytes * 2


@each_layer
def test_state_size_is_constant_where_the_papers_say_so(layer: Layer) -> None:
    mixer = layer.build()
    sizes = [mixer(inputs(t=t))[1].nbytes for t in (1, 8, 40)]
    if layer.name in ("softmax", "olmo2", "mla", "fox") and "window" not in layer.arguments:
        assert sizes[0] < sizes[1] < sizes[2]
    else:
        assert sizes[1] == sizes[2]


@each_layer
def test_float64_throughout(layer: Layer) -> None:
    y, state = layer.build()(inputs())
    assert {s.dtype for s in (y, *tensors(state))} <= {torch.float64, torch.complex128, torch.long}


@each_mixer
def test_bfloat16_runs_with_its_state_in_float32(layer: Layer) -> None:
    mixer, x = layer.build(torch.bfloat16), inputs(dtype=torch.bfloat16)
    want, _ = layer.build(torch.bfloat16).double()(x.double())
    for method in METHODS:
        y, state = mixer(x, method=method)
        assert y.dtype == torch.bfloat16
        assert_close(y, want, f"y by {method}")
        whole = layer.name in ("softmax", "swa", "olmo2", "mla", "hyena")
        cached = {torch.bfloat16} if whole or layer.name in ("fox", "lolcats") else set()
        summed = set() if whole else {torch.float32, torch.complex64}
        assert {s.dtype for s in parts(state.memory)} <= {*cached, *summed, torch.long}


@each_mixer
def test_autocast_runs(layer: Layer) -> None:
    mixer, x = layer.build(torch.float32), inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        after, _ = mixer(x, state)
    assert_close(y, mixer(x)[0], "y", torch.bfloat16)
    assert torch.isfinite(after).all()


@each_mixer
def test_saved_and_loaded(layer: Layer) -> None:
    mixer, file = layer.build(), BytesIO()
    torch.save(mixer.state_dict(), file)
    file.seek(0)
    other = make(layer.name, D, **layer.arguments).double()
    other.load_state_dict(torch.load(file))
    assert (other(inputs())[0] == mixer(inputs())[0]).all()


@each_layer
def test_every_parameter_is_initialised_by_reset_parameters(layer: Layer) -> None:
    mixer = make(layer.name, D, **layer.arguments)
    for parameter in mixer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in reversed(list(mixer.modules())):
        if any(True for _ in module.parameters(recurse=False)) or module is mixer:
            module.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in mixer.parameters())
    assert torch.isfinite(mixer(inputs(dtype=torch.float32))[0]).all()


def test_s4_starts_as_hippo() -> None:
    """HiPPO-LegS is lower triangular with -1 … -N on the diagonal."""
    mixer = make("s4", D, state=8).double()
    named = {name: array(p) for name, p in mixer.state_dict().items()}
    found = np.linalg.eigvals(state_space.low_rank_matrix(named))
    # float32 parameters of a matrix that is far from normal
    assert np.abs(np.sort_complex(found) - np.arange(-8, 0)).max() < 0.01


@each_layer
def test_empty_sequences(layer: Layer) -> None:
    y, state = layer.build()(inputs(t=0))
    assert y.shape == (2, 0, D)
    assert (state.position == 0).all()


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_default_arguments_suffice(name: str) -> None:
    y, _ = MIXERS[name](d=64)(torch.zeros(1, 3, 64))
    assert y.shape == (1, 3, 64)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_mixer_is_a_short_file(name: str) -> None:
    file = inspect.getfile(MIXERS[name])
    inhabitants = [mixer for mixer in MIXERS.values() if inspect.getfile(mixer) == file]
    # 86 lines of 120 columns, in lines of 100
    assert len(Path(file).read_text().splitlines()) <= 100 * len(inhabitants)
    assert len(inspect.signature(MIXERS[name]).parameters) <= 10
    assert "f_q" in (MIXERS[name].__doc__ or "")


@pytest.mark.usefixtures("unchecked")
@each_layer
def test_inputs_that_do_not_fit(layer: Layer) -> None:
    mixer, x = layer.build(), inputs()
    _, state = mixer(x)
    with pytest.raises(ShapeError, match=r"reads \[batch, time, 16\], got \[2, 11, 15\]"):
        mixer(x[..., :-1])
    with pytest.raises(ShapeError, match=r"keep has shape \[2, 10\]"):
        mixer(x, keep=torch.ones(2, 10, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"segments has shape \[1, 11\]"):
        mixer(x, segments=torch.zeros(1, 11, dtype=torch.long))
    with pytest.raises(ShapeError, match="the state is of 2 sequences, x of 3"):
        mixer(inputs(3), state)
    with pytest.raises(TypeError, match=r"has weights of torch.float64, x is torch.float32"):
        mixer(x.float())
    with pytest.raises(TypeError, match="state is a int; pass the MixerState"):
        mixer(x, 3)
    with pytest.raises(TypeError, match=r"method = 'parallel'; pass Auto\(\)"):
        mixer(x, method="parallel")
    with pytest.raises(ShapeError):
        mixer(
            x,
            state._replace(
                memory=each(state.memory, lambda s: s[:, :, :, :0] if s.dim() == 4 else s)
            ),
        )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("metala", {"heads": 3}, "d_k = 8 is not divisible by heads = 3; use 1, 2, 4, 8"),
        ("gla", {"heads": 0}, "is not divisible by heads = 0"),
        (
            "linear",
            {"heads": 4, "keys": 6},
            "d_k = 6 is not divisible by heads = 4; use 1, 2, 3, 6",
        ),
        ("normalized", {"keys": 7}, "d_k = 7 is not divisible by heads = 4; use 1, 7"),
        ("softmax", {"keys": 6}, "d_k = 6 is not divisible by heads = 4; use 1, 2, 3, 6"),
        ("linear", {"heads": 5}, "d = 16 is not divisible by heads = 5; use 1, 2, 4, 8, 16"),
        ("softmax", {"heads": 4, "kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ("softmax", {"heads": 16}, "must be even"),
        ("lolcats", {"heads": 4, "kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ("mesa", {"steps": -1}, "not be negative"),
        ("mom", {"memories": 2, "active": 3}, "active = 3 of memories = 2; use at most as many"),
        ("retnet", {"heads": 16}, "must be even"),
        ("linear", {"feature_map": "tanh"}, "feature_map = 'tanh'; use elu, relu"),
        ("normalized", {"eta": "sum"}, "eta = 'sum'; use exp, sigmoid, softplus"),
        ("gsa", {"heads": 4, "kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ("raven", {"slots": 4, "active": 5}, "active = 5 is more than slots = 4"),
        ("hgrn", {"lower_bound": 1.0}, r"lower_bound = 1.0; it must lie in \[0, 1\)"),
        ("lightning", {"depth": 1.0}, "depth = 1.0; it must lie in"),
        ("transnormer", {"depth": -0.5}, "depth = -0.5; it must lie in"),
        ("mamba", {"heads": 2}, "mamba does not take heads; it takes d, state, expand, conv"),
        ("mamba2", {"groups": 3}, "heads = 4 is not divisible by heads = 3"),
        ("mamba2", {"scaled": False, "decays": False}, "no use for Δ"),
        ("s4", {"state": 3}, "use an even number"),
        ("s4d", {"state": 3}, "use an even number"),
        ("lru", {"r_max": 1.0}, "use 0 ≤ r_min < r_max < 1"),
        ("mambo", {}, "unknown mixer 'mambo'; there are"),
        (
            "metala",
            {"heads": "two"},
            "heads = 'two'; for metala it must be a whole number",
        ),
        ("metala", {"heads": True}, "heads = True; for metala it must be a whole number"),
        ("metala", {"tau": float("nan")}, "tau = nan; for metala it must be above 0 and finite"),
        ("softmax", {"window": 1.5}, "window = 1.5; for softmax it must be 1 or .*, or None"),
        ("softmax", {"window": 0}, "window = 0; for softmax it must be 1 or more"),
        ("swa", {"window": None}, "window = None; for swa it must be 1 or more"),
        ("gla", {"eps": 0.0}, "eps = 0.0; for gla it must be above 0 and finite"),
        ("mamba", {"conv": 0}, "conv = 0; for mamba it must be 1 or more"),
        ("mlstm", {"cap": 0.0}, "cap = 0.0; for mlstm it must be above 0 and finite, or None"),
        ("mesa", {"bound": 2.0}, "bound = 2.0; for mesa it must be above 0 and at most 1"),
        ("pkda", {"spread": 0.5}, "spread = 0.5; for pkda it must be finite, at least 1"),
        ("metala", {"conv": -1}, "conv = -1; for metala it must be 0 or more"),
        ("deltanet", {"floor": -1.0}, "floor = -1.0; for deltanet it must be 0 or more"),
        ("based", {"keys": "many"}, "keys = 'many'; for based it must be 1 or more"),
        ("hgrn", {"tied": 1}, "tied = 1; for hgrn it must be True or False"),
        ("linear", {"feature_map": 3}, "feature_map = 3; for linear it must be a text"),
        ("rfa", {"heads": -1, "gated": True}, "d = 16 is not divisible by heads = -1"),
        ("softmax", {"heads": 0, "width": 6}, "heads = 0; for softmax it must be 1 or more"),
        ("softmax", {"width": -1}, "width = -1; for softmax it must be 1 or more"),
        ("softmax", {"qk_norm": -1.0}, "qk_norm = -1.0; for softmax it must be 0 or more"),
        ("rwkv4_channel", {"width": -1}, "width = -1; for rwkv4_channel it must be 1 or more"),
        ("rglru", {"expand": 1e-6}, "expand · d = 0; there must be at least one channel"),
        ("mlstm", {"expand_k": 1e-6}, "d_k = 0; there must be at least one channel"),
    ],
)
def test_arguments_that_do_not_fit(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, D, **arguments)


@pytest.mark.parametrize("name", MIXERS)
def test_defaults_are_of_the_types_that_they_are_said_to_be(name: str) -> None:
    mixer = MIXERS[name]
    taken = inspect.signature(mixer).parameters.values()
    defaults = {p.name: p.default for p in taken if p.default is not p.empty}
    require_annotated(name, mixer.__init__, defaults)
    numbers = [key for key, value in defaults.items() if type(value) in (int, float)]
    for key in numbers:
        with pytest.raises(ValueError, match=f"{key} = 'many'; for {name} it must be "):
            require_annotated(name, mixer.__init__, {key: "many"})


@pytest.mark.usefixtures("unchecked")
def test_names_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mixer in MIXERS.items():
        monkeypatch.setitem(MIXERS, name, mixer)
    register("metala", MIXERS["metala"])
    with pytest.raises(ValueError, match="already means MetaLA"):
        register("metala", MIXERS["gla"])
    for other in (torch.nn.Linear, int, MIXERS["gla"](D), "gla"):
        with pytest.raises(TypeError, match="is not a Mixer"):
            register("another", other)
    for name in ("", " ", None):
        with pytest.raises(ValueError, match="a mixer cannot be called"):
            register(name, MIXERS["gla"])
