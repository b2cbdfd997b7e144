"""Tasks: the same tokens as the benchmarks' own generators where draws can be shared, the same law
elsewhere.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from distributions import assert_frequencies, assert_same_law, rng
from fastweights.lab.tasks import (
    MQAR,
    TASKS,
    Batch,
    Cyclic,
    Group,
    ModularArithmetic,
    Permutations,
    Score,
    WordProblem,
)
from fastweights.lab.tasks.mqar import arrange_pairs
from fastweights.lab.tasks.sampling import sample_by_weight, sample_distinct
from fastweights.models.loss import IGNORE_INDEX
from kinds import slow_but
from oracles import generators

# every protocol -----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", TASKS)
def test_protocol_is_a_function_of_seeds(name: str) -> None:
    for part in {segment.task: None for segment in (*TASKS[name].train, *TASKS[name].test)}:
        one, again, other = (part.draw(rng(seed), 3) for seed in (0, 0, 1))
        assert torch.equal(one.inputs, again.inputs)
        assert torch.equal(one.labels, again.labels)
        assert not torch.equal(one.inputs, other.inputs)
        assert len(one) == 3
        assert one.inputs.shape[-1] <= part.length
        assert 0 <= one.targets.min() <= one.targets.max() < part.classes


MODELS = {repr(protocol.backbone): name for name, protocol in reversed(TASKS.items())}.values()
"""The first protocol of each backbone."""


@pytest.mark.parametrize("name", slow_but(TASKS, MODELS))
def test_protocol_has_a_model(name: str) -> None:
    protocol = TASKS[name]
    for contender in {"metala", *protocol.backbone.contenders}:
        with torch.device("meta"):
            protocol.model(contender)


# what tasks share ---------------------------------------------------------------------------------


def test_splits_differ_and_validation_is_not_test() -> None:
    protocol = TASKS["mqar-small-32x4"]
    (validation,), (test,) = protocol.validation_set(0), protocol.test_set(0)
    assert len(validation) == len(test) == 1_000
    assert not torch.equal(validation.inputs, test.inputs)
    assert torch.equal(protocol.fresh(0, 5, 2).inputs, protocol.fresh(0, 5, 2).inputs)
    assert not torch.equal(protocol.fresh(0, 5, 2).inputs, protocol.fresh(0, 6, 2).inputs)
    with pytest.raises(ValueError, match=r"fresh\(\)"):
        protocol.training_set(0)


def test_loss_and_score_are_those_of_the_labelled_positions() -> None:
    protocol = TASKS["mqar-small-32x4"]
    torch.manual_seed(0)
    model, batch = protocol.model("softmax").eval(), protocol.fresh(0, 0, 5)
    every = model(batch.inputs).logits
    wanted = F.cross_entropy(every.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)
    logits = protocol.task.logits(model, batch)
    score = protocol.task.score(logits, batch)
    torch.testing.assert_close(protocol.task.loss(model, batch), wanted)
    assert score.loss == pytest.approx(wanted.item(), rel=1e-5)
    right = (every.argmax(-1) == batch.labels).sum() / (batch.labels != IGNORE_INDEX).sum()
    assert score.accuracy == pytest.approx(right.item())
    assert (batch.labels[0, batch.positions[:4]] == batch.targets[:4]).all()


def test_macro_accuracy_is_the_mean_over_classes() -> None:
    class Labels(MQAR):
        pass

    task = Labels(vocabulary=16)
    batch = Batch(torch.zeros(1, 5), torch.tensor([[1, 1, 1, 1, 2]]))
    score = task.score(F.one_hot(torch.tensor([1, 1, 1, 1, 1]), 16).float(), batch)
    assert (score.accuracy, score.macro_accuracy) == (0.8, 0.5)
    predicted_else = task.score(F.one_hot(torch.tensor([1, 1, 1, 1, 3]), 16).float(), batch)
    assert predicted_else.macro_accuracy == pytest.approx(1 / 3)
    both: Score = score + predicted_else
    assert both.accuracy == 0.8
    assert int(both.labelled.sum()) == 10


def test_rows_of_a_batch() -> None:
    batch = TASKS["mqar-small-32x4"].fresh(0, 0, 5)
    assert torch.equal(batch[1:3].inputs, batch.inputs[1:3])
    assert batch[torch.tensor([4, 0])].to(torch.device("cpu")).labels.equal(batch.labels[[4, 0]])


# sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 3), (3, 5), (20, 21)])
def test_distinct_draws(count: int, size: int) -> None:
    drawn = sample_distinct(rng(), 4_000, count, size)
    assert (np.sort(drawn, 1)[:, 1:] != np.sort(drawn, 1)[:, :-1]).all()
    for column in drawn.T[:3]:
        assert_frequencies(
            np.bincount(column, minlength=size), np.full(size, 1 / size), "one column"
        )
    if (count, size) == (3, 5):
        ordered = np.unique(drawn @ [25, 5, 1], return_counts=True)[1]
        assert_frequencies(ordered, np.full(60, 1 / 60), "ordered triples")


def test_weighted_draws_have_the_law_of_successive_draws() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = sample_by_weight(rng(), 20_000, 2, weights)
    p = np.array(
        [
            [0 if i == j else a * b / (1 - a) for j, b in enumerate(weights)]
            for i, a in enumerate(weights)
        ]
    )
    assert_frequencies(np.bincount(drawn @ [4, 1], minlength=16), p.ravel(), "ordered pairs")


@pytest.mark.parametrize(
    "draw",
    [lambda: sample_distinct(rng(), 1, 4, 3), lambda: sample_by_weight(rng(), 1, 4, np.ones(3))],
)
def test_too_few_to_draw_from(draw: object) -> None:
    with pytest.raises(ValueError, match="4 distinct numbers are to be drawn out of 3"):
        draw()  # type: ignore[operator]


# MQAR ---------------------------------------------------------------------------------------------


def test_mqar_has_the_tokens_of_the_reference() -> None:
    want = generators.mqar(np.random.RandomState(3), 50, vocabulary=96, length=64, pairs=8)
    inputs, labels = arrange_pairs(want.keys, want.values, want.slots, 64)
    np.testing.assert_array_equal(inputs, want.inputs)
    np.testing.assert_array_equal(labels, want.labels)


@pytest.mark.parametrize(
    ("length", "pairs", "mean", "median"), [(64, 4, 7.1, 4), (128, 8, 14.1, 8), (512, 80, 62.4, 50)]
)
def test_mqar_slots_have_the_law_of_the_reference(
    length: int, pairs: int, mean: float, median: float
) -> None:
    """Means and medians as measured on Zoology's generator."""
    batch = MQAR(length=length, pairs=pairs).draw(rng(), 2_000)
    slots = (batch.positions.numpy().reshape(2_000, pairs) - 2 * pairs) // 2
    assert slots.mean() == pytest.approx(mean, abs=0.35)
    assert np.median(slots) == pytest.approx(median, abs=1)


