"""float32 products go to oneDNN only where a probe finds it accurate and faster, and the switch is
turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from fastweights.kernels import explain, gemm
from fastweights.kernels.gemm import GemmProbe, with_onednn_gemm
from fastweights.recurrence import Decay

GOOD = GemmProbe(3e-7, 2.0)


def precision_inside(_: Tensor) -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = precision_inside(torch.zeros(1))
    yield
    assert precision_inside(torch.zeros(1)) == before
    gemm.probe_gemm.cache_clear()


def judged(monkeypatch: pytest.MonkeyPatch, verdict: GemmProbe) -> Callable[[Tensor], str]:
    monkeypatch.setattr(gemm, "probe_gemm", lambda: verdict)
    return with_onednn_gemm(precision_inside)


def rounding(a: Tensor, b: Tensor) -> Tensor:
    """A processor with a matrix unit for bfloat16."""
    if torch.backends.mkldnn.matmul.fp32_precision == "bf16":
        return (a.bfloat16() @ b.bfloat16()).float()
    return a @ b


def test_a_library_that_rounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.probe_gemm.cache_clear()
    monkeypatch.setattr(gemm, "product", rounding)
    found = gemm.probe_gemm()
    assert found.error is not None
    assert found.error > gemm.ACCURATE
    assert not found.use_onednn
    assert not found._replace(speed=10.0).use_onednn
    assert "rounds" in str(found)


def test_a_library_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.probe_gemm.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not gemm.probe_gemm().use_onednn
    assert "no oneDNN" in str(gemm.probe_gemm())


def test_the_probe_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.probe_gemm.cache_clear()
    first = gemm.probe_gemm()
    monkeypatch.setattr(gemm, "product", rounding)
    assert gemm.probe_gemm() is first


@pytest.mark.parametrize(
    "verdict", [GemmProbe(4e-3, 3.0), GemmProbe(3e-7, 1.0), GemmProbe(None, 0.0)]
)
def test_nothing_is_switched_for_less(monkeypatch: pytest.MonkeyPatch, verdict: GemmProbe) -> None:
    before = precision_inside(torch.zeros(1))
    assert judged(monkeypatch, verdict)(torch.zeros(1)) == before


def test_only_float32_on_the_cpu_and_outside_of_compiled_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, before = judged(monkeypatch, GOOD), precision_inside(torch.zeros(1))
    assert inside(torch.zeros(1)) == "bf16"
    assert inside(torch.zeros(1, dtype=torch.float64)) == before
    assert inside(torch.zeros(1, device="meta")) == before
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert inside(torch.zeros(1)) == before


def test_the_switch_is_turned_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, GOOD)
    before = precision_inside(torch.zeros(1))

    @with_onednn_gemm
    def fails(x: Tensor) -> None:
        assert precision_inside(x) == "bf16"
        raise RuntimeError("as it happens")

    with pytest.raises(RuntimeError, match="as it happens"):
        fails(torch.zeros(1))
    assert precision_inside(torch.zeros(1)) == before


def test_the_last_of_two_threads_turns_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, GOOD)
    inside, first_left, found = Barrier(2), Barrier(2), []

    @with_onednn_gemm
    def first(_: Tensor) -> None:
        inside.wait()

    @with_onednn_gemm
    def second(x: Tensor) -> None:
        inside.wait()
        first_left.wait()
        found.append(precision_inside(x))

    thread = Thread(target=second, args=(torch.zeros(1),))
    thread.start()
    first(torch.zeros(1))
    first_left.wait()
    thread.join()
    assert found == ["bf16"]


def test_explain_says_which_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 3, 1, 2)
    judged(monkeypatch, GOOD)
    assert "products of the torch kernels: oneDNN" in explain(Decay(q, q, q, None)).splitlines()[-1]
    assert "products" not in explain(Decay(q.double(), q.double(), q.double(), None))
