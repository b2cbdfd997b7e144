"""The papers' suites by lm-evaluation-harness, on local files, against the papers' tables and our
own scores."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.api.task
import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerFast

import eval_files
from fastweights import FastWeightsForCausalLM
from fastweights.cli import main
from fastweights.errors import DataError
from fastweights.lab.evals.harness import HarnessModel, SharedPrefix, score_suite
from fastweights.lab.evals.harness_tasks import find_tasks, load_tasks
from fastweights.lab.evals.items import HARNESS_SOURCES
from fastweights.lab.evals.score import score
from fastweights.lab.evals.suite_journal import SuiteJournal
from fastweights.lab.evals.suite_scores import ColumnScore, SuiteScores
from fastweights.lab.evals.suites import PER_QUESTION, PER_TOKEN, SUITES, Suite, TableColumn
from fastweights.train import Bytes
from fastweights.training.loop.checkpoint import save_model
from tiny import tiny

Small = tuple[FastWeightsForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def small() -> Small:
    return tiny("hybrid", vocab_size=258), Bytes().build([])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eval_files.write(tmp_path_factory.mktemp("data"))


def suite_of(*columns: TableColumn, **fields: Any) -> Suite:
    return Suite("a paper", columns, **fields)


def documents(split: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """What makes lm-eval read these documents as a split of the task's data set."""
    found = Dataset.from_list(list(rows))
    return {"custom_dataset": lambda **_: {split: found}, "training_split": None}


# the tables ---------------------------------------------------------------------------------------


def test_every_task_and_metric_is_lm_evals() -> None:
    columns = [column for suite in SUITES.values() for column in suite.columns]
    index = find_tasks({column.task for column in columns}).task_index
    for column in columns:
        config = index[column.task].cfg
        assert config is not None
        lists = (config.get(key, []) for key in ("metric_list", "aggregate_metric_list"))
        metrics = {PER_TOKEN, *(one["metric"] for each in lists for one in each)}
        if column.task == "multirc":
            metrics.add(PER_QUESTION)
        if "class" in config:
            metrics.add("contains")
        assert column.metric in metrics, column


def test_what_scores_one_task_has_the_same_examples() -> None:
    for suite in SUITES.values():
        shots = {(column.task, str(column.changes), column.shots) for column in suite.columns}
        assert len(shots) == len({(task, changes) for task, changes, _ in shots})


def test_averages_are_of_columns() -> None:
    for suite in SUITES.values():
        names = [column.name for column in suite.columns]
        assert len(set(names)) == len(names)
        assert not set(names) & set(suite.absent)
        for average in suite.averages.values():
            assert set(average) <= set(names)


def test_the_page_names_every_suite_with_its_tasks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evals.md").read_text()
    rows = dict(
        line.removeprefix("| ").split(" | ", 1) for line in page.splitlines() if " | " in line
    )
    for name, suite in SUITES.items():
        named = rows[name]
        assert all(column.task in named for column in suite.columns), name
        for table in re.findall(r"A?\d+", suite.source.split("(")[0]):
            assert table in named, name


