"""The recipes of the papers' tables, held to the numbers that the tables print."""

from __future__ import annotations

from collections import Counter

import pytest

from fastweights.analysis.tables import TABLES
from fastweights.cli import build_parser
from fastweights.lab.reproduce import CLAIMS
from fastweights.recipes import RECIPES, ROWS, ConversionRecipe, TrainingRecipe
from fastweights.recipes.metala import IMAGE_GAPS, IMAGES

MESANET_7 = """
             Transformer Mamba2 GLA     xLSTM  DeltaNet Gated-DeltaNet Hawk   Hawk-Mesa Mesa
Small-15     0.0025      0.003  0.002   0.0025 0.003    0.001          0.002  0.0025    0.003
Small-50     0.003       0.001  0.001   0.001  0.001    0.001          0.001  0.001     0.00095
Medium-15    0.0015      0.0025 0.0025  0.003  0.003    0.0025         0.0025 0.002     0.0025
Medium-50    0.001       0.001  0.00095 0.0009 0.00085  0.00095        0.0009 0.0009    0.001
Large-15     0.002       0.002  0.002   0.0015 0.0015   0.002          0.002  0.002     0.002
Large-50     0.0008      0.0009 0.00085 0.0008 0.0008   0.0009         0.0009 0.00085   0.00085
"""
"""MesaNet, Table 7, as printed: peak learning rates by size and billions of tokens."""
PARAMETERS = {"Small": 140e6, "Medium": 440e6, "Large": 940e6}
"""Appendix F.4."""

METALA = {
    "MetaLA, Table 4": [(0.41, 15), (0.37, 15), (0.36, 15), (0.36, 15), (1.4, 100)],
    "MetaLA, Table 8": [(0.36, 15)] * 4,
    "MetaLA, Table A8": [(size, 300) for size in (0.4, 1.0, 3.0) for _ in range(3)],
    "MetaLA, Table A9": [
        *[(0.41, 300), (0.38, 300), (1.0, 300), (1.0, 300), (3.0, 300), (3.0, 300)]
    ],
}
"""Billions of parameters and of tokens of the models that the paper trained, as printed; 300 of
Table A8 are ours."""
METALA["MetaLA, Table 4"] += [(1.3, 100), (1.4, 300)]
METALA["MetaLA, Table 5"] = METALA["MetaLA, Table 4"]
METALA["MetaLA, Table A5"] = METALA["MetaLA, Table 4"][4:]

ROW_COUNTS = {
    "MetaLA, Table 4": 11,
    "MetaLA, Table 5": 11,
    "MetaLA, Table 6": 10,
    "MetaLA, Table 8": 4,
    "MetaLA, Table A5": 7,
    "MetaLA, Table A8": 9,
    "MetaLA, Table A9": 9,
    "MesaNet, Table 1": 9,
    "MesaNet, Table 2": 12,
    "MesaNet, Table 3": 6,
    "MesaNet, Table 4": 4,
    "MesaNet, Table 7": 54,
    "MesaNet, Table 8": 16,
    "DSF, Table 1, WikiText-103": 3,
    "DSF, Table 1, LRA": 4,
    "DSF, Table 2": 3,
    "DSF, Table 3": 4,
    "LoLCATs (workshop), Table 1": 7,
    "LoLCATs (workshop), Table 2": 14,
}
"""Rows of each table; of MesaNet's Table 7 the cells, of Table 8 its sliding windows."""


def trained(table: str) -> list[tuple[str, TrainingRecipe]]:
    found = [(row.row, RECIPES[row.recipe]) for row in ROWS if row.table == table and row.recipe]
    return [(row, one) for row, one in found if isinstance(one, TrainingRecipe)]


def converted(table: str) -> dict[str, ConversionRecipe]:
    found = {row.row: RECIPES[row.recipe] for row in ROWS if row.table == table and row.recipe}
    return {row: one for row, one in found.items() if isinstance(one, ConversionRecipe)}


def test_every_row_is_there_and_says_what_starts_it() -> None:
    counts = Counter(row.table for row in ROWS)
    assert {table: counts[table] for table in ROW_COUNTS} == ROW_COUNTS
    assert all(bool(row.recipe) != bool(row.otherwise) for row in ROWS)
    assert {row.recipe for row in ROWS} - {""} == set(RECIPES)
    assert max(Counter((row.table, row.row) for row in ROWS).values()) == 1


def test_rates_are_those_of_mesanets_table_7() -> None:
    head, *lines = MESANET_7.strip().splitlines()
    printed = {
        f"{line.split()[0].replace('-', ' ')}: {model.replace('Gated-', 'Gated ')}": float(rate)
        for line in lines
        for model, rate in zip(head.split(), line.split()[1:], strict=True)
    }
    found = dict(trained("MesaNet, Table 7"))
    assert {row: one.lr.value for row, one in found.items()} == printed
    for row, one in found.items():
        size, tokens = row.partition(":")[0].split()
        assert one.parameters.value == PARAMETERS[size]
        assert one.tokens.value == float(tokens) * 1e9


