"""Sinks beside landmarks: softmax over the window and the first tokens, against each definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from families import LAYERS, VOCABULARY, logits, padded, student, teacher
from fastweights.features import TURN, Landmarks
from fastweights.linearize import (
    LinearAttentionConfig,
    branches,
    linearize,
    place_landmarks,
    read_by_softmax,
)
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.head_windows import GroupedBranch
from fastweights.linearize.convert.landmark_branch import LandmarkBranch
from fastweights.linearize.convert.rotary import Turning
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.methods import Auto, Chunkwise, Parallel, Recurrent, evaluate
from fastweights.recurrence.windowed import soft_cap
from tolerances import error

EXACT = 1e-9
ANALOGS = {
    "sinks-2": LinearAttentionConfig("landmarks", 4, window=3, sinks=2),
    "alone": LinearAttentionConfig("landmarks", 4, window=0, sinks=3),
    "sinks-5": LinearAttentionConfig("landmarks", 4, window=1, sinks=5),
    "by-head": LinearAttentionConfig(
        "landmarks", 4, window=3, sinks=2, head_windows=((), (5, 1), (5, 1))
    ),
}
each = pytest.mark.parametrize("analog", ANALOGS.values(), ids=ANALOGS)
TOKENS = 17


def made(analog: LinearAttentionConfig, family: str = "llama") -> Any:
    """A branch whose landmarks read what some pairs of channels were before they turned."""
    branch = branches(student(family, analog))[1].double()
    assert isinstance(branch, LandmarkBranch | GroupedBranch)
    turned = Turning.none(branch.attention.head_dim)
    turned.partners[:4] = torch.tensor([1, 0, 3, 2])
    turned.speeds[:4] = torch.tensor([1, -1, 3, -3]) * (TURN // 20)
    for phi in branch.modules():
        if isinstance(phi, Landmarks):
            turned.write(phi)
    return branch


def streams(branch: LinearBranch, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    g, a = Generator().manual_seed(0), branch.attention
    sizes = ((a.heads, a.head_dim), (a.kv_heads, a.head_dim), (a.kv_heads, a.value_dim))
    q, k, v = (torch.randn(2, tokens, *size, generator=g, dtype=torch.float64) for size in sizes)
    return q, k, v


def literal(branch: Any, streams: Any, keep: Tensor, segments: Tensor) -> Tensor:
    """Of each group's heads what they are alone."""
    if isinstance(branch, LandmarkBranch):
        return _literal(branch, streams, keep, segments)
    (q, k, v), heads = streams, zip(branch.query_heads, branch.key_heads, strict=True)
    parts = [(q[:, :, queries], k[:, :, own], v[:, :, own]) for queries, own in heads]
    found = [_literal(*pair, keep, segments) for pair in zip(branch.groups, parts, strict=True)]
    places = [head for heads in branch.query_heads for head in heads]
    return torch.cat(found, 2)[:, :, [places.index(head) for head in range(len(places))]]


def _literal(branch: LandmarkBranch, streams: Any, keep: Tensor, segments: Tensor) -> Tensor:
    """Σ_s w_ts v_s / Σ_s w_ts: w_ts = γ e^(q_t·k_s) in the window and of sinks, Σ_j e^(q_t·c_j)
    φ_j(k_s) of all others of the document, with q_t and k_s as they were before rotary positions.
    """
    (q, k, v), repeats = streams, branch.attention.heads // branch.attention.kv_heads
    place = torch.zeros_like(segments)
    for b, t in keep.nonzero().tolist():
        place[b, t] = (keep[b, :t] & (segments[b, :t] == segments[b, t])).sum()
    read = branch.phi_q.scores(branch.phi_q.unrotate(q, place)).exp()
    near, key = branch.mix.sigmoid(), branch.phi_k(branch.phi_k.unrotate(k, place))
    out = v.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(len(q)):
        for t in keep[b].nonzero()[:, 0].tolist():
            same = keep[b, : t + 1] & (segments[b, : t + 1] == segments[b, t])
            own = same.nonzero()[:, 0].tolist()
            for h in range(q.shape[2]):
                g, weights = h // repeats, []
                for rank, s in enumerate(own):
                    score = q[b, t, h] @ k[b, s, g] * branch.attention.scaling
                    exact = near[h] * soft_cap(score, branch.attention.softcap).exp()
                    seen = len(own) - 1 - rank < branch.config.window or rank < branch.config.sinks
                    weights.append(exact if seen else read[b, t, h] @ key[b, s, g])
                row = torch.stack(weights)
                out[b, t, h] = row @ v[b, own, g] / row.sum()
    return out