PRINTED = {
    # MetaLA, Table 4, 0.36 billion parameters
    ("metala-superglue", "AVG"): (
        {"WSC": 36.54, "WIC": 50.00, "RTE": 52.71, "CB": 42.86, "MULTIRC": 0.31}
        | {"BOOLQ": 58.96, "COPA": 67.00},
        44.05,
    ),
    # Table 5, the same
    ("metala-commonsense", "AVG (Tables 5, 8)"): (
        {"LOGIQA": 22.43, "WSC273": 58.24, "BOOLQ": 58.96, "PIQA": 63.82}
        | {"HS": 32.18, "WG": 53.12, "ARC-c": 23.38, "OBQA": 28.00},
        42.52,
    ),
    # Table A5, 1.4 billion
    ("metala-commonsense", "AVG (Table A5)"): (
        {"LAMB ppl": 10.06, "LAMB acc": 50.42, "LOGIQA": 21.35, "WSC273": 73.63, "BOOLQ": 56.27}
        | {"PIQA": 72.25, "HS": 53.58, "WG": 58.17, "ARC-e": 61.49, "ARC-c": 30.03, "OBQA": 34.60},
        51.26,
    ),
    # Table A9, 0.38 billion
    ("metala-commonsense", "AVG (Table A9)"): (
        {"BOOLQ": 60.09, "PIQA": 67.79, "HS": 38.51, "WG": 50.99}
        | {"ARC-e": 52.19, "ARC-c": 25.60, "OBQA": 30.00},
        46.45,
    ),
    # MesaNet, Table 11, the Transformer of 1 billion parameters and 50 billion tokens
    ("mesanet-commonsense", "global AVG"): (
        {"LMB.": 48.92, "Hella.": 53.63, "RACE-M": 42.27, "RACE-H": 37.32},
        45.54,
    ),
    ("mesanet-commonsense", "local AVG"): (
        {"PIQA": 72.31, "Wino": 54.62, "ARC-E": 49.41, "ARC-C": 28.24}
        | {"SIQA": 40.17, "BOOLQ": 60.73, "OBQA": 35.20, "SC.": 72.25},
        51.62,
    ),
}


def scored(suite: Suite, printed: dict[str, float]) -> SuiteScores:
    scores = [
        ColumnScore(name, "", "acc", 0, (value / 100,), ((),), ("", ""))
        for name, value in printed.items()
    ]
    return SuiteScores(suite, tuple(scores))


@pytest.mark.parametrize(("suite", "average"), PRINTED)
def test_averages_of_printed_rows_are_the_printed_ones(suite: str, average: str) -> None:
    row, want = PRINTED[suite, average]
    assert set(SUITES[suite].averages[average]) <= set(row)
    found = scored(SUITES[suite], row).averages[average]
    assert abs(100 * found - want) < 0.0051


def test_averages_are_of_one_number_of_solved_examples() -> None:
    suite = SUITES["lolcats"]
    some = tuple(replace(column, shots=(0, 5)) for column in suite.columns)
    scores = tuple(
        ColumnScore(column.name, "", "acc", shots, (shots / 10,), ((),), ("", ""))
        for column in some
        for shots in column.shots
    )
    found = SuiteScores(replace(suite, columns=some), scores).averages
    assert found == {
        "AVG (no MMLU), 0 shots": 0.0,
        "AVG, 0 shots": 0.0,
        "AVG (no MMLU), 5 shots": 0.5,
        "AVG, 5 shots": 0.5,
    }


def test_averages_without_some_columns_say_so() -> None:
    row, _ = PRINTED["mesanet-commonsense", "global AVG"]
    del row["RACE-M"]
    (name,) = scored(SUITES["mesanet-commonsense"], row).averages
    assert name == "global AVG (3 of 4)"


# local files --------------------------------------------------------------------------------------

REQUESTS: dict[str, tuple[str, list[str]]] = {
    "hellaswag": ("Roofing: A man is on a roof. He", [" a", " b", " c", " d"]),
    "piqa": ("Question: dry it\nAnswer:", [" in the sun", " in water"]),
    "arc_easy": ("Question: Hot?\nAnswer:", [" ice", " fire"]),
    "openbookqa": ("Predators eat", [" lions", " bunnies"]),
    "boolq": ("It is.\nQuestion: is it so?\nAnswer:", [" no", " yes"]),
    "copa": ("It broke because", ["  it flew.", "  it fell."]),
    "winogrande": ("She beat Bo so she", [" won."]),
    "wsc273": ("It fits the box as the box", ["  is big."]),
    "lambada_openai": ("He came in.\n\nShe saw", [" him"]),
    "storycloze_2018": (
        "Bo ran, fast. He fell. It hurt. He wept.",
        [" Bo smiled.", " Bo got help."],
    ),
}
"""What lm-eval's own files make of the first document: the context, and what is to follow it."""


