"""The papers' tables of zero-shot and few-shot scores, as tasks of lm-evaluation-harness 0.4.13."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PER_TOKEN = "acc_per_token"
"""The choice of least NLL per token is right (MesaNet, appendix L); not one of lm-eval's."""
PER_QUESTION = "em"
"""Every answer to a question is judged rightly (MultiRC); not one of lm-eval's."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a paper's table: a task of lm-evaluation-harness and one of its metrics.

    Attributes:
        name: What the paper calls it.
        task: What lm-eval calls it.
        metric: lm-eval's name of the metric, `PER_TOKEN` or `PER_QUESTION`; None for all that
            lm-eval reports.
        shots: Numbers of solved examples before an item, one score each.
        changes: Keys of lm-eval's own configuration that have another value.
    """

    name: str
    task: str
    metric: str | None = "acc"
    shots: tuple[int, ...] = (0,)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """The columns of a paper's table.

    Attributes:
        source: The paper and its tables.
        columns: What lm-eval has of them.
        averages: Names of the columns that each average is over.
        absent: Columns of the paper that lm-eval has no task for, and why.
        notes: What else differs from the paper, or is not said there.
        prefixes: Random choices of solved examples, each of which all items share; None for
            examples drawn anew for each item, once.
        length: Tokens of a prompt with its answer, of which the prompt's last are read; None for
            all.
    """

    source: str
    columns: tuple[TableColumn, ...]
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prefixes: int | None = None
    length: int | None = None


def _translation(name: str, task: str) -> TableColumn:
    bleu = {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}
    return TableColumn(name, task, "bleu", (0, 1, 5, 10, 50), {"metric_list": [bleu]})


def _scrambling(name: str, task: str) -> TableColumn:
    """The item itself is none of its examples; and one space, not two, goes before an answer."""
    changes = {"fewshot_split": "validation", "target_delimiter": ""}
    return TableColumn(name, task, "exact_match", (0, 1, 10, 100), changes)


_LOCAL = ("PIQA", "Wino", "ARC-E", "ARC-C", "SIQA", "BOOLQ", "OBQA", "SC.")
_TABLE_5 = ("LOGIQA", "WSC273", "BOOLQ", "PIQA", "HS", "WG", "ARC-c", "OBQA")
_TABLE_A9 = ("BOOLQ", "PIQA", "HS", "WG", "ARC-e", "ARC-c", "OBQA")
_LOLCATS = ("PIQA", "ARC-e", "ARC-c", "HellaSwag", "WinoGrande")
_RECALL = (
    "lm-eval's task of this name has another prompt, and no passage or another metric; score"
    ' Arora et al.\'s by `fastweights eval tasks`, as lines {"text": …, "value": …}'
)

