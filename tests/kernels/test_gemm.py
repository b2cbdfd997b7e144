"""float32 products go the route that was chosen, in every process and thread, never by a clock, and
torch's switch is turned back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastweights import kernels
from fastweights.kernels import explain, gemm, products
from fastweights.kernels.gemm import ProductsReport, products_route, route_products
from fastweights.recurrence import Decay

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch 2.8 cannot choose oneDNN"
)


@route_products
def inside(_: Tensor) -> str:
    return precision()


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


def clear() -> None:
    gemm.onednn_error.cache_clear()
    gemm.default_route.cache_clear()


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = precision()
    with products(None):
        yield
    assert precision() == before


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Set up first, so that it ends after monkeypatch has put everything back."""
    clear()
    yield
    clear()


@pytest.fixture
def accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "onednn_error", lambda: 3e-7)


def rounding(a: Tensor, b: Tensor) -> Tensor:
    """A processor with a matrix unit for bfloat16."""
    if precision() == "bf16":
        return (a.bfloat16() @ b.bfloat16()).float()
    return a @ b


def test_a_library_that_rounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "product", rounding)
    monkeypatch.setattr(gemm, "_maker", lambda: "AuthenticAMD")
    found = gemm.probe_products()
    assert found.error is not None
    assert found.error > gemm.ACCURATE
    assert found.route == products_route() == "torch"
    assert "rounds" in str(found)
    with pytest.raises(ValueError, match=r"products\('onednn'\): oneDNN is missing here or .* use"):
        products("onednn")


def test_without_torchs_setting_there_is_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_backend", lambda: None)
    assert gemm.onednn_error() is None
    assert "there is no oneDNN" in str(gemm.probe_products())


def test_a_record_without_numbers_is_explained() -> None:
    error = gemm.onednn_error()
    clear()
    with FakeTensorMode():
        streams = (torch.randn(1, 8, 2, 4) for _ in range(4))
        assert "taken" in str(explain(Decay(*streams)))
        assert gemm.onednn_error() == error


def test_a_library_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert products_route() == "torch"
    assert "no oneDNN" in str(gemm.probe_products())
    with pytest.raises(ValueError, match="use 'torch'"):
        products("onednn")


def test_routes_are_named() -> None:
    with pytest.raises(ValueError, match="products\\('mkl'\\): use 'torch', 'onednn' or None"):
        products("mkl")


@pytest.mark.usefixtures("accurate")
@pytest.mark.parametrize(
    ("maker", "route"), [("AuthenticAMD", "onednn"), ("GenuineIntel", "torch"), (None, "torch")]
)
@pytest.mark.parametrize("fast", [True, False])
def test_the_default_is_by_the_processors_maker_never_by_a_clock(
    monkeypatch: pytest.MonkeyPatch, maker: str | None, route: str, fast: bool
) -> None:
    monkeypatch.setattr(gemm, "_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(
        gemm, "_seconds", lambda a, b: 1.0 if (precision() == "bf16") == fast else 2
    )
    assert products_route() == route
    assert gemm.probe_products().speed == (2 if fast else 0.5)
    assert products_route() == route


@pytest.mark.usefixtures("accurate")
def test_a_choice_lasts() -> None:
    products("onednn")
    assert products_route() == "onednn"
    with products("torch"):
        assert products_route() == "torch"
    assert products_route() == "onednn"
    assert kernels.numerics()["float32_products"] == "onednn"
    json.dumps(kernels.numerics())


def test_nothing_is_switched_for_torchs_own() -> None:
    with products("torch"):
        assert inside(torch.zeros(1)) == precision()


@pytest.mark.usefixtures("accurate")
def test_only_float32_on_the_cpu_and_outside_of_compiled_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = precision()
    with products("onednn"):
        assert inside(torch.zeros(1)) == "bf16"
        assert inside(torch.zeros(1, dtype=torch.float64)) == before
        assert inside(torch.zeros(1, device="meta")) == before
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert inside(torch.zeros(1)) == before


@pytest.mark.usefixtures("accurate")
def test_the_switch_is_turned_back_after_an_error() -> None:
    before = precision()

    @route_products
    def fails(_: Tensor) -> None:
        assert precision() == "bf16"
        raise RuntimeError("as it happens")

    with products("onednn"), pytest.raises(RuntimeError, match="as it happens"):
        fails(torch.zeros(1))
    assert precision() == before


@pytest.mark.usefixtures("accurate")
def test_the_last_of_two_threads_turns_it_back() -> None:
    both_inside, first_left, found = Barrier(2), Barrier(2), []

    @route_products
    def first(_: Tensor) -> None:
        both_inside.wait()

    @route_products
    def second(_: Tensor) -> None:
        both_inside.wait()
        first_left.wait()
        found.append(precision())

    with products("onednn"):
        thread = Thread(target=second, args=(torch.zeros(1),))
        thread.start()
        first(torch.zeros(1))
        first_left.wait()
        thread.join()
    assert found == ["bf16"]


@pytest.mark.usefixtures("accurate")
def test_explain_says_which_library_multiplies() -> None:
    q = torch.zeros(1, 3, 1, 2)
    for route, name in (("onednn", "oneDNN"), ("torch", "torch's own")):
        with products(route):
            last = explain(Decay(q, q, q, None)).splitlines()[-1]
            assert f"products of the torch kernels: {name}" in last
    assert "products" not in explain(Decay(q.double(), q.double(), q.double(), None))


def test_a_report_says_what_was_measured() -> None:
    assert str(ProductsReport("torch", 3e-7, 2.0)) == (
        "torch's own: oneDNN has 2.00 times torch's speed, error 3e-07"
    )