@pytest.mark.parametrize("name", REQUESTS)
def test_prompts_of_local_files_are_lm_evals(name: str, data: Path) -> None:
    (loaded,) = load_tasks([TableColumn(name, name)], data)
    assert loaded.items(None) == len(HARNESS_SOURCES[name].documents(data))
    (task,) = loaded.tasks["tasks"].values()
    task.build_all_requests(limit=1)
    context, continuations = REQUESTS[name]
    asked = [request.args for request in task.instances]
    assert asked[0][0] == context
    assert [continuation for _, continuation in asked][: len(continuations)] == continuations


def test_prompts_of_generated_answers(data: Path) -> None:
    names = ("nq_open", "anagrams1", "swde")
    loaded = load_tasks([TableColumn(name, name) for name in names], data)
    asked = {}
    for one in loaded:
        for name, task in one.tasks["tasks"].items():
            task.build_all_requests(limit=1)
            asked[name], how = task.instances[0].args
            assert how["until"][0] == "\n"
    assert asked == {
        "nq_open": "Answer these questions:\n\nQ: who wrote it?\nA:",
        "anagrams1": "\nskcits =",
        "swde": "Born in",
    }


def test_contexts_of_hellaswag_in_two_pieces_are_taken_as_they_are(tmp_path: Path) -> None:
    row = {**eval_files.LINES["hellaswag_val.jsonl"][0], "ctx_a": "A roof. a man", "ctx_b": "is"}
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps(row))
    (found,) = HARNESS_SOURCES["hellaswag"].documents(tmp_path)
    assert (found["ctx_a"], found["ctx_b"]) == ("A roof. a man", "is")


def test_missing_data_are_named_before_anything_is_loaded(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(path: str, **_: Any) -> None:
        raise ConnectionError(f"Couldn't reach {path!r}")

    monkeypatch.setattr(lm_eval.api.task.datasets, "load_dataset", offline)
    columns = [TableColumn(name, name) for name in ("piqa", "race", "fda", "logiqa", "boolq")]
    with pytest.raises(DataError) as refused:
        load_tasks(columns, data)
    said = str(refused.value)
    assert "no data for race, fda, logiqa (ConnectionError: Couldn't reach" in said
    assert "without HF_HUB_OFFLINE" in said
    assert "fda from fda.jsonl" in said
    assert said.endswith("give --tasks piqa boolq")


def test_a_task_that_lm_eval_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="has no task piqua; `lm_eval ls tasks`"):
        load_tasks([TableColumn("PIQA", "piqua")], None)


# scores -------------------------------------------------------------------------------------------

ALIKE = {
    "piqa": "piqa",
    "arc_easy": "arc_easy",
    "openbookqa": "openbookqa",
    "boolq": "boolq",
    "winogrande": "winogrande",
}
"""Tasks of lm-eval whose wording is that of our own items."""


@pytest.mark.parametrize("name", ALIKE)
def test_choices_are_scored_as_our_items_are(small: Small, data: Path, name: str) -> None:
    columns = [TableColumn("sum", name), TableColumn("token", name, PER_TOKEN)]
    found = score_suite(*small, suite_of(*columns), load_tasks(columns, data), batch=2)
    want = score(*small, eval_files.ITEMS[ALIKE[name]])
    by_sum, by_token = found.scores
    assert by_sum.mean == want.metrics["accuracy"]
    assert by_token.mean == want.metrics["accuracy_per_token"]
    assert by_token.rows == (tuple(float(row.by_token) for row in want.rows),)


def test_last_words_are_scored_as_our_items_are(small: Small, data: Path) -> None:
    column = TableColumn("LAMBADA", "lambada_openai", None)
    found = score_suite(*small, suite_of(column), load_tasks([column], data))
    perplexity, accuracy = found.scores
    want = score(*small, eval_files.ITEMS["lambada"]).metrics
    assert perplexity.mean == pytest.approx(2.718281828459045 ** want["nll"], rel=1e-12)
    assert accuracy.mean == want["accuracy"]


