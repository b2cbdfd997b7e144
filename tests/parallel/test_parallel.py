"""Slices of sequences on several processes, beside whole sequences on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastweights import MIXERS
from kinds import first_of_each, form_of
from processes import Report, run_together
from sliced_models import (
    compare_checkpointed,
    compare_models,
    compare_sharded_parameters,
    compare_states,
)
from sliced_refusals import check_refusals, count_bytes
from sliced_rules import compare_rounded_rules, compare_rules, compare_some_rules
from tiny import LAYERS

FOUR = ("hybrid", "shared", "h3", "lolcats", "mlstm", "mesa_signed")
"""The models that four processes read: convolutions and windows longer than their slices."""
KINDS = first_of_each(LAYERS, form_of)
"""The rules that they end in are compared by themselves."""


def on_two_processes() -> Report:
    return {
        **compare_some_rules(),
        **compare_models(KINDS),
        **compare_checkpointed(),
        **compare_states([name for name in KINDS if name in MIXERS]),
        **check_refusals(),
        **count_bytes(),
    }


def others_on_two_processes() -> Report:
    return {
        **compare_models([name for name in LAYERS if name not in KINDS]),
        **compare_states([name for name in MIXERS if name not in KINDS]),
    }


def on_four_processes() -> Report:
    return {**compare_models(FOUR), **compare_sharded_parameters()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_together(2, on_two_processes, tmp_path_factory.mktemp("two"))


def beyond(report: Report, kind: str, tolerance: float) -> Report:
    """What of the `kind` is not as close as it should be."""
    found = {name: error for name, error in report.items() if kind in name}
    assert found
    return {name: error for name, error in found.items() if not error <= tolerance}


@pytest.mark.slow
def test_some_rules_on_two_processes(two: Report) -> None:
    assert not beyond(two, "float64", 1e-10)


@pytest.mark.slow
def test_rules_on_two_processes(tmp_path: Path) -> None:
    assert not beyond(run_together(2, compare_rules, tmp_path), "float64", 1e-10)


@pytest.mark.slow
def test_rules_in_float32_on_two_processes(tmp_path: Path) -> None:
    assert not beyond(run_together(2, compare_rounded_rules, tmp_path), "float32", 1e-5)


@pytest.mark.slow
def test_rules_on_four_processes(tmp_path: Path) -> None:
    assert not beyond(run_together(4, compare_rules, tmp_path), "float64", 1e-10)


@pytest.mark.parametrize("kind", ["plain", "packed and padded", "checkpointed", "state of"])
def test_models_on_two_processes(two: Report, kind: str) -> None:
    assert not beyond({n: e for n, e in two.items() if "float" not in n}, kind, 1e-10)


@pytest.mark.slow
def test_other_models_of_the_same_kinds_on_two_processes(tmp_path: Path) -> None:
    assert not beyond(run_together(2, others_on_two_processes, tmp_path), "", 1e-10)


@pytest.mark.slow
def test_models_on_four_processes(tmp_path: Path) -> None:
    assert not beyond(run_together(4, on_four_processes, tmp_path), "", 1e-10)


def test_refusals(two: Report) -> None:
    assert not {name: missed for name, missed in two.items() if missed == 1}


def test_bytes_of_a_state_do_not_depend_on_the_length(two: Report) -> None:
    """A state [2 4 4] and a decay [2 1 1] forward, and the gradient of both backward."""
    assert two["TimeSharded, 16"] == two["TimeSharded, 64"] == 2 * 4 * (2 * 4 * 4 + 4)


def test_bytes_of_heads_are_those_of_streams(two: Report) -> None:
    """Of q, k, v, o and their gradients half the heads, and of the decay's."""
    for t in (16, 64):
        assert two[f"HeadSharded, {t}"] == 2 * 4 * t * (4 * 4 + 1)
