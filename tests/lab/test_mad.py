"""MAD: the sequences of its code for the same draws, the same law for draws of our own, its 66
settings.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distributions import assert_same_law, rng
from fastweights.lab.tasks import TASKS
from fastweights.lab.tasks.mad import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    Motifs,
    SelectiveCopying,
    copying,
    fuzzy,
    recall,
)
from fastweights.models.loss import IGNORE_INDEX
from oracles import generators


@pytest.mark.parametrize(
    ("vocabulary", "noise_tokens", "noise"), [(16, 0, 0.0), (32, 16, 0.2), (32, 16, 0.8)]
)
def test_recall_has_the_tokens_of_the_reference(
    vocabulary: int, noise_tokens: int, noise: float
) -> None:
    generator = rng()
    for _ in range(50):
        told = generators.mad_recall(generator, vocabulary, 128, noise_tokens, noise)
        meaning = np.array(
            [[told.meaning.get(key, 0) for key in range((vocabulary - noise_tokens) // 2)]]
        )
        tokens, labels = recall(
            np.array([told.keys]), meaning, np.array([told.fillers]), np.array([told.probe])
        )
        assert tokens[0].tolist() == told.tokens
        assert labels[0].tolist() == told.labels


@pytest.mark.parametrize(("noise_tokens", "noise"), [(0, 0.0), (16, 0.2)])
def test_recall_has_the_law_of_the_reference(noise_tokens: int, noise: float) -> None:
    generator = rng(1)
    told = [
        generators.mad_recall(generator, 16 + noise_tokens, 64, noise_tokens, noise)
        for _ in range(400)
    ]
    train, test = (
        InContextRecall(16 + noise_tokens, 64, noise_tokens, noise, known=known).draw(rng(2), 2_000)
        for known in (False, True)
    )
    assert torch.equal(train.inputs, test.inputs)
    assert torch.equal(train.inputs[:, 1:], train.labels[:, :-1])
    assert train.inputs.shape == (2_000, 63)
    theirs_scored = [sum(label != IGNORE_INDEX for label in one.labels) for one in told]
    assert_same_law((test.labels != IGNORE_INDEX).sum(1), theirs_scored, "scored tokens")
    assert_same_law(test.inputs.flatten(), [t for one in told for t in one.tokens[:-1]], "tokens")
    assert_same_law(test.inputs[:, -1], [one.probe for one in told], "the last key")
    assert (
        test.labels[test.labels != IGNORE_INDEX] == train.labels[test.labels != IGNORE_INDEX]
    ).all()


def padded(motifs: list[tuple[int, ...]], count: int) -> np.ndarray:
    """``[count 3]``: all but the last in front, then what no sequence comes to, then the last."""
    every = motifs[:-1] + [(motifs[-1][0] + 1 if len(motifs) > 1 else motifs[-1][0],)] * (
        count - len(motifs)
    )
    return np.array([[*motif, -1, -1][:3] for motif in [*every, motifs[-1]]])


@pytest.mark.parametrize("testing", [False, True])
@pytest.mark.parametrize(("vocabulary", "length"), [(16, 32), (16, 64), (9, 128)])
def test_fuzzy_recall_has_the_tokens_of_the_reference(
    vocabulary: int, length: int, testing: bool
) -> None:
    generator = rng()
    told = [
        generators.mad_fuzzy(generator, vocabulary, length, 3, testing=testing) for _ in range(100)
    ]
    keys, values = (
        np.stack([padded(getattr(one, part), length // 2 + 1) for one in told])
        for part in ("keys", "values")
    )
    tokens, labels = fuzzy(
        Motifs(keys, values, np.array([one.place for one in told])), length, vocabulary - 1
    )
    np.testing.assert_array_equal(tokens, [one.tokens for one in told])
    np.testing.assert_array_equal(labels, [one.labels for one in told])


@pytest.mark.parametrize("testing", [False, True])
def test_fuzzy_recall_has_the_law_of_the_reference(testing: bool) -> None:
    generator = rng(1)
    told = [generators.mad_fuzzy(generator, 16, 64, 3, testing=testing) for _ in range(600)]
    batch = FuzzyRecall(16, 64, known=testing).draw(rng(2), 3_000)
    assert_same_law(batch.inputs.flatten(), [t for one in told for t in one.tokens[:-1]], "tokens")
    assert_same_law(
        (batch.inputs == 15).sum(1), [one.tokens[:-1].count(15) for one in told], "padding"
    )
    if testing:
        scored = [sum(label != IGNORE_INDEX for label in one.labels) for one in told]
        assert_same_law((batch.labels != IGNORE_INDEX).sum(1), scored, "scored tokens")
    else:
        assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])


def test_fuzzy_recall_scores_four_and_a_half_tokens() -> None:
    """As measured on the reference at its baseline (protocols: about 4.5)."""
    batch = FuzzyRecall(known=True).draw(rng(), 2_000)
    assert (batch.labels != IGNORE_INDEX).sum(1).double().mean().item() == pytest.approx(
        4.5, abs=0.4
    )


def test_memorization_has_the_table_of_the_reference() -> None:
    keys, values = Memorization().table
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == generators.mad_table(
        256, 12345
    )
    batch = Memorization().draw(rng(), 50)
    table = generators.mad_table(256, 12345)
    assert (batch.inputs[:, 1::2] == 255).all()
    assert (batch.labels[:, 0::2] == IGNORE_INDEX).all()
    assert batch.labels[:, 1::2].flatten().tolist() == [
        table[key] for key in batch.inputs[:, 0::2].flatten().tolist()
    ]


def test_selective_copying_has_the_tokens_of_the_reference() -> None:
    generator = np.random.RandomState(0)
    for _ in range(20):
        tokens, before, inputs, labels = generators.mad_copying(generator, 16, 64, 8)
        ours = copying(tokens[None], before[None], 16)
        np.testing.assert_array_equal(ours[0][0], inputs)
        np.testing.assert_array_equal(ours[1][0], labels)
    drawn = SelectiveCopying(16, 64, 8).draw(rng(), 2_000).inputs
    theirs = [generators.mad_copying(generator, 16, 64, 8)[2] for _ in range(500)]
    for place in (0, 20, 46):
        assert_same_law(drawn[:, place], [row[place] for row in theirs], f"token {place}")
    with pytest.raises(ValueError, match="above 33"):
        SelectiveCopying(length=33, tokens=16)


def test_compression_asks_for_every_token() -> None:
    batch = Compression().draw(rng(), 500)
    assert torch.equal(batch.inputs, batch.labels)
    assert (batch.inputs[:, -1] == 15).all()
    assert set(batch.inputs[:, :-1].unique().tolist()) == set(range(15))


def test_there_are_66_settings() -> None:
    repo = [name for name in TASKS if name.startswith("mad-repo-")]
    tasks = {(TASKS[name].train[0], TASKS[name].test[0]) for name in repo}
    assert len(repo) == len(tasks) == 66
    runs = sum(len(TASKS[name].training.rates) * len(TASKS[name].training.decays) for name in repo)
    assert runs == 396
    assert {TASKS[name].test[0].examples for name in repo} == {1_280}


@pytest.mark.parametrize("version", ["repo", "scheduled"])
def test_hyenas_filter_reaches_all_tokens_of_every_setting(version: str) -> None:
    for name, protocol in TASKS.items():
        if name.startswith(f"mad-{version}-"):
            (mixer,) = protocol.backbone.contenders["hyena"]["mixers"]
            lengths = {part.task.length for part in (*protocol.train, *protocol.test)}
            assert lengths == {mixer["length"]}, name


def test_a_reconstruction_needs_the_last_vector_alone() -> None:
    protocol = TASKS["mad-repo-compression"]
    torch.manual_seed(0)
    model = protocol.model("softmax", hidden_size=32).eval()
    batch = protocol.test[0].task.draw(rng(), 3)
    full = model(batch.inputs, labels=batch.labels)
    assert full.logits.shape == (3, 32, 16)
    torch.testing.assert_close(protocol.task.loss(model, batch), full.loss)
    assert protocol.task.score(protocol.task.logits(model, batch), batch).loss == pytest.approx(
        full.loss.item(), rel=1e-5
    )
    padded = torch.cat([batch.inputs, torch.zeros(3, 4, dtype=torch.long)], dim=1)
    mask = torch.arange(36).expand(3, 36) < 32
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, :32], full.logits)