def test_every_item_is_told(small: Small, data: Path) -> None:
    told: list[int] = []

    def follow(pieces: Iterable[int], what: str) -> Iterable[int]:
        assert what == "scoring"
        for piece in pieces:
            yield piece
            told.append(piece)

    columns = [TableColumn("BOOLQ", "boolq"), TableColumn("PIQA", "piqa", "acc", (0, 1))]
    loaded = load_tasks(columns, data)
    score_suite(*small, suite_of(*columns, prefixes=3), loaded, follow=follow, batch=1)
    assert told == list(range(1 + 2 + 3 * 2))


def test_a_stopped_suite_goes_on_after_its_finished_parts(
    small: Small, data: Path, tmp_path: Path
) -> None:
    columns = [TableColumn("BOOLQ", "boolq"), TableColumn("PIQA", "piqa", None, (0, 1))]
    suite, loaded = suite_of(*columns, prefixes=2), load_tasks(columns, data)
    whole = score_suite(*small, suite, loaded)
    path = tmp_path / "new" / "parts.jsonl"

    def stopping(pieces: Iterable[int], what: str) -> Iterable[int]:
        del what
        for piece in pieces:
            if piece == 4:  # of one of BOOLQ and two of PIQA, three times
                raise KeyboardInterrupt
            yield piece

    with pytest.raises(KeyboardInterrupt):
        score_suite(*small, suite, loaded, follow=stopping, journal=SuiteJournal(path, "a"))
    assert len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write('{"model": "a", "part')
    first, told = path.read_text().splitlines()[0], list[int]()

    def counting(pieces: Iterable[int], what: str) -> Iterable[int]:
        del what
        for piece in pieces:
            yield piece
            told.append(piece)

    resumed = score_suite(*small, suite, loaded, follow=counting, journal=SuiteJournal(path, "a"))
    assert resumed == whole
    assert len(told) == 7
    rows = path.read_text().splitlines()
    assert rows[0] == first
    assert len(rows) == 4
    score_suite(*small, suite, loaded, limit=1, journal=SuiteJournal(path, "a"))
    score_suite(*small, suite, loaded, journal=SuiteJournal(path, "b"))
    assert len(path.read_text().splitlines()) == 4 + 4 + 4


def test_long_prompts_are_read_from_their_end(small: Small) -> None:
    how = {"until": [], "max_gen_toks": 4}
    end = "the end of it al"
    prompts = (end, "never read " * 9 + end, "never read " * 9 + "another end of it")
    asked = [Instance("generate_until", {}, (prompt, how), 0) for prompt in prompts]
    short, long, other = HarnessModel(*small, length=len(end) + 4).generate_until(asked)
    assert short == long
    assert HarnessModel(*small).generate_until(asked)[1] != other


def test_multirc_asks_whether_every_answer_of_a_question_is_judged_rightly(small: Small) -> None:
    rows = [
        {
            "paragraph": "It is.",
            "question": f"{question}?",
            "answer": answer,
            "label": label,
            "idx": {"paragraph": 0, "question": question, "answer": number},
        }
        for question in range(3)
        for number, (answer, label) in enumerate((("so", 1), ("not", 0), ("maybe", question % 2)))
    ]
    columns = [
        TableColumn(name, "multirc", metric, changes=documents("validation", *rows))
        for name, metric in (("acc", "acc"), ("em", PER_QUESTION))
    ]
    same = replace(columns[1], changes=columns[0].changes)
    loaded = load_tasks([columns[0], same], None)
    each, every = score_suite(*small, suite_of(columns[0], same), loaded).scores
    judged = each.rows[0]
    assert every.rows[0] == tuple(min(judged[n : n + 3]) for n in (0, 3, 6))


def test_a_group_is_scored_with_its_own_examples(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"question": "Q", "choices": list("wxyz"), "answer": 1, "subject": "law"}
    split = Dataset.from_list([row] * 5)
    sets = {"test": split.select([0]), "dev": split}
    monkeypatch.setattr(lm_eval.api.task.datasets, "load_dataset", lambda **_: sets)
    column = next(column for column in SUITES["lolcats"].columns if column.task == "mmlu")
    (loaded,) = load_tasks([column], None)
    (found,) = score_suite(*small, suite_of(column), [loaded]).scores
    assert loaded.items(None) == 57
    assert found.mean in (0.0, 1.0)
    (task, *_) = loaded.tasks["tasks"].values()
    assert task.instances[0].args[0].count("Answer: B") == 5