def test_mqar_draws_have_the_law_of_the_reference() -> None:
    theirs = generators.mqar(np.random.RandomState(0), 2_000, vocabulary=32, length=32, pairs=3)
    batch = MQAR(vocabulary=32, length=32, pairs=3).draw(rng(), 8_000)
    keys, values = batch.inputs[:, 0:6:2].numpy(), batch.inputs[:, 1:6:2].numpy()
    slots = (batch.inputs[:, None, 6:] == batch.inputs[:, 0:6:2, None]).int().argmax(
        -1
    ).numpy() // 2
    for column in range(3):
        assert_same_law(slots[:, column], theirs.slots[:, column], f"slot {column}")
        assert_frequencies(
            np.bincount(keys[:, column] - 1, minlength=15), np.full(15, 1 / 15), "keys"
        )
        assert_frequencies(
            np.bincount(values[:, column] - 16, minlength=16), np.full(16, 1 / 16), "values"
        )
    assert_same_law(
        slots[:, 0] < slots[:, 1], theirs.slots[:, 0] < theirs.slots[:, 1], "order of the first two"
    )


def test_mqar_noise_takes_the_fillers_places_alone() -> None:
    plain, noisy = (MQAR(vocabulary=64, noise=noise).draw(rng(), 100) for noise in (False, True))
    assert torch.equal(plain.labels, noisy.labels)
    assert torch.equal(plain.inputs[plain.inputs != 0], noisy.inputs[plain.inputs != 0])
    assert len(noisy.inputs[plain.inputs == 0].unique()) == 64


@pytest.mark.parametrize(
    "sizes", [{"length": 63}, {"pairs": 17}, {"vocabulary": 8, "pairs": 4}, {"pairs": 0}]
)
def test_mqar_refuses_what_does_not_fit(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="MQAR"):
        MQAR(**sizes)


# state tracking -----------------------------------------------------------------------------------


def test_parity() -> None:
    batch = TASKS["parity-mesanet"].fresh(0, 0, 20)
    assert batch.inputs.shape == (20, 40)
    assert torch.equal(batch.labels, batch.inputs.cumsum(1) % 2)


@pytest.mark.parametrize(
    ("group", "order"),
    [(Permutations(3), 6), (Permutations(5), 120), (Permutations(5, even=True), 60)],
)
def test_word_problem_composes_permutations(group: Permutations, order: int) -> None:
    elements = [np.eye(group.n, dtype=int)[list(p)] for p in permutations(range(group.n))]
    elements = [
        matrix for matrix in elements if not group.even or round(np.linalg.det(matrix)) == 1
    ]
    batch = WordProblem(group, 30).draw(rng(), 5)
    assert group.order == len(elements) == order
    for word, labels in zip(batch.inputs, batch.labels, strict=True):
        product = np.eye(group.n, dtype=int)
        for g, label in zip(word, labels, strict=True):
            product = product @ elements[g]
            np.testing.assert_array_equal(elements[label], product)


@pytest.mark.parametrize("group", [Cyclic(5), Permutations(3), Permutations(4, even=True)])
def test_group_axioms(group: Group) -> None:
    table, n = group.table, group.order
    assert (table[0] == np.arange(n)).all()
    assert (np.sort(table, 0) == np.arange(n)[:, None]).all()
    assert (table[table] == table[:, table]).all()


def test_modular_arithmetic_is_pythons() -> None:
    task = ModularArithmetic(modulus=7, length=15)
    batch = task.draw(rng(), 30)
    symbols = [*map(str, range(7)), "+", "-", "*"]
    for expression, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        for t in range(0, 15, 2):
            assert labels[t] == eval("".join(symbols[token] for token in expression[: t + 1])) % 7
        assert set(labels[1::2]) == {IGNORE_INDEX}
    with pytest.raises(ValueError, match="odd number"):
        ModularArithmetic(length=4)
