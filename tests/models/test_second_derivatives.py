"""Gradients of gradients, and torch's transforms, of a model of every mixer: as differences of
first gradients have them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

from families import student
from fastweights import MIXERS, FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM
from fastweights.engines.transformers import patch_transformers
from fastweights.lab.check import LAWS, Verdict, check_model
from fastweights.linearize import LinearAttentionConfig
from kinds import form_of, one_of_each
from transformers_families import build_family, present_families

# torch makes its forward-mode decompositions with what it deprecates
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
(LAW,) = [law for law in LAWS if law.name == "second derivatives"]
NEAR = 1e-3
"""Of differences in float64, where solvers end at rounding; `LAW` allows more."""
STRICT = 1e-4
"""Of two ways to the same derivative."""
APPROXIMATE = ("kalmanet",)
"""Their solver ends before: the derivatives are those of what it tends to."""
Tensors = dict[str, Tensor]


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 1}
    return FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixers=[{"name": name}])).to(dtype)


def parameters_of(model: Any) -> Tensors:
    return {name: p.detach() for name, p in model.named_parameters()}


def direction_of(parameters: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator).to(p) for n, p in parameters.items()}


def loss_of(model: Any, parameters: Tensors, ids: Tensor = IDS) -> Tensor:
    return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids}).loss


def by_name(named: Tensors, found: tuple[Tensor | None, ...]) -> Tensors:
    pairs = zip(named.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def gradients_of(model: Any, **options: Any) -> Tensors:
    named = dict(model.named_parameters())
    loss = model(IDS, labels=IDS).loss
    found = torch.autograd.grad(loss, [*named.values()], allow_unused=True, **options)
    return by_name(named, found)


def product_of(model: Any) -> Tensors:
    """The Hessian times a direction, by two ordinary backwards."""
    named = dict(model.named_parameters())
    slopes, v = gradients_of(model, create_graph=True), direction_of(named)
    along = torch.stack([(slopes[name] * v[name]).sum() for name in v]).sum()
    return by_name(named, torch.autograd.grad(along, [*named.values()], allow_unused=True))


@cache
def exact_product(name: str) -> Tensors:
    return product_of(model_of(name).eval())


def relative(found: Tensors, wanted: Tensors) -> float:
    a, b = (torch.cat([t.double().flatten() for t in side.values()]) for side in (found, wanted))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_second_derivatives_are_those_of_differences(name: str) -> None:
    (found,) = check_model(model_of(name), laws=[LAW], longest=9)
    assert found.verdict is Verdict.HOLDS, found.reason
    assert found.difference < (LAW.allowed if name in APPROXIMATE else NEAR)


@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_kernels_of_float32_have_them(name: str) -> None:
    assert relative(product_of(model_of(name, torch.float32).eval()), exact_product(name)) < 1e-2


def forward_over_reverse(model: Any, p: Tensors, v: Tensors) -> Tensors:
    return jvp(grad(lambda p: loss_of(model, p)), (p,), (v,))[1]


def reverse_over_reverse(model: Any, p: Tensors, v: Tensors) -> Tensors:
    def along(p: Tensors) -> Tensor:
        slopes = grad(lambda p: loss_of(model, p))(p)
        return torch.stack([(slopes[n] * v[n]).sum() for n in v]).sum()

    return grad(along)(p)


def reverse_over_forward(model: Any, p: Tensors, v: Tensors) -> Tensors:
    return grad(lambda p: jvp(lambda p: loss_of(model, p), (p,), (v,))[1])(p)


TWICE = (forward_over_reverse, reverse_over_reverse, reverse_over_forward)


@pytest.mark.parametrize("name", one_of_each(MIXERS, form_of))
@pytest.mark.parametrize("way", TWICE, ids=lambda way: way.__name__)
def test_torch_func_differentiates_twice(name: str, way: Callable[..., Tensors]) -> None:
    model = model_of(name).eval()
    p = parameters_of(model)
    near = LAW.allowed if name in APPROXIMATE else STRICT
    assert relative(way(model, p, direction_of(p)), exact_product(name)) < near


@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_torch_func_differentiates_once(name: str) -> None:
    model = model_of(name).eval()
    p, wanted = parameters_of(model), gradients_of(model)
    v = direction_of(p)
    assert relative(grad(lambda p: loss_of(model, p))(p), wanted) < 1e-9
    rows = vmap(grad(lambda p, row: loss_of(model, p, row)), in_dims=(None, 0))(p, IDS[:, None])
    assert relative({n: r.mean(0) for n, r in rows.items()}, wanted) < 1e-9
    along = sum((wanted[n] * v[n]).sum() for n in v)
    with forward_ad.dual_level():
        dual = {n: forward_ad.make_dual(p[n], v[n]) for n in v}
        tangent = forward_ad.unpack_dual(loss_of(model, dual)).tangent
    assert float((tangent - along).abs() / along.abs()) < 1e-9


def learn_in_pieces(model: Any) -> tuple[Tensors, list[Tensor]]:
    model.zero_grad()
    cache, losses = FastWeightsCache(), []
    for piece in IDS.split(4, 1):
        read = model(piece, labels=piece, past_key_values=cache, use_cache=True)
        losses.append(read.loss)
    torch.stack(losses).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients, [state.position for state in cache.states]


def checkpoint_blocks(model: Any, reentrant: bool) -> None:
    """transformers 5.23 renames it."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