# solved examples ----------------------------------------------------------------------------------


def contexts(column: TableColumn, seed: int, data: Path) -> list[str]:
    (loaded,) = load_tasks([column], data)
    (task,) = loaded.tasks["tasks"].values()
    task.sampler = SharedPrefix(task.sampler.df)
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(seed)
    task.build_all_requests()
    return [request.args[0] for request in task.instances]


def test_a_prefix_is_shared_by_all_items_but_those_in_it(data: Path) -> None:
    column = SUITES["mesanet-scrambling"].columns[0]
    asked = contexts(column, 0, data)
    words = ("sticks", "mirror", "casino", "coffee")
    for word, context in zip(words, asked, strict=True):
        *examples, _ = context.split("\n\n\n")
        assert len(examples) == 2
        assert not any(example.endswith(f" {word}") for example in examples)
        assert all("= " in example and "=  " not in example for example in examples)
    shared = {tuple(context.split("\n\n\n")[:-1]) for context in asked}
    assert len(shared) == 3  # of the two items in the prefix, either has the third in its place
    assert asked == contexts(column, 0, data)
    assert {contexts(column, seed, data)[0] for seed in range(8)} != {asked[0]}


def test_scores_of_several_prefixes_are_a_mean_and_a_deviation() -> None:
    several = ColumnScore("a", "a", "exact_match", 1, (0.1, 0.3), ((), ()), ("", ""))
    assert several.mean == pytest.approx(0.2)
    assert several.spread == pytest.approx(0.1)
    assert several.shown == "20.00 ± 10.00"
    once = ColumnScore("a", "a", "acc", 0, (0.5,), ((1.0, 0.0),), ("", ""))
    assert once.spread == pytest.approx(0.5)
    assert ColumnScore("a", "a", "bleu", 0, (12.5,), ((),), ("", "")).shown == "12.50"


# the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    save_model(*small, path)
    return path


@pytest.mark.usefixtures("pictures")
def test_the_command_scores_a_suite(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--debug", "eval", "harness", str(checkpoint), "--suite", "mesanet-commonsense"]
    asked = ["--tasks", "piqa", "lambada_openai", "--data", str(data), "--device", "cpu"]
    assert main([*command, *asked, "--limit", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "MesaNet, Tables 11 and 12" in said
    assert "local AVG (1 of 8)" in said
    (saved,) = tmp_path.glob("*.json")
    (parts,) = tmp_path.glob("*.parts.jsonl")
    assert len(parts.read_text().splitlines()) == 2
    found = json.loads(saved.read_text())
    assert [one["column"] for one in found["scores"]] == ["LMB.", "PIQA"]
    assert found["limit"] == 1
    assert found["scores"][1]["prompt"][0] == "Question: dry it\nAnswer:"
    assert len(found["scores"][1]["rows"][0]) == 1
    assert (tmp_path / "suite.png").stat().st_size > 1000


@pytest.mark.usefixtures("pictures")
def test_the_command_draws_examples(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    command = ["--debug", "eval", "harness", str(checkpoint), "--suite", "lolcats"]
    asked = ["--tasks", "piqa", "--data", str(data), "--device", "cpu", "--seed", "3"]
    shots = ["--shots", "0,1", "--prefixes", "2"]
    assert main([*command, *asked, *shots, "--out", str(tmp_path)]) == 0
    (saved,) = tmp_path.glob("*.json")
    scores = json.loads(saved.read_text())["scores"]
    assert [(one["shots"], len(one["values"])) for one in scores] == [(0, 1), (1, 2)]
    assert (tmp_path / "suite.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --suite, one of metala-superglue, "),
        (["--suite", "lolcats", "--tasks", "boolq"], "--suite lolcats has no task boolq; it has"),
        (["--tasks", "piqa", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["--tasks", "piqa", "--prefixes", "3"], "there are none; give --shots"),
        (["--tasks", "zz"], "lm-evaluation-harness has no task zz"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["eval", "harness", "none", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
