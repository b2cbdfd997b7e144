"""The papers' tables: what is computed from the code equals what was published."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fastweights.analysis.conditions import conditions, groups
from fastweights.analysis.cost import cost, operations
from fastweights.analysis.tables import (
    BASELINES,
    DIMENSIONS,
    TABLES,
    check_mark,
    conditions_of,
    group_names,
    group_of,
    heads_of,
    page,
    row,
)
from fastweights.cli import main
from fastweights.layers import TokenContext
from fastweights.methods import Recurrent, evaluate
from fastweights.mixer import Mixer
from fastweights.mixers import MIXERS, make
from fastweights.recurrence import Decay, Delta, Mesa
from fastweights.shapes import Embedded

PUBLISHED = {
    "softmax": "✗ ✓ ✓ –",
    "retnet": "Q, K, Λ: ✓ ✗ ✗ ✗",
    "transnormer": "Q, K, Λ: ✓ ✗ ✗ ✗",
    "s4d": "Q, K, Λ: ✓ ✗ ✗ ✗",
    "h3": "Q, K, Λ: ✓ ✗ ✗ ✗",
    "dss": "Q, K, Λ: ✓ ✗ ✗ ✗",
    "gla": "Q, K, Λ_t: ✓ ✓ ✓ ✗",
    "mamba": "Q, K, Λ_t: ✓ ✓ ✓ ✗",
    "linear": "Q, K: ✓ ✗ ✓ ✗",
    "rfa": "Q, K: ✓ ✗ ✓ ✗",
    "performer": "Q, K: ✓ ✗ ✓ ✗",
    "cosformer": "Q, K: ✓ ✗ ✓ ✗",
    "rwkv4": "K, Λ: ✓ ✗ ✗ ✗",
    "metala": "Q, Λ_t: ✓ ✓ ✓ ✓",
    "lru": "Λ: ✓ ✗ ✗ ✗",
    "s5": "Λ: ✓ ✗ ✗ ✗",
    "glru": "K, Λ_t: ✓ ✓ ✗ ✗",
    "hgrn": "Λ_t: ✓ ✓ ✗ ✗",
    "rglru": "Λ_t: ✓ ✓ ✗ ✗",
}
"""MetaLA's Table 2: groups, C0 C1 C2 C3."""

KEY_IN_C = {"dss", "s4d"}
"""Their B is 1 and part of C: the table's K has no parameters of its own."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_conditions_are_those_of_metalas_table_2(name: str) -> None:
    assert " ".join(map(check_mark, conditions_of(name))) == PUBLISHED[name].split(": ")[-1]


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"softmax"}))
def test_groups_are_those_of_metalas_table_2(name: str) -> None:
    want = PUBLISHED[name].split(": ")[0]
    assert group_names(group_of(name)) == (want.replace("K, ", "") if name in KEY_IN_C else want)


@pytest.mark.parametrize(
    ("name", "arguments", "want"),
    [
        ("rfa", {"gated": True}, "Q, K, Λ_t"),
        ("s4d", {"bilinear": True}, "Q, Λ"),
        ("metala", {"restore_key": True}, "Q, K, Λ_t"),
        ("mamba2", {"decays": False}, "Q, K"),
        ("softmax", {"window": 8}, "Q, K"),
    ],
)
def test_groups_follow_the_arguments(name: str, arguments: dict[str, object], want: str) -> None:
    assert group_names(groups(make(name, 16, **arguments))) == want


def test_a_window_makes_softmax_linear_in_time() -> None:
    assert conditions(make("softmax", 16, window=8)) == conditions_of("swa")
    assert [check_mark(met) for met in conditions_of("swa")] == ["✓", "✗", "✓", "–"]


class Unselective(Mixer):
    """Only a query: one attention map for all tokens (the row "Q or K" of Table 2)."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.W_q = nn.Linear(d, d)
        self.W_o = nn.Linear(d, d)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor | None]:
        one = x.new_ones(1, 1, 1, 1)
        return Decay(
            self.W_q(x)[:, :, None], one.expand(1, 1, 1, self.d), x[:, :, None], None
        ), None


def test_a_query_alone_meets_no_condition_but_linearity() -> None:
    found = Unselective(4)
    assert group_names(groups(found)) == "Q"
    assert [check_mark(met) for met in conditions(found)] == ["✓", "✗", "✗", "✗"]


@pytest.mark.parametrize("name", MIXERS)
def test_docstrings_are_table_rows(name: str) -> None:
    found = row(MIXERS[name])
    assert {"f_q", "f_k", "f_v", DIMENSIONS} <= found.keys()
    assert all(cell and not cell.startswith(("f_", "o_")) for cell in found.values())
    assert "d_v" in found[DIMENSIONS]


def test_a_docstring_that_is_no_row() -> None:
    with pytest.raises(
        ValueError, match="docstring of Unselective does not begin with a table row"
    ):
        row(Unselective)


def test_a_row_is_read_cell_by_cell() -> None:
    assert row(MIXERS["metala"]) == {
        "f_q": "x W_Q",
        "f_k": "1 - α",
        "f_v": "x W_V",
        "f_α": "σ(x W_α)^(1/τ), τ = 16",
        "f_g": "SiLU(x W_G + b_G)",
        DIMENSIONS: "d_k = d/2, d_v = d",
    }


DIMENSIONED = {
    "linear": (1, 1),
    "retnet": (1, 2),
    "gla": (0.5, 1),
    "metala": (0.5, 1),
    "hgrn": (1, 1),
    "rwkv4": (1, 1),
    "s4d": (32, 1),
    "mamba": (32, 2),
}
"""(d_k, d_v) / d of the tables; S4D keeps half of its N = 64 conjugate states, Mamba has N = 16,
d_v = 2d.
"""