@pytest.mark.parametrize("name", one_of_each(MIXERS, form_of))
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointed_blocks_hand_gradients_of_states_on(name: str, reentrant: bool) -> None:
    model = model_of(name).train()
    wanted, positions = learn_in_pieces(model)
    checkpoint_blocks(model, reentrant)
    found, again = learn_in_pieces(model)
    assert relative(found, wanted) < 1e-9
    assert all(map(torch.equal, positions, again))


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_are_differentiated_twice_or_refuse() -> None:
    model = model_of("gla").train()
    checkpoint_blocks(model, False)
    assert relative(product_of(model), exact_product("gla")) < 1e-9
    checkpoint_blocks(model, True)
    with pytest.raises(NotImplementedError, match="no gradients of gradients; enable it by"):
        model(IDS, labels=IDS).loss.backward(create_graph=True)


SLOW = pytest.mark.slow
ANALOGS = {
    "lolcats": LinearAttentionConfig(window=4),
    "landmarks": LinearAttentionConfig("landmarks", 8, 4),
    "gla-sinks": LinearAttentionConfig(rule="gla", window=3, sinks=2),
    "kda": LinearAttentionConfig(rule="kda", window=4),
}
ROUNDED = 1e-5
"""Of derivatives of transformers' models, whose norms compute in float32."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lolcats" else SLOW) for name in ANALOGS]
)
def test_linearized_models_are_differentiated_twice(name: str) -> None:
    model = student(analog=ANALOGS[name]).double().requires_grad_(True)
    (found,) = check_model(model, laws=[LAW], longest=9)
    assert found.verdict is Verdict.HOLDS, found.reason
    p, wanted = parameters_of(model), product_of(model)
    for way in TWICE:
        assert relative(way(model, p, direction_of(p)), wanted) < ROUNDED


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "mamba2" else SLOW) for f in present_families()],
)
@pytest.mark.usefixtures("unchecked")
def test_patched_models_work_under_torch_func_where_theirs_do(family: str) -> None:
    model = build_family(family).double().eval()
    p = parameters_of(model)
    try:
        wanted = forward_over_reverse(model, p, direction_of(p))
    except (RuntimeError, NotImplementedError) as error:
        pytest.xfail(f"transformers' own code: {error}")
    with patch_transformers(model):
        found = forward_over_reverse(model, p, direction_of(p))
    assert relative(found, wanted) < ROUNDED


@pytest.mark.parametrize("name", ["metala", "mesa", "mesa_signed"])
def test_hessian_of_torch_func(name: str) -> None:
    model = model_of(name).eval()
    p = parameters_of(model)
    name, weight = min(p.items(), key=lambda pair: pair[1].numel())
    matrix = hessian(lambda w: loss_of(model, p | {name: w}))(weight)
    v = direction_of({name: weight})[name]
    product = jvp(grad(lambda w: loss_of(model, p | {name: w})), (weight,), (v,))[1]
    assert relative({name: torch.tensordot(matrix, v, v.dim())}, {name: product}) < 1e-9
