"""Products of few rows in C and of matrices by oneDNN are those of float64, and leave to torch what
torch must do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels import gemm
from fastweights.kernels.native import library
from fastweights.layers import Linear, project_each
from fastweights.ops import Product, ProductGroup, multiply, multiply_each

ROWS = "product of few rows (compiled)"
MATRICES = "product (oneDNN)"
compiled = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 4), (3, 1), (1, 7)])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (64, 16), (67, 130), (300, 2049)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(
    shape: tuple[int, int], outputs: int, inputs: int, *, biased: bool
) -> None:
    x, weight = drawn(*shape, inputs), drawn(outputs, inputs)
    bias = drawn(outputs) if biased else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with kernels.only(ROWS):
        found = multiply(x, weight, bias)
    scale = (x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)).clamp(min=1)
    assert found.dtype == torch.float32
    assert ((found - want).abs() / scale).max() < 1e-6


@compiled
def test_rows_of_a_view_are_its_own() -> None:
    wide, weight = drawn(4, 3, 40), drawn(24, 20)
    x = wide[:, 1:2, ::2]
    with kernels.only(ROWS), torch.inference_mode():
        torch.testing.assert_close(multiply(x, weight), F.linear(x, weight))


REFUSED: dict[str, Callable[[], Product]] = {
    "rows": lambda: Product(drawn(3, 3, 8), drawn(4, 8)),
    "empty": lambda: Product(drawn(0, 1, 8), drawn(4, 8)),
    "not contiguous": lambda: Product(drawn(1, 1, 8), drawn(8, 4).mT),
    "autograd": lambda: Product(drawn(1, 1, 8), drawn(4, 8).requires_grad_()),
    "not plain float32": lambda: Product(drawn(1, 1, 8).double(), drawn(4, 8).double()),
}


@compiled
@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_take_goes_to_torch(reason: str) -> None:
    product = REFUSED[reason]()
    refusal = next(line for line in kernels.explain(product).splitlines() if ROWS in line)
    assert reason in refusal
    torch.testing.assert_close(multiply(*product), F.linear(*product))


def test_autocast_keeps_its_dtype() -> None:
    layer = Linear(8, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(drawn(1, 1, 8)).dtype == torch.bfloat16


def test_a_row_that_does_not_fit_is_refused_as_by_torch() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(8, 4)(drawn(1, 1, 7))


EACH = "products of few rows (compiled)"


def pair(kind: str = "plain") -> list[Linear]:
    """Two layers of one width, the first with a bias; the second is of a `kind`."""
    torch.manual_seed(3)
    layers = [Linear(20, 130), Linear(20, 3, bias=False)]
    if kind == "of torch":
        layers[1] = torch.nn.Linear(20, 3, bias=False)  # type: ignore[assignment]
    if kind == "hooked":
        layers[1].register_forward_hook(lambda _, inputs, y: y + 1)
    if kind == "replaced":
        layers[1].forward = lambda x: x[..., :3]  # type: ignore[method-assign]
    return layers


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_at_once_are_each_their_product(shape: tuple[int, int], threads: int) -> None:
    sizes = [(1500, 700), (1, 3), (67, 130), (64, 16)]
    products = [Product(drawn(*shape, i), drawn(o, i), drawn(o)) for o, i in sizes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with kernels.only(EACH):
            found = multiply_each(*products)
    finally:
        torch.set_num_threads(before)
    for y, product in zip(found, products, strict=True):
        want = F.linear(*(s.double() for s in product if s is not None))
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


@compiled
def test_several_go_to_torch_where_one_must() -> None:
    products = [Product(drawn(1, 1, 8), drawn(4, 8)), REFUSED["autograd"]()]
    for y, product in zip(multiply_each(*products), products, strict=True):
        torch.testing.assert_close(y, F.linear(*product))
    assert "autograd" in kernels.explain(ProductGroup(tuple(products)))


@pytest.mark.parametrize("kind", ["plain", "of torch", "hooked", "replaced"])
def test_layers_side_by_side_are_what_each_call_gives(kind: str) -> None:
    layers, x = pair(kind), drawn(2, 1, 20)
    with torch.no_grad():
        torch.testing.assert_close(project_each(x, *layers), [layer(x) for layer in layers])


def test_hooks_of_all_modules_hear_every_layer() -> None:
    heard, layers = [], pair()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: heard.append(module)
    )
    with handle:
        project_each(drawn(1, 1, 20), *layers)
    assert heard == layers


@compiled
def test_plain_layers_make_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, call = [], library.call
    monkeypatch.setattr(library, "call", lambda *given: (calls.append(given), call(*given))[1])
    with torch.no_grad():
        project_each(drawn(1, 1, 20), *pair())
    assert [len(given) for given in calls] == [3]


def test_gradients_go_through_layers_side_by_side() -> None:
    layers, x = pair(), drawn(1, 2, 20).requires_grad_()
    sum(y.square().sum() for y in project_each(x, *layers)).backward()  # type: ignore[union-attr]
    found, x.grad = x.grad, None
    sum(layer(x).square().sum() for layer in layers).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(found, x.grad)


@pytest.fixture
def routed() -> Iterator[None]:
    if not gemm._onednn_is_accurate():
        pytest.skip("oneDNN is missing here or rounds")
    with gemm.products("onednn"):
        yield


def learn(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the gradients, and those of the gradients' size."""
    leaves = [x, *layer.parameters()]
    y = layer(x)
    first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)
    return [y, *first, *second]