@pytest.mark.parametrize("name", DIMENSIONED)
def test_dimensions_are_those_of_metalas_tables(name: str) -> None:
    d = 32
    x = torch.zeros(1, 1, d)
    record, _ = make(name, d).project(x, TokenContext.start(x))
    h, (k, v) = record.shape[2], DIMENSIONED[name]
    assert (h * record.streams["q"].shape[-1], h * record.values) == (k * d, v * d)


@pytest.mark.parametrize(
    ("name", "squares", "least", "most"),
    [("metala", 4, 0, 6), ("gla", 4, 24, 26), ("retnet", 8, 0, 0)],
)
def test_parameters_are_those_of_metalas_text(
    name: str, squares: int, least: int, most: int
) -> None:
    """4d², 4d² + 24d and 8d²; MetaLA's biases, convolution and w_aug, and GLA's biases and norm
    come on top.
    """
    d = 256
    assert least * d <= cost(make(name, d)).parameters - squares * d**2 <= most * d


TABLE_3 = {
    "mamba2": (Decay, True, None),
    "gla": (Decay, True, "v"),
    "deltanet": (Delta, False, "beta"),
    "gated_deltanet": (Delta, True, "beta"),
    "mlstm": (Decay, True, "log_gain"),
    "mesa": (Mesa, True, "beta"),
}
"""Rule, whether γ_t, a scalar per head, decays the state, and the stream in which β_t is."""


@pytest.mark.parametrize("layer", TABLE_3)
def test_rules_are_those_of_mesanets_table_3(layer: str) -> None:
    rule, forgets, gated = TABLE_3[layer]
    name, arguments = BASELINES[layer]
    mixer = make(name, 16, **arguments)
    x = torch.randn(1, 3, 16)
    record, _ = mixer.project(x, TokenContext.start(x))
    streams = record.streams
    assert type(record.innermost) is rule
    assert ("log_decay" in streams) == forgets
    assert not forgets or streams["log_decay"].shape == (1, 3, 4, 1)
    gates = [parameter for name, parameter in mixer.named_parameters() if name.startswith("W_beta")]
    assert bool(gates) == (gated is not None)
    if gated is not None:
        assert all(
            gradient.any() for gradient in torch.autograd.grad(streams[gated].sin().sum(), gates)
        )


def test_table_3_says_which_gates_there_are() -> None:
    said = {cells[0]: (cells[3] != "1", cells[4] != "1") for cells in TABLES["mesanet-3"]().rows}
    assert said == {
        layer: (forgets, gated is not None) for layer, (_, forgets, gated) in TABLE_3.items()
    }


def products(record_name: str, width: int, steps: int = 30) -> float:
    return heads_of(width, steps)[record_name].step_operations(2048) / width**2


def test_states_are_those_of_mesanets_table_4() -> None:
    n = 64
    sizes = {name: record.state_size(100) for name, record in heads_of(n).items()}
    assert sizes == {"MHA": 2 * n * 100, "GLMHA": n**2, "(gated) DeltaNet": n**2, "Mesa": 2 * n**2}


@pytest.mark.parametrize("name", ["GLMHA", "(gated) DeltaNet"])
def test_linear_rules_take_n_squared_operations(name: str) -> None:
    assert products(name, 64) == products(name, 512)


def test_mesa_takes_k_times_n_squared_more() -> None:
    assert 2 < products("Mesa", 128, 11) - products("Mesa", 128, 10) < 2.2
    assert products("Mesa", 4096, 0) == pytest.approx(8)


def test_attention_takes_n_times_t() -> None:
    attention = heads_of(64)["MHA"]
    assert attention.step_operations(1999) * 2 == attention.step_operations(3999)


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_state_sizes_are_the_states_sizes(name: str) -> None:
    mixer, context = make(name, 32), 5
    _, state = mixer(torch.zeros(1, context, 32))
    memory = state.memory if isinstance(state.memory, tuple) else (state.memory,)
    numbers = [
        *(s for s in memory if s.is_floating_point() or s.is_complex()),
        *state.tails.values(),
    ]
    assert cost(mixer, context).state == sum(
        s.numel() * (2 if s.is_complex() else 1) for s in numbers
    )


@pytest.mark.parametrize("length", [8, 64])
def test_what_is_made_of_weights_alone_is_no_cost_of_a_token(length: int) -> None:
    mixer = make("hyena", 16, length=length)
    for _ in range(2):  # no filter is kept before the first
        assert operations(mixer, 4).projections == 4 * 2 * 16**2


def test_operations_of_a_step_are_at_least_its_matrix_products() -> None:
    for record in heads_of(32).values():
        with FlopCounterMode(display=False) as counter:
            evaluate(record, method=Recurrent())
        assert counter.get_total_flops() <= record.step_operations(0)


def test_the_command_prints_one_table_in_three_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "mesanet-4"]) == 0
    assert "GLMHA" in capsys.readouterr().out
    assert main(["table", "mesanet-4", "--markdown"]) == 0
    assert capsys.readouterr().out == page([TABLES["mesanet-4"]()]) + "\n"
    assert main(["table", "metala-1", "mesanet-4", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert [entry["model"] for entry in first["rows"]][:2] == ["gla", "transnormer"]
    assert second["title"].startswith("MesaNet, Table 4")


def test_the_command_knows_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "metala-9"]) == 2
    assert "unknown tables: metala-9; there are metala-1" in capsys.readouterr().err