def alone() -> tuple[Tensor, Tensor]:
    return torch.ones(2, TOKENS, dtype=torch.bool), torch.zeros(2, TOKENS, dtype=torch.long)


def padding() -> tuple[Tensor, Tensor]:
    keep, segments = alone()
    keep[0, :4], keep[1, [1, 5, 6, 16]] = False, False
    return keep, segments


def documents() -> tuple[Tensor, Tensor]:
    keep, segments = padding()
    segments[0, 6:], segments[0, 8:], segments[1, 5:] = 1, 2, 1
    return keep, segments


@each
@pytest.mark.parametrize("placed", [alone, padding, documents])
def test_whole_sequences_are_the_definition(analog: LinearAttentionConfig, placed) -> None:
    branch, (keep, segments) = made(analog), placed()
    given = streams(branch)
    found = branch(*given, keep, segments, None)
    want = literal(branch, given, keep, segments)
    assert error(found * keep[..., None, None], want) < EXACT


def test_scores_are_capped_as_in_the_window() -> None:
    branch = made(ANALOGS["sinks-2"], "gemma2")
    assert branch.attention.softcap is not None
    given = tuple(5 * s for s in streams(branch))
    found = branch(*given, None, None, None)
    assert error(found, literal(branch, given, *alone())) < EXACT


@each
def test_gradients_are_those_of_the_definition(analog: LinearAttentionConfig) -> None:
    branch, placed = made(analog), documents()
    given = tuple(s.requires_grad_() for s in streams(branch))
    inputs = [*given, *branch.parameters()]
    weights = torch.randn(literal(branch, given, *placed).shape, dtype=torch.float64)
    weights *= placed[0][..., None, None]
    found = torch.autograd.grad((branch(*given, *placed, None) * weights).sum(), inputs)
    want = torch.autograd.grad((literal(branch, given, *placed) * weights).sum(), inputs)
    for one, other in zip(found, want, strict=True):
        assert error(one, other) < 1e-8


@each
@pytest.mark.parametrize("sizes", [[1] * TOKENS, [1, 4, 1, 1, 3, 7]], ids=["tokens", "chunks"])
@torch.no_grad()
def test_what_is_kept_goes_on_as_the_whole(analog: LinearAttentionConfig, sizes) -> None:
    """By the cache, and by what vLLM keeps, in pages and out of them."""
    branch, (keep, _) = made(analog), padding()
    given, memory, kept, found = streams(branch), StateLayer(), None, list[list[Tensor]]()
    paged = tuple(torch.cat([x, x])[:3] for x in branch.kept_before(*given))
    for own in zip(*(s.split(sizes, 1) for s in (*given, keep)), strict=True):
        cached = branch(*own, None, memory)
        begins, pages = kept is None, torch.tensor([2, 0])
        in_pages = branch.read_in_pages(paged, pages, *own, begins=begins)
        after, kept = branch.read_after(kept, *own)
        found.append([cached, after, in_pages])
    want = branch(*given, keep, None, None) * keep[..., None, None]
    for parts in zip(*found, strict=True):
        assert error(torch.cat(parts, 1) * keep[..., None, None], want) < EXACT
    assert [x.shape for x in kept or ()] == [x.shape for x in branch.kept_before(*given)]