def verdict(name: str, product: Product) -> str:
    return next(line for line in kernels.explain(product).splitlines() if line.startswith(name))


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("biased", [False, True])
def test_matrices_and_their_gradients(*, biased: bool) -> None:
    layer = Linear(300, 160, bias=biased)
    x = drawn(300, 2, 100).mT.reshape(2, 100, 300).requires_grad_()
    assert verdict(MATRICES, Product(x, layer.weight)) == f"{MATRICES}: taken"
    found = learn(layer, x)
    wide = nn.Linear(300, 160, bias=biased, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    for one, want in zip(found, learn(wide, x.detach().double().requires_grad_()), strict=True):
        assert one.dtype == torch.float32
        assert (one - want).norm() <= 2e-6 * want.norm()
    with torch.no_grad():
        assert torch.equal(layer(x), found[0])


@pytest.mark.usefixtures("routed")
def test_a_frozen_weight_has_no_gradient() -> None:
    layer, x = Linear(300, 160).requires_grad_(requires_grad=False), drawn(100, 300)
    layer(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(100, -1))
    assert layer.weight.grad is None
    assert layer.bias.grad is None


@pytest.mark.usefixtures("routed")
def test_matrices_that_torch_must_multiply() -> None:
    x, weight = drawn(200, 300), drawn(160, 300)
    assert "fewer than" in verdict(MATRICES, Product(x[:8], weight))
    assert "not plain" in verdict(MATRICES, Product(x.double(), weight.double()))
    with gemm.products("torch"):
        assert "torch's own" in verdict(MATRICES, Product(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in verdict(MATRICES, Product(x, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.usefixtures("routed")
def test_directions_forward_and_transforms_pass_through_matrices() -> None:
    x, weight = drawn(200, 300), drawn(160, 300)
    with forward_ad.dual_level():
        y = multiply(forward_ad.make_dual(x, x), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, F.linear(x, weight))
    gradient = torch.func.grad(lambda w: multiply(x, w).sum())(weight)
    torch.testing.assert_close(gradient, x.sum(0).expand(160, -1), atol=1e-3, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.usefixtures("routed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")  # of torch 2.14
def test_traces_have_torchs_own_product() -> None:
    layer, rows = Linear(300, 160).requires_grad_(requires_grad=False), drawn(200, 300)
    for example in (rows, rows[:1]):
        traced: Any = torch.jit.trace(layer, example)
        torch.testing.assert_close(traced(-example), layer(-example))