def test_mesanets_settings_are_those_of_appendix_f() -> None:
    for _, one in [*trained("MesaNet, Table 2"), *trained("MesaNet, Table 7")]:
        assert (one.batch.value, one.length.value, one.warmup.value) == (256, 2048, 2000)
        assert (one.weight_decay.value, one.clip.value) == (0.1, 1.0)
        assert one.betas.value == (0.9, 0.98)
    for _, one in trained("MesaNet, Table 2"):
        assert (one.parameters.value, one.tokens.value) == (940e6, 50e9)
    for _, one in trained("MesaNet, Table 8"):
        assert one.lr.value == 0.001  # F.4, of all sliding windows


@pytest.mark.parametrize("table", METALA)
def test_sizes_and_tokens_are_those_of_metalas_tables(table: str) -> None:
    found = [one for _, one in trained(table)]
    sizes = [(one.parameters.value / 1e9, one.tokens.value / 1e9) for one in found]
    assert sizes == METALA[table]


def test_metalas_settings_are_those_of_appendix_a4() -> None:
    settings = {0.5e6: (3e-4, 16), 2e6: (2e-4, 32)}
    for table in METALA:
        for _, one in trained(table):
            tokens = one.batch.value * one.length.value
            size = min(settings, key=lambda printed: abs(printed - tokens))
            assert tokens == pytest.approx(size, rel=0.05)
            assert (one.lr.value, one.devices.value) == settings[size]
            assert size == (0.5e6 if one.tokens.value == 15e9 else 2e6)
            assert one.length.value == (8192 if table.endswith("A8") else 2048)


def test_wikitext_is_that_of_dsfs_appendix_j3() -> None:
    for _, one in trained("DSF, Table 1, WikiText-103"):
        assert one.tokens.value == pytest.approx(50 * 118e6)
        assert one.warmup.value == pytest.approx(one.steps / 10, rel=0.01)
        assert (one.length.value, one.weight_decay.value) == (1024, 0.1)
        config = one.config()
        assert (config.hidden_size, config.num_hidden_layers) == (512, 6)


def test_lolcats_tables_have_the_workshops_settings() -> None:
    first, second = (converted(f"LoLCATs (workshop), Table {number}") for number in (1, 2))
    for row, one in first.items():
        assert one.window.value == 0
        assert one.model.value == "meta-llama/Meta-Llama-3-8B"
        function = {"1": "elu", "R": "relu", "e": "exp"}[row[0]]
        assert one.settings.analog.features == f"{function}-skip"  # eq. 6
        transfer, adapted = (20e6, 40e6) if row.endswith("✓") else (0, 20e6)
        assert (one.transfer_tokens.value, one.tokens.value) == (transfer, adapted)
    assert {one.tokens.value for one in second.values()} == {0.04e9}
    for row, one in second.items():
        assert one.model.value == f"{'mistralai/Mistral-7B-v0.1' * ('Mistral' in row)}" or (
            "Llama" in row and one.model.value == "meta-llama/Meta-Llama-3-8B"
        )
        if "T2R" not in row:
            assert one.window.value == (16 if "LOLCAT-w" in row else 0)
            assert (one.transfer_lr.value, one.rank.value) == (1e-2, 8)
        assert (one.finetune_lr.value, one.batch.value) == (1e-4, 8)


def test_equation_6_has_a_matrix_of_d_by_d_per_head() -> None:
    """32 layers, 32 query heads and 8 key heads, d = 128: 21 million weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastweights.linearize.distill.plan import plan

    recipe = RECIPES["lolcats-8b-workshop"]
    assert isinstance(recipe, ConversionRecipe)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**recipe.shape.value, "num_hidden_layers": 1}))
    assert plan(model, recipe.settings).branch == (32 + 8) * 128**2 + 32


def test_every_other_command_is_one() -> None:
    commands = {row.otherwise for row in ROWS if row.starts and not row.recipe}
    for command in commands:
        _, *words = command.partition(" (")[0].split()
        assert build_parser().parse_args(words).run is not None, command
        if words[0] == "reproduce":
            assert words[1] in CLAIMS
        if words[0] == "table":
            assert words[1] in TABLES


def test_metalas_table_6_starts_by_its_claim_and_says_what_differs() -> None:
    found = [row for row in ROWS if row.table == "MetaLA, Table 6"]
    assert {row.otherwise for row in found} == {IMAGES}
    assert all(row.starts and row.gaps == IMAGE_GAPS for row in found)
