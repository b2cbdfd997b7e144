"""What of the engine for vLLM needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastweights import MIXERS
from fastweights.engines.vllm.attentions import (
    ServedAttentions,
    copy_stored,
    mark_as_hybrid,
    require_served,
)
from fastweights.engines.vllm.forms import KeptKeys, KeptState, kept_by, longest_page
from fastweights.engines.vllm.groups import LONGEST_PADDED, group, padded_length
from fastweights.engines.vllm.layout import ALIGNMENT, PageLayout, StateForm
from fastweights.engines.vllm.weights import Replacement, load_weights, original_names
from fastweights.kernels.pages import load, store
from fastweights.layers import LayerStream
from fastweights.linearize import LinearAttentionConfig, branches
from fastweights.methods import evaluate
from fastweights.mixer import MixerState
from fastweights.mixers import make
from kinds import one_of_each
from pretrained import linear_llama
from tiny import tiny, tiny_config

ENDLESS = {"softmax": (4, 4, 4, 4), "olmo2": (4, 4, 4, 4), "mla": (4, 1, 16, 8)}
WINDOW = {name: {"window": 6} for name in ("fox", "swa")}


@pytest.mark.parametrize("name", one_of_each(name for name in MIXERS if name not in ENDLESS))
@torch.no_grad()
def test_a_state_fits_its_page_after_any_number_of_tokens(name: str) -> None:
    fields = {"name": name, **WINDOW.get(name, {})}
    (kept,) = kept_by(tiny_config(mixers=[fields]), torch.float32)[0]
    assert isinstance(kept, KeptState)
    mixer = make(d=16, **fields)
    for n in (1, 3, 70):
        x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n))
        read = mixer.project_all(x, stream=LayerStream(x))
        memory = read.recurrence.settle(evaluate(read.recurrence)[1])
        state = MixerState(memory, read.past.tails, read.past.position)
        tensors = kept.form.tensors(state)
        pages = torch.full((4, kept.layout.nbytes + 2 * ALIGNMENT), 7, dtype=torch.uint8)
        slots = torch.tensor([3, 1])
        paged = kept.layout.of_pages(pages)
        store(paged, slots, tensors)
        back = kept.form.state(load(paged, slots))
        assert StateForm.of(back) == StateForm.of(state)
        for mine, theirs in zip(kept.form.tensors(back), tensors, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert (pages[[0, 2]] == 7).all()
        assert (pages[:, kept.layout.nbytes :] == 7).all()


@pytest.mark.parametrize("name", ENDLESS)
def test_softmax_to_all_tokens_keeps_keys(name: str) -> None:
    (kept,) = kept_by(tiny_config(name), torch.float32)[0]
    assert kept == KeptKeys(*ENDLESS[name])


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        ({"name": "fox"}, r"layer 0, FoX: .* no place for a decay of its scores"),
        ({"name": "fox", "sinks": True}, "no place for a decay of its scores"),
    ],
)
def test_keys_that_vllm_has_no_place_for_are_refused(mixer: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kept_by(tiny_config(mixers=[mixer]), torch.float32)


def test_shared_blocks_are_refused() -> None:
    shared = [{"layers": [0], "width": 12}]
    config = tiny_config("linear", mlp=None, shared_blocks=shared)
    with pytest.raises(ValueError, match="vLLM cannot serve a model with shared_blocks"):
        kept_by(config, torch.float32)


def test_pages_are_as_long_as_the_longest() -> None:
    config = tiny_config("hybrid")
    kept = [one for (one,) in kept_by(config, torch.float32)]
    assert all(isinstance(one, KeptState) for one in kept)
    assert longest_page([kept]) == max(one.layout.nbytes for one in kept)  # type: ignore[union-attr]
    assert longest_page(kept_by(tiny_config("softmax"), torch.float32)) == 0


def test_parts_of_a_page_begin_at_multiples_of_the_alignment() -> None:
    layout = PageLayout.of([torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)])
    assert [part.begin for part in layout.parts] == [0, ALIGNMENT]
    assert layout.nbytes == 2 * ALIGNMENT
    assert PageLayout.of([]).nbytes == 0


def test_sequences_are_grouped_by_their_tokens_and_whether_they_begin() -> None:
    groups = group(
        starts=[0, 1, 2, 5, 8, 8, 9],
        lengths=[9, 1, 3, 7, 0, 4],
        slots=torch.tensor([10, 11, 12, 13, 14, 15], dtype=torch.int32),
        device=torch.device("cpu"),
    )
    found = [(one.tokens.tolist(), one.slots.tolist(), one.begins, one.first) for one in groups]
    assert found == [
        ([[0], [8]], [10, 15], False, None),
        ([[1]], [11], True, 1),
        ([[2, 3, 4]], [12], True, 2),
        ([[5, 6, 7]], [13], False, 5),
    ]
    assert all(one.keep is None for one in groups)


def test_sequences_of_about_as_many_tokens_are_padded() -> None:
    (one,) = group([0, 3, 5, 5], [3, 2, 0], torch.tensor([7, 8, 9]), torch.device("cpu"))
    assert one.keep is not None
    assert one.keep.tolist() == [[True] * 3, [True, True, False]]
    assert one.tokens.tolist() == [[0, 1, 2], [3, 4, 4]]
    stream = torch.arange(6.0)[:, None]
    assert one.take(stream).squeeze(-1).tolist() == [[0, 1, 2], [3, 4, 4]]
    written = torch.zeros(6, 1)
    one.put(written, one.take(stream) + 1)
    assert written.flatten().tolist() == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("count", [*range(1, 70), 512, 513, 4096])
def test_padding_is_less_than_what_is_read(count: int) -> None:
    padded = padded_length(count)
    assert count <= padded < count + max(16, count / 3)
    assert count > 1 or padded == 1
    assert count < LONGEST_PADDED or padded == count
    assert padded_length(padded) == padded


def test_groups_read_what_lies_in_order_where_it_lies() -> None:
    groups = group([0, 2, 4, 5], [4, 4, 9], torch.tensor([1, 2, 3]), torch.device("cpu"))
    stream = torch.randn(5, 3)
    both, token = groups
    assert both.take(stream).data_ptr() == stream.data_ptr()
    assert torch.equal(both.take(stream), stream[:4].view(2, 2, 3))
    assert torch.equal(token.take(stream), stream[4:, None])


class _Inside(Replacement):
    def __init__(self, mixer: torch.nn.Module) -> None:
        super().__init__()
        self.mixer, self.scale = mixer, torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_find_parts_that_are_inside_others(tied: bool) -> None:
    stored = {n: w + 1 for n, w in tiny("hybrid", tie_word_embeddings=tied).named_parameters()}
    model = tiny("hybrid", tie_word_embeddings=tied)
    for block in model.model.layers:
        block.mixer = _Inside(block.mixer)
    load_weights(original_names(model), stored.items())
    for name, weight in stored.items():
        path = name.replace(".mixer.", ".mixer.mixer.")
        assert torch.equal(model.get_parameter(path), weight)


def test_other_weights_are_refused() -> None:
    stored = dict(tiny("hybrid").named_parameters())
    for weights, message in (
        ({**stored, "head": torch.ones(2)}, r"a weight head \[2\], and the model no such weight"),
        ({**stored, "model.norm.weight": torch.ones(2)}, r"norm.weight \[2\], and the model there"),
        ({n: w for n, w in stored.items() if "norm" in n}, r"lacks \d+ weights .* among them"),
    ):
        with pytest.raises(ValueError, match=message):
            load_weights(tiny("hybrid").state_dict(keep_vars=True), weights.items())


ANALOGS = {
    "lolcats": {"window": 5},
    "per query head": {"window": 5, "per_query_head": True},
    "sinks": {"rule": "gla", "window": 4, "sinks": 3},
    "convolved": {"rule": "gated_deltanet", "window": 0, "convolution": 4},
}


@pytest.mark.parametrize("name", ANALOGS)
@torch.no_grad()
def test_a_linear_attention_goes_on_from_what_it_keeps(name: str) -> None:
    analog = LinearAttentionConfig(**ANALOGS[name])  # type: ignore[arg-type]
    model = linear_llama(analog, layers=3, dtype=torch.float32, chosen=[0, 2])
    kept = ServedAttentions.of(model.config, torch.float32)
    assert [one.layer for one in kept.softmax] == [1]
    assert kept.page == kept.linear[0].nbytes
    branch, drawn = branches(model)[0], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 4, generator=drawn) for heads in (4, 2, 2))
    whole, _ = branch.read_after(None, q, k, v)
    pages, slots = (
        torch.full((4, kept.page + ALIGNMENT), 7, dtype=torch.uint8),
        torch.tensor([3, 1]),
    )
    paged = kept.linear[0].of_pages(pages)
    state, parts = None, []
    for begin, end in ((0, 1), (1, 3), (3, 12), (12, 13), (13, 14), (14, 20)):
        streams = [s[:, begin:end] for s in (q, k, v)]
        o, state = branch.read_after(state, *streams)
        if begin:
            same = branch.read_in_pages(paged, slots, *streams)
            torch.testing.assert_close(same, o, atol=1e-6, rtol=1e-5)
        else:
            store(paged, slots, state)
        parts.append(o)
        assert PageLayout.of(state) == kept.linear[0]
        for mine, theirs in zip(load(paged, slots), state, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert (pages[[0, 2]] == 7).all()


def test_vllm_sees_a_hybrid_where_layers_are_linear() -> None:
    config = linear_llama(layers=3, chosen=[1]).config
    config.layer_types = ["full_attention"] * 3
    for _ in range(2):
        mark_as_hybrid(config)
        assert config.layer_types == ["full_attention", "linear_attention", "full_attention"]
    assert copy_stored(config).layer_types == ["full_attention"] * 3


def test_softmax_layers_that_vllm_cannot_take_over_are_refused() -> None:
    model = linear_llama(layers=2, chosen=[0])
    found = ServedAttentions.of(model.config, torch.float32).softmax
    with pytest.raises(ValueError, match=r"layer 1 .* stays softmax with attention sinks"):
        require_served(replace(found[0], sinks=True))
