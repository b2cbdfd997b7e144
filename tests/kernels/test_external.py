"""Kernels of other libraries: when they are taken, what they are handed; and preferred kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels import TABLE, Kernel, explain, external, prefer, select, takers
from fastweights.kernels.external import streams
from fastweights.kernels.triton.chips import CHIPS, Chip, pretend
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import Decay, Delta
from tolerances import error

NAMES = [kernel.name for kernel in TABLE]
EXTERNAL = [*external.FASTER, *external.SLOWER]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    torch.manual_seed(0)
    streams.is_installed.cache_clear()
    yield
    streams.is_installed.cache_clear()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
) -> tuple[Tensor, Tensor]:
    """What FlashQLA documents, token by token: q, k ``[B T H K]``, v ``[B T HV V]``, g and beta
    ``[B T HV]``, states ``[N HV K V]``.
    """
    assert not any((use_qk_l2norm_in_kernel, head_first, state_v_first, auto_cp))
    assert output_final_state
    assert cu_seqlens is None
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert g.shape == beta.shape == v.shape[:3]
    assert g.isfinite().all()
    assert initial_state is not None
    assert initial_state.shape == (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    state, outputs = initial_state.float(), []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        key = k[:, t, :, None].float()
        wanted = v[:, t, :, None] - key @ state
        state = state + key.mT * (beta[:, t, :, None, None] * wanted)
        outputs.append(scale * q[:, t, :, None].float() @ state)
    return torch.stack(outputs, 1).squeeze(3).to(q.dtype), state


@pytest.fixture
def flash_qla(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_qla")
    module.__spec__ = ModuleSpec("flash_qla", None)
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_qla", module)


def gated(t: int, width: int = 128, dtype: torch.dtype = torch.bfloat16, decays: int = 1) -> Delta:
    q, k = (F.normalize(torch.randn(1, t, 2, width), dim=-1) for _ in range(2))
    log_decay = -torch.rand(1, t, 2, decays)
    log_decay[:, 9::30] = -torch.inf
    v, beta = torch.randn(1, t, 1, width), torch.rand(1, t, 2, 1)
    return Delta(q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype), log_decay)


def decay(t: int = 70, decays: int = 1, dtype: torch.dtype = torch.bfloat16) -> Decay:
    q, k, v = torch.randn(3, 1, t, 2, 16, dtype=dtype).unbind()
    return Decay(q, k, v, -torch.rand(1, t, 2, decays))


@pytest.mark.usefixtures("flash_qla")
def test_flash_qla_is_handed_what_it_documents() -> None:
    given = gated(65)
    state = torch.randn(given.state_shapes[0]) * 0.1
    o, last = external.FLASH_QLA.compute(given, state)
    wanted, after = evaluate(given, state, Recurrent())
    assert o.dtype == torch.bfloat16
    assert error(o.float(), wanted.float()) < 1e-2
    assert error(last, after) < 1e-2


@pytest.mark.usefixtures("flash_qla")
def test_flash_qla_takes_what_it_is_made_for() -> None:
    def refusal(record: Delta, capability: int = 90) -> str:
        with pretend(Chip(capability, 1, 1)):
            return external.FLASH_QLA.refuses(record) or ""

    assert refusal(gated(64)) == ""
    assert "fewer than 64" in refusal(gated(63))
    assert "one decay per head" in refusal(gated(64, decays=128))
    assert "64 × 64, not 128 × 128" in refusal(gated(64, 64))
    assert "float32" in refusal(gated(64, dtype=torch.float32))
    assert "not 80" in refusal(gated(64), 80)
    assert refusal(gated(64), 120) == ""
    learnt = gated(64)
    learnt.q.requires_grad_()
    assert "no backward" in refusal(learnt, 120)
    assert refusal(learnt, 100) == ""


@pytest.mark.parametrize("kernel", EXTERNAL, ids=lambda kernel: kernel.name)
def test_what_is_not_installed_is_refused_by_name(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "find_spec", lambda name: None)
    records = [decay(), decay(decays=16), gated(70), gated(70, decays=128)]
    with pretend(CHIPS[90]):
        found = [kernel.refuses(r) or "" for r in records if isinstance(r, kernel.rule)]
    assert any(reason in ("fla is not installed", "flash_qla is not installed") for reason in found)


def test_fla_takes_half_precision_of_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "find_spec", lambda name: name)
    scalar, vector = external.FLA_SIMPLE_GLA.refuses, external.FLA_GLA.refuses
    assert scalar(decay()) is None
    assert vector(decay(decays=16)) is None
    assert scalar(decay(decays=16)) == "every key has a decay of its own"
    assert vector(decay()) == "not every key has a decay of its own"
    assert "fewer than 2" in (scalar(decay(1)) or "")
    assert "float32" in (scalar(decay(dtype=torch.float32)) or "")
    assert "wider than 256" in (external.FLA_KDA.refuses(gated(3, 257, decays=257)) or "")
    assert external.FLA_GATED_DELTA.refuses(gated(3)) is None


def test_the_order_in_which_libraries_are_asked() -> None:
    assert NAMES.index("gated delta (FlashQLA)") < NAMES.index("decay (Triton)")
    assert NAMES.index("decay (Triton)") < NAMES.index("chunk_simple_gla (fla)")
    assert NAMES.index("chunk_kda (fla)") < NAMES.index("step (torch)")


def test_preferred_kernels_are_asked_first() -> None:
    record = decay(dtype=torch.float32)
    usual = select(record).name
    with prefer("chunk loop (torch)"):
        assert select(record).name == takers(record)[0].name == "chunk loop (torch)"
        first = explain(record).splitlines()[0]
        assert first == "chunk loop (torch): taken, preferred here"
        with prefer("blocked decay (torch)", "chunk loop (torch)"):
            assert select(record).name == "blocked decay (torch)"
        with kernels.only(usual):
            assert select(record).name == usual
    assert select(record).name == usual
    assert "preferred" not in explain(record)


def test_what_preferred_kernels_refuse_goes_to_the_others() -> None:
    record = decay(dtype=torch.float32)
    with prefer("step (torch)"):
        assert "it has 70 tokens, not one, preferred here" in explain(record)
        assert select(record).name != "step (torch)"
    with pytest.raises(LookupError, match="no kernel is called 'nothing'"), prefer("nothing"):
        pass
