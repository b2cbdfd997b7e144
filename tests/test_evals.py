"""Losses by position, multiple choice and recall against literal loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from fastweights.evals.perplexity import (
    PositionLoss,
    draw,
    losses_by_position,
    nll_by_position,
    octaves,
    token_losses,
)
from tiny import VOCABULARY, tiny, tokens
from tolerances import TOLERANCE, assert_close, error

LENGTH = 13


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2))


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def foreign(make) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().double().eval()


MODELS = {"hybrid": lambda: tiny("hybrid"), "gpt2": lambda: foreign(gpt2), "llama": lambda: foreign(llama)}
every_model = pytest.mark.parametrize("name", MODELS)


@torch.no_grad()
def by_prefixes(model: PreTrainedModel, sequence: list[int]) -> list[float]:
    """-log p of every token but the first, from one forward pass per prefix."""
    losses = []
    for k in range(1, len(sequence)):
        logits = model(input_ids=torch.tensor([sequence[:k]]), use_cache=False).logits[0, -1].double().numpy()
        losses.append(float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[sequence[k]]))
    return losses


# loss by position ---------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
def test_losses_are_those_of_every_prefix(name: str, chunk: int | None) -> None:
    model, ids = MODELS[name](), tokens(2, LENGTH)
    want = np.array([by_prefixes(model, row) for row in ids.tolist()])
    assert_close(token_losses(model, ids, chunk), want, name)


@every_model
def test_positions_are_averaged_over_the_sequences_that_reach_them(name: str) -> None:
    """30 tokens in sequences of 13 that share their ends: two whole ones and one of 6."""
    model, stream = MODELS[name](), tokens(30).numpy()
    loss = nll_by_position(model, stream, LENGTH, batch=2, chunk=4)
    rows = [by_prefixes(model, stream[start : start + LENGTH].tolist()) for start in (0, 12, 24)]
    for k in range(LENGTH - 1):
        reached = [row[k] for row in rows if len(row) > k]
        assert loss.counts[k] == len(reached)
        assert abs(loss.nll[k] - np.mean(reached)) < TOLERANCE[torch.float64]
        seen = [value for row in rows for value in row[: k + 1]]
        assert abs(loss.mean_so_far[k] - np.mean(seen)) < TOLERANCE[torch.float64]
    everything = [value for row in rows for value in row]
    assert len(everything) == len(stream) - 1
    assert abs(loss.perplexity - np.exp(np.mean(everything))) < 1e2 * TOLERANCE[torch.float64]


def test_bfloat16_logits_give_float32_losses() -> None:
    model, ids = tiny("metala", torch.bfloat16), tokens(1, LENGTH)
    losses = token_losses(model, ids)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float().numpy().astype(np.float64)
    want = [np.log(np.exp(z).sum()) - z[target] for z, target in zip(logits, ids[0, 1:].tolist(), strict=True)]
    assert losses.dtype == torch.float32
    assert_close(losses[0], np.array(want), "bfloat16")


def test_the_model_stays_as_it_was() -> None:
    model = tiny("metala", embedding_dropout=0.5).train()
    first, second = (token_losses(model, tokens(1, LENGTH)) for _ in range(2))
    assert torch.equal(first, second)
    assert model.training


def test_differences_pools_and_units() -> None:
    counts = np.array([2, 2, 1])
    one = PositionLoss(np.array([4.0, 2.0, 3.0]), counts, tokens_per_byte=0.5)
    other = PositionLoss(np.array([2.0, 2.0, 1.0]), counts)
    assert one.minus(other).tolist() == [1.0, 0.0, 2.0]
    assert one.pooled(np.array([1, 2, 4])).tolist() == [2.0, 5 / 3]
    assert one.mean == 9 / 5
    assert one.bits_per_byte == 9 / 5 * 0.5 / np.log(2)
    assert other.bits_per_byte is None
    with pytest.raises(ValueError, match="compare them on the same sequences"):
        one.minus(PositionLoss(np.ones(3), np.array([2, 2, 2])))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 255, 1000])
def test_octaves_have_every_position_once(n: int) -> None:
    edges = octaves(n)
    assert edges[0] == 1
    assert edges[-1] == n + 1
    assert (np.diff(edges) > 0).all()


def test_saved_losses_are_the_same(tmp_path: Path) -> None:
    loss = nll_by_position(tiny(), tokens(40).numpy(), LENGTH, tokens_per_byte=0.25)
    loss.save(tmp_path / "loss.json")
    again = PositionLoss.load(tmp_path / "loss.json")
    assert np.array_equal(again.sums, loss.sums)
    assert np.array_equal(again.counts, loss.counts)
    assert again.bits_per_byte == loss.bits_per_byte


def test_drawn_curves_are_the_pooled_losses() -> None:
    stream = tokens(200).numpy()
    losses = {name: nll_by_position(MODELS[name](), stream, 50) for name in MODELS}
    figure = draw(losses, reference="gpt2", trained=20)
    left, right = figure.axes
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in left.lines}
    for name, loss in losses.items():
        assert np.allclose(lines[name], loss.pooled(octaves(49)), rtol=TOLERANCE[torch.float64])
    assert {line.get_label() for line in right.lines} >= set(MODELS)


def test_a_model_without_a_cache_is_read_whole() -> None:
    """transformers' Mamba keeps its state elsewhere."""
    model = foreign(lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)))
    ids = tokens(1, LENGTH)
    assert error(token_losses(model, ids), np.array([by_prefixes(model, ids[0].tolist())])) < TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match="chunk=None"):
        token_losses(model, ids, chunk=4)


@pytest.mark.parametrize(("count", "length"), [(1, 5), (5, 1)])
def test_too_few_tokens(count: int, length: int) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        nll_by_position(tiny(), tokens(count).numpy(), length)


def test_batches_may_differ_in_length() -> None:
    model = tiny()
    batches: list[Tensor] = [tokens(2, 5), tokens(1, 9, seed=1)]
    loss = losses_by_position(model, batches, None)
    assert loss.counts.tolist() == [3] * 4 + [1] * 4
