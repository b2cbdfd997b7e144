"""Packed documents through patched models: as the documents one by one, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

from family_readings import draw_text
from fastweights.engines.transformers import patch_transformers
from fastweights.engines.transformers.documents import current_documents, read_documents, reading
from fastweights.engines.transformers.packing import KEEP_APART, count_positions
from fastweights.models.cache_names import CACHE
from fastweights.recurrence import ShapeError
from transformers_families import build_family, present_families

LENGTHS = (7, 12, 1, 2, 15)
FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
WAYS = {
    "positions": ("position_ids",),
    "ids": ("seq_idx",),
    "bounds": FLASH,
    "all": ("position_ids", "seq_idx", *FLASH),
}
MIXING = [family for family in present_families() if family not in KEEP_APART]


@pytest.fixture(
    scope="module", params=[family for family in present_families() if family in KEEP_APART]
)
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    model = build_family(request.param)
    with patch_transformers(model):
        yield model


@pytest.fixture(scope="module")
def one_by_one(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(the logits of the documents, read one by one, the gradient)."""
    logits = read_one_by_one(model.train())
    return logits.detach(), differentiate(model, logits)


@pytest.fixture(scope="module")
def bamba() -> Iterator[nn.Module]:
    model = build_family("bamba")
    with patch_transformers(model):
        yield model


def write_documents() -> list[Tensor]:
    return [draw_text(1, n, seed=n) for n in LENGTHS]


def pack(way: str) -> dict[str, Any]:
    """The documents as transformers' collator packs them, told of in one way."""
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": document[0].tolist()} for document in write_documents()])
    return {name: batch[name] for name in ("input_ids", *WAYS[way])}


def read_one_by_one(model: nn.Module) -> Tensor:
    return torch.cat([model(input_ids=d).logits for d in write_documents()], dim=1)


def differentiate(model: nn.Module, logits: Tensor) -> Tensor:
    """The gradient of all parameters, in one vector."""
    model.zero_grad()
    F.cross_entropy(logits[0, :-1], logits[0, 1:].argmax(-1)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.sampled
def test_packed_documents_are_read_as_one_by_one(
    model: nn.Module, one_by_one: tuple[Tensor, Tensor]
) -> None:
    with torch.no_grad():
        for way, training in product(WAYS, (False, True)):
            found = model.train(training)(**pack(way), use_cache=False if training else None)
            assert close(found.logits, one_by_one[0]), (way, training)


def test_gradients_are_those_of_one_by_one(
    model: nn.Module, one_by_one: tuple[Tensor, Tensor]
) -> None:
    assert close(differentiate(model.train(), model(**pack("all")).logits), one_by_one[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_read_again_as_before(
    model: Any, one_by_one: tuple[Tensor, Tensor], reentrant: bool
) -> None:
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = differentiate(model, model(**pack("positions")).logits)
    model.disable_input_require_grads()
    model.gradient_checkpointing_disable()
    assert close(found, one_by_one[1])


@pytest.mark.parametrize("family", MIXING)
@pytest.mark.parametrize("way", WAYS)
def test_families_that_would_mix_documents_refuse(family: str, way: str) -> None:
    model = build_family(family)
    with patch_transformers(model), pytest.raises(ValueError, match=f"not read by {family}"):
        model(**pack(way))


def test_several_packed_rows(bamba: nn.Module) -> None:
    rows, ids = draw_text(2, 9), torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
    cuts = ((0, 0, 4), (0, 4, 9), (1, 0, 7), (1, 7, 9))
    bounds = torch.tensor([0, 4, 9, 16, 18])
    with torch.no_grad():
        alone = [bamba(input_ids=rows[row : row + 1, a:b]).logits[0] for row, a, b in cuts]
        for told in ({"seq_idx": ids}, {"cu_seq_lens_q": bounds}):
            assert close(bamba(input_ids=rows, **told).logits.flatten(0, 1), torch.cat(alone))


def test_a_mask_of_ones_and_one_of_four_axes(bamba: nn.Module) -> None:
    packed = pack("all")
    ids = packed["seq_idx"]
    own = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    with torch.no_grad():
        expected = read_one_by_one(bamba)
        for mask in (torch.ones_like(packed["input_ids"]), own):
            assert close(bamba(**packed, attention_mask=mask).logits, expected)


def test_one_document_keeps_its_cache(bamba: nn.Module) -> None:
    text = draw_text(1, 9)
    told = {"seq_idx": torch.zeros_like(text), "cu_seq_lens_q": torch.tensor([0, 9])}
    found = bamba(input_ids=text, use_cache=True, **told)
    assert getattr(found, CACHE).get_seq_length() == 9
    assert close(found.logits, bamba(input_ids=text).logits)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"use_cache": True}, "pass use_cache=False"),
        ({"attention_mask": torch.tensor([[1] * 36 + [0]])}, "pass none"),
        ({"pixel_values": torch.zeros(1)}, "pictures need position_ids"),
    ],
)
def test_what_would_mix_documents_is_refused(
    bamba: nn.Module, named: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bamba(**pack("ids"), **named)


def test_documents_of_another_number_of_tokens_are_refused(bamba: nn.Module) -> None:
    with pytest.raises(ShapeError, match="seq_idx is"):
        bamba(input_ids=draw_text(1, 9), seq_idx=torch.zeros(1, 8, dtype=torch.int64))


def test_what_is_left_to_theirs_does_not_mix_documents(bamba: nn.Module) -> None:
    mixer: Any = next(part for part in bamba.modules() if type(part).__name__ == "BambaMixer")
    mixer.activation = "gelu"
    try:
        with pytest.raises(ValueError, match="causal_conv1d_fn is called in a way"):
            bamba(**pack("positions"))
        assert bamba(input_ids=draw_text(1, 9)).logits.isfinite().all()
    finally:
        mixer.activation = "silu"


def test_convolutions_count_inputs_before_a_row_to_its_first_document() -> None:
    named = {"seq_idx": torch.tensor([[3, 3, 4]])}
    found = read_documents(torch.zeros(2, 5), named, led=True)
    assert found is not None
    assert found.tolist() == [[3, 3, 3, 3, 4]] * 2
    with pytest.raises(ShapeError, match=r"3.*tokens, but there are"):
        read_documents(torch.zeros(2, 5), named)


def test_documents_are_known_to_their_thread_alone() -> None:
    documents, seen = torch.tensor([[0, 1]]), []
    with reading(nn.Identity(), documents):
        thread = Thread(target=lambda: seen.append(current_documents()))
        thread.start()
        thread.join()
        assert current_documents() is documents
    assert (*seen, current_documents()) == (None, None)


def test_positions_of_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2, 2], [5, 5, 5, 5, 5, 1]])
    assert count_positions(documents).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
