"""Plans of trainings: what follows from what, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fastweights.budget import (
    ACCELERATORS,
    NoRoomError,
    Placing,
    Workload,
    device_memory,
    find_accelerator,
    plan_training,
)
from fastweights.errors import TrainingError
from fastweights.models import FastWeightsConfig

CONFIG = FastWeightsConfig(
    vocab_size=1000, hidden_size=256, num_hidden_layers=4, mixers=[{"name": "metala"}]
)
H100 = find_accelerator("h100")
WORK = Workload(1e9, 1024, 64, H100, Placing(4, bf16=True), price=2.0)


def small(gigabytes: float) -> Workload:
    """The same on devices with less memory."""
    return replace(WORK, device=replace(H100, memory=gigabytes * 1e9))


def test_hours_and_cost_follow_from_operations() -> None:
    found = plan_training(CONFIG, WORK)
    operations = 3 * found.operations.forward + found.recomputed
    assert WORK.steps == -(-int(1e9) // (64 * 1024))
    seconds = WORK.steps * 64 * 1024 * operations / (4 * 989e12 * 0.4)
    assert found.hours == pytest.approx(seconds / 3600)
    assert found.device_hours == pytest.approx(4 * found.hours)
    assert found.cost == pytest.approx(2.0 * found.device_hours)
    assert plan_training(CONFIG, replace(WORK, price=None)).cost is None


def test_recomputing_costs_a_forward_pass_of_the_blocks() -> None:
    plain = plan_training(CONFIG, WORK)
    again = plan_training(CONFIG, replace(WORK, placing=replace(WORK.placing, recompute=True)))
    inside = plain.operations.projections + plain.operations.recurrent
    assert again.executed_operations - plain.executed_operations == inside
    assert again.model_operations == plain.model_operations
    assert again.memory.total < plain.memory.total


def test_weights_take_sixteen_bytes_and_ddp_its_buckets() -> None:
    found = plan_training(CONFIG, WORK)
    everything = 4 * found.parameters.total
    memory = found.memory
    assert (memory.weights, memory.gradients, memory.exchange) == (everything,) * 3
    assert memory.optimizer == 2 * everything
    assert memory.total > 4 * everything + memory.activations - found.parameters.largest_block * 4
    assert found.sent == round(2 * 3 / 4 * everything)


def test_sharding_divides_weights_gradients_and_means() -> None:
    whole, shared = (
        device_memory(CONFIG, Placing(4, shard=shard, bf16=True), H100, 1, 64)
        for shard in (False, True)
    )
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shared, name) == pytest.approx(getattr(whole, name) / 4, rel=1e-6)
    assert shared.total < whole.total / 2


def test_as_few_parts_as_fit() -> None:
    found = plan_training(CONFIG, small(1.2))
    assert found.accumulate > 1
    assert found.memory.excess(found.workload.device) <= 0
    assert found.sequences <= found.most_sequences
    fewer = max(n for n in (1, 2, 4, 8) if n < found.accumulate)
    with pytest.raises(NoRoomError, match=f"--accumulate {found.accumulate} "):
        plan_training(CONFIG, replace(small(1.2), accumulate=fewer))


def test_advice_is_true() -> None:
    work = small(0.15)
    with pytest.raises(NoRoomError) as refused:
        plan_training(CONFIG, work)
    said = str(refused.value)
    assert re.search(r"of each h100 at 1 sequences of 1,024 tokens at once", said)
    options = said.partition("what fits: ")[2].split(" or ")
    assert options[0]
    for option in options:
        parts = re.search(r"--accumulate (\d+)", option)
        placing = replace(
            work.placing, shard="--shard" in option, recompute="--recompute" in option
        )
        assert parts is not None
        plan_training(CONFIG, replace(work, placing=placing, accumulate=int(parts[1])))


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(NoRoomError, match="take more devices, devices with more memory"):
        plan_training(CONFIG, small(0.001))


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(TrainingError, match="batch = 64 is not divisible"):
        plan_training(CONFIG, replace(WORK, placing=Placing(3)))


def test_devices_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean h100"):
        find_accelerator("h1000")
    with pytest.raises(ValueError, match=", ".join(ACCELERATORS)):
        find_accelerator("abacus")