SUITES: dict[str, Suite] = {
    "metala-superglue": Suite(
        "MetaLA, Table 4",
        (
            TableColumn("WSC", "wsc"),
            TableColumn("WIC", "wic"),
            TableColumn("RTE", "sglue_rte"),
            TableColumn("CB", "cb", "f1"),
            TableColumn("MULTIRC", "multirc", PER_QUESTION),
            TableColumn("BOOLQ", "boolq"),
            TableColumn("COPA", "copa"),
        ),
        {"AVG": ("WSC", "WIC", "RTE", "CB", "MULTIRC", "BOOLQ", "COPA")},
    ),
    "metala-commonsense": Suite(
        "MetaLA, Tables 5, 8, A5 and A9",
        (
            TableColumn("LAMB ppl", "lambada_standard", "perplexity"),
            TableColumn("LAMB acc", "lambada_standard"),
            TableColumn("LOGIQA", "logiqa"),
            TableColumn("WSC273", "wsc273"),
            TableColumn("BOOLQ", "boolq"),
            TableColumn("PIQA", "piqa"),
            TableColumn("HS", "hellaswag", "acc_norm"),
            TableColumn("WG", "winogrande"),
            TableColumn("ARC-e", "arc_easy"),
            TableColumn("ARC-c", "arc_challenge", "acc_norm"),
            TableColumn("OBQA", "openbookqa", "acc_norm"),
        ),
        {
            "AVG (Tables 5, 8)": _TABLE_5,
            "AVG (Table A5)": (*_TABLE_5, "ARC-e"),
            "AVG (Table A9)": _TABLE_A9,
        },
        notes=(
            "LAMBADA is lambada_standard: Pythia-1.4B's 10.94 and 49.8 in Table A5 are not those"
            " of lambada_openai, where its authors publish 6.9 and 59.1 of a checkpoint",
        ),
    ),
    "mesanet-commonsense": Suite(
        "MesaNet, Tables 11 and 12",
        (
            TableColumn("LMB.", "lambada_openai"),
            TableColumn("Hella.", "hellaswag", PER_TOKEN),
            TableColumn("RACE-M", "race", PER_TOKEN, changes={"dataset_name": "middle"}),
            TableColumn("RACE-H", "race", PER_TOKEN),
            TableColumn("PIQA", "piqa", PER_TOKEN),
            TableColumn("Wino", "winogrande", PER_TOKEN),
            TableColumn("ARC-E", "arc_easy", PER_TOKEN),
            TableColumn("ARC-C", "arc_challenge", PER_TOKEN),
            TableColumn("SIQA", "social_iqa", PER_TOKEN),
            TableColumn("BOOLQ", "boolq", PER_TOKEN),
            TableColumn("OBQA", "openbookqa", PER_TOKEN),
            TableColumn("SC.", "storycloze_2018", PER_TOKEN, changes={"test_split": None}),
        ),
        {"global AVG": ("LMB.", "Hella.", "RACE-M", "RACE-H"), "local AVG": _LOCAL},
        notes=(
            "which text of LAMBADA is not said",
            "StoryCloze is 2018's validation set, of whose 1,571 items the paper's scores are"
            " multiples; its authors send it on request",
        ),
    ),
    "mesanet-recall": Suite(
        "MesaNet, Tables 13 and 14",
        (
            TableColumn("SWDE", "swde", "contains"),
            TableColumn("SQUAD", "squad_completion", "contains"),
            TableColumn("FDA", "fda", "contains"),
        ),
        {"AVG (of three)": ("SWDE", "SQUAD", "FDA")},
        absent={"TQA": _RECALL, "NQ": _RECALL, "DROP": _RECALL},
        length=2048,
    ),
    "mesanet-scrambling": Suite(
        "MesaNet, Table 15",
        (
            _scrambling("cycle_letters_in_word", "cycle_letters"),
            _scrambling("mid_word_2_anagrams", "anagrams2"),
        ),
        prefixes=10,
    ),
    "mesanet-translation": Suite(
        "MesaNet, Table 16",
        (
            _translation("WMT14 FR-EN", "wmt14-fr-en"),
            _translation("WMT16 DE-EN", "wmt16-de-en"),
            _translation("WMT16 RO-EN", "wmt16-ro-en"),
        ),
        notes=(
            "lm-eval names the languages (French phrase: … English phrase: …) where Brown et al.,"
            " whom the paper follows, write sentence = translation",
        ),
    ),
    "lolcats": Suite(
        "LoLCATs, Table 2, and MMLU of the later paper (2410.10254)",
        (
            TableColumn("PIQA", "piqa"),
            TableColumn("ARC-e", "arc_easy"),
            TableColumn("ARC-c", "arc_challenge", "acc_norm"),
            TableColumn("HellaSwag", "hellaswag", "acc_norm"),
            TableColumn("WinoGrande", "winogrande"),
            TableColumn("MMLU", "mmlu", shots=(5,)),
        ),
        {"AVG (no MMLU)": _LOLCATS, "AVG": (*_LOLCATS, "MMLU")},
    ),
}
"""The suites by name."""
