"""Packed documents in the words of transformers' collators equal documents one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening

from fastweights import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models import FastWeightsForTokenClassification, FastWeightsModel
from kinds import form_of, one_of_each
from tiny import LAYERS, VOCABULARY, tiny, tiny_config, tokens

each_kind = pytest.mark.parametrize("layers", one_of_each(LAYERS))
each_form = pytest.mark.parametrize("layers", one_of_each(LAYERS, form_of))
EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}
ENDS = [0, 4, 5, 11]
POSITIONS = torch.tensor([[*range(4), *range(1), *range(6)]])


def documents(ids: Tensor) -> list[Tensor]:
    return [ids[:, start:end] for start, end in pairwise(ENDS)]


def collate(**settings: Any) -> dict[str, Any]:
    features = [{"input_ids": ids[0].tolist()} for ids in documents(tokens(1, 11))]
    return dict(DataCollatorWithFlattening(return_tensors="pt", **settings)(features))


def gradients(model: FastWeightsForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled
@each_kind
def test_a_flattened_batch_equals_its_documents(layers: str) -> None:
    model, batch = tiny(layers, learnt_positions=6), collate()
    packed = model(**batch)
    apart = [model(ids, labels=ids) for ids in documents(batch["input_ids"])]
    assert_close(packed.logits, torch.cat([output.logits for output in apart], 1), **EXACT)
    predicted = [ids.shape[1] - 1 for ids in documents(batch["input_ids"])]
    losses = [output.loss * n for output, n in zip(apart, predicted, strict=True)]
    expected = torch.stack(losses).sum() / sum(predicted)
    assert_close(packed.loss, expected, **EXACT)
    wanted = gradients(model, expected)
    assert_close(gradients(model, model(**batch).loss), wanted, **EXACT)
    assert wanted


def test_a_token_classifier_keeps_documents_apart() -> None:
    torch.manual_seed(0)
    model, ids = FastWeightsForTokenClassification(tiny_config("hybrid")).double(), tokens(1, 11)
    apart = [model(one).logits for one in documents(ids)]
    assert_close(model(ids, position_ids=POSITIONS).logits, torch.cat(apart, 1), **EXACT)


@pytest.mark.parametrize("layers", ["metala", "hybrid", "softmax", "mamba"])
def test_a_model_that_reads_both_ways(layers: str) -> None:
    torch.manual_seed(0)
    model = FastWeightsModel(tiny_config(layers, bidirectional=True)).double().eval()
    ids = tokens(1, 11)
    packed = model(ids, position_ids=POSITIONS).last_hidden_state
    apart = [model(one).last_hidden_state for one in documents(ids)]
    assert_close(packed, torch.cat(apart, 1), **EXACT)


@pytest.mark.parametrize(
    "settings",
    [
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ],
)
def test_every_word_for_a_boundary_says_the_same(settings: dict[str, Any]) -> None:
    model = tiny("hybrid")
    assert_close(model(**collate(**settings)).logits, model(**collate()).logits, **EXACT)


@each_form
def test_packed_documents_may_be_cut_anywhere(layers: str) -> None:
    """A cache goes on within a document, and is left behind where one begins at a cut."""
    model, ids, cache, pieces = (
        tiny(layers, learnt_positions=6),
        tokens(1, 11),
        FastWeightsCache(),
        [],
    )
    for start, end in pairwise([0, 2, 4, 5, 7, 8, 11]):
        cut = slice(start, end)
        piece = model(
            ids[:, cut],
            position_ids=POSITIONS[:, cut],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        pieces.append(piece.logits)
        assert all(x.shape[1] == end - start for x in piece.hidden_states)
    assert cache.get_seq_length() == 11
    assert_close(torch.cat(pieces, 1), model(ids, position_ids=POSITIONS).logits, **EXACT)


def test_each_row_of_a_cache_begins_its_own_document() -> None:
    model, ids, cache = tiny("hybrid"), tokens(2, 8), FastWeightsCache()
    model(ids[:, :5], past_key_values=cache, use_cache=True)
    positions = torch.tensor([[5, 6, 7], [0, 1, 2]])
    y = model(ids[:, 5:], past_key_values=cache, position_ids=positions, use_cache=False).logits
    assert_close(y[:1], model(ids[:1]).logits[:, 5:], **EXACT)
    assert_close(y[1:], model(ids[1:, 5:]).logits, **EXACT)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("filled", [0, 1])
def test_positions_that_count_padded_sequences_begin_no_document(filled: int) -> None:
    model, ids = tiny("hybrid", learnt_positions=9), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filled)
    expected = model(ids, attention_mask=mask).logits
    given = model(ids, attention_mask=mask, position_ids=positions).logits
    assert_close(given[mask.bool()], expected[mask.bool()], **EXACT)


def test_positions_of_one_row_hold_for_all() -> None:
    model, ids = tiny("hybrid"), tokens(3, 11)
    rows = [model(ids[i : i + 1], position_ids=POSITIONS).logits for i in range(3)]
    assert_close(model(ids, position_ids=POSITIONS).logits, torch.cat(rows), **EXACT)


def test_ordinary_positions_change_nothing() -> None:
    model, ids = tiny("hybrid"), tokens(2, 11)
    assert torch.equal(model(ids, position_ids=torch.arange(11)[None]).logits, model(ids).logits)


REFUSED: list[tuple[str, type[Exception], Callable[[], dict[str, Any]]]] = [
    (r"position_ids\[0, 3\] = 5, but 3 tokens", ValueError, lambda: {"position_ids": jump(5)}),
    (r"position_ids\[0, 3\] = 1, but 3 tokens", ValueError, lambda: {"position_ids": jump(1)}),
    (r"position_ids\[0, 0\] = 7, but 0 tokens", ValueError, lambda: {"position_ids": later()}),
    (r"position_ids have shape \[1, 4\]", ValueError, lambda: {"position_ids": later()[:, :4]}),
    (r"position_ids have shape \[3, 1, 11\]", ValueError, lambda: {"position_ids": mrope()}),
    ("position_ids are torch.float32", TypeError, lambda: {"position_ids": later().float()}),
    ("seq_idx have shape", ValueError, lambda: {"seq_idx": torch.zeros(2, 3, dtype=torch.int)}),
    ("segments have shape", ValueError, lambda: {"segments": torch.zeros(2, 3, dtype=torch.int)}),
    ("reach from 0 to 9, must from 0 to the 11", ValueError, lambda: {"cu_seq_lens_q": ends(9)}),
    (
        "cu_seq_lens_q and cu_seq_lens_k differ",
        ValueError,
        lambda: {"cu_seq_lens_q": ends(4, 11), "cu_seq_lens_k": ends(5, 11)},
    ),
    (
        "no argument called colour, token_type_ids",
        TypeError,
        lambda: {"token_type_ids": torch.zeros(1, 11), "colour": 3},
    ),
]


def later() -> Tensor:
    return torch.arange(7, 18)[None]


def mrope() -> Tensor:
    return torch.arange(11).expand(3, 1, -1)


def jump(value: int) -> Tensor:
    positions = torch.arange(11)[None].clone()
    positions[0, 3] = value
    return positions


def ends(*places: int) -> Tensor:
    return torch.tensor([0, *places], dtype=torch.int32)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("message", "kind", "arguments"), REFUSED, ids=[message for message, *_ in REFUSED]
)
def test_what_cannot_be_honoured_is_refused(
    message: str, kind: type[Exception], arguments: Callable[[], dict[str, Any]]
) -> None:
    with pytest.raises(kind, match=message):
        tiny("hybrid")(tokens(1, 11), **arguments())


def test_a_cache_that_has_read_other_tokens_is_noticed() -> None:
    model, cache = tiny("hybrid"), FastWeightsCache()
    model(tokens(1, 5), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"position_ids\[0, 0\] = 7, but 5 tokens of its document"):
        model(tokens(1, 1), past_key_values=cache, position_ids=torch.tensor([[7]]))


def test_generate_continues_packed_prompts() -> None:
    """The last document of a packed prompt alone is continued."""
    model, ids = tiny("hybrid"), tokens(1, 11)
    assert int(ids.max()) < VOCABULARY
    packed = model.generate(ids, position_ids=POSITIONS, max_new_tokens=5, do_sample=False)
    alone = model.generate(ids[:, 5:], max_new_tokens=5, do_sample=False)
    assert torch.equal(packed[:, 5:], alone)