@each
@pytest.mark.parametrize("cut", [3, 7, 10, 15])
@torch.no_grad()
def test_the_last_document_goes_on_behind_the_cache(analog: LinearAttentionConfig, cut) -> None:
    branch, placed = made(analog), documents()
    given, memory = (*streams(branch), *placed), StateLayer()
    parts = (slice(cut), slice(cut, None))
    found = torch.cat([branch(*(s[:, part] for s in given), memory) for part in parts], 1)
    there = placed[0][..., None, None]
    assert error(found * there, branch(*given, None) * there) < EXACT


@each
@torch.no_grad()
def test_tokens_are_taken_back(analog: LinearAttentionConfig) -> None:
    """Sinks, too."""
    branch = made(analog)
    given = streams(branch)
    want = branch(*given, None, None, None)
    for first, wrong in ((1, 3), (1, 6), (4, 5), (9, 2)):
        memory = StateLayer()
        branch(*(s[:, :first] for s in given), None, None, memory)
        memory.activate_past_recording()
        pairs = [(s[:, first : first + 1], s.flip(1)[:, :wrong]) for s in given]
        branch(*map(torch.cat, pairs, [1] * 3), None, None, memory)
        memory.crop(-wrong)
        rest = branch(*(s[:, first + 1 :] for s in given), None, None, memory)
        assert error(rest, want[:, first + 1 :]) < EXACT


@each
@torch.no_grad()
def test_every_method_is_the_definition(analog: LinearAttentionConfig) -> None:
    branch, (keep, segments) = made(analog), documents()
    given = streams(branch)
    record, want = branch.record(*given, keep, segments), literal(branch, given, keep, segments)
    for method in (Recurrent(), Chunkwise(4), Parallel(), Auto()):
        found, _ = evaluate(record, method=method)
        assert error(found * keep[..., None, None], want) < EXACT


def test_softmax_hands_over_what_it_has_read() -> None:
    """And landmarks with sinks are nearer to it than without, of which clusters have no keys."""
    ids, errors = torch.randint(3, VOCABULARY, (2, 40), generator=Generator().manual_seed(3)), []
    with torch.no_grad():
        want = teacher()(ids).logits[:, -1]
        for sinks in (0, 4):
            model = linearize(teacher(), LinearAttentionConfig("landmarks", 8, 4, sinks=sinks))
            place_landmarks(model, [{"input_ids": ids}])
            handed = read_by_softmax(model, ids[:, :-1], piece=7)
            errors.append(error(model(ids[:, -1:], past_key_values=handed).logits[:, -1], want))
    assert errors[1] < errors[0]


def test_clusters_have_no_keys_of_sinks() -> None:
    """Of no document."""
    ids = torch.randint(3, VOCABULARY, (1, 24), generator=Generator().manual_seed(3))
    places = torch.cat([torch.arange(10), torch.arange(14)])[None]
    analog = LinearAttentionConfig("landmarks", 9, window=4, sinks=3)
    models = [linearize(teacher(), analog) for _ in range(3)]
    place_landmarks(models[0], [{"input_ids": ids, "position_ids": places}])
    place_landmarks(models[1], [{"input_ids": part} for part in ids.split([10, 14], 1)])
    one, other = (branches(model)[2].phi_k.W for model in models[:2])
    assert error(one, other) < 1e-4
    with pytest.raises(ValueError, match=r"18 landmarks in each head of layer 0, .* 17 keys"):
        place_landmarks(models[2], [{"input_ids": ids[:, :20]}])


def test_state_is_that_of_the_plan() -> None:
    """A sink more is a key, a value and a place in the normaliser more."""
    sizes = [
        plan(teacher(), LinearizationRecipe(replace(ANALOGS["sinks-2"], sinks=sinks), ())).state
        for sinks in (1, 2, 3)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == LAYERS * 2 * (8 + 8 + 1) * 4


def test_it_computes_in_bfloat16() -> None:
    model, inputs = student(analog=ANALOGS["sinks-2"]), padded()
    want, narrow = logits(model, inputs), model.to(torch.bfloat16)
    assert error(logits(narrow, inputs).float(), want) < 0.2
