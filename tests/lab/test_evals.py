"""Losses by position, multiple choice and recall against literal loops."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
)

import eval_files
from fastweights import FastWeightsForCausalLM
from fastweights.cli import main
from fastweights.lab.evals.answers import answers
from fastweights.lab.evals.harness import HarnessModel
from fastweights.lab.evals.items import SOURCES, Choice, Ending, Prompt, recall_prompts
from fastweights.lab.evals.likelihood import Query, likelihoods, query
from fastweights.lab.evals.score import ChoiceScore, score
from fastweights.lab.tasks.questions import Question
from fastweights.train import BPE, Bytes, tokenize_sources
from fastweights.training.language.perplexity import (
    PositionLoss,
    draw,
    losses_by_position,
    nll_by_position,
    octaves,
    token_losses,
)
from fastweights.training.loop.checkpoint import save_model
from tiny import VOCABULARY, tiny, tokens
from tolerances import TOLERANCE, array, assert_close, error

pytestmark = pytest.mark.sampled

LENGTH = 13


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    )


def llama() -> PreTrainedModel:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def foreign(make) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().double().eval()


MODELS = {
    "hybrid": lambda: tiny("hybrid"),
    "gpt2": lambda: foreign(gpt2),
    "llama": lambda: foreign(llama),
}
every_model = pytest.mark.parametrize("name", MODELS)


@torch.no_grad()
def by_prefixes(model: PreTrainedModel, sequence: list[int]) -> list[float]:
    """-log p of every token but the first, from one forward pass per prefix."""
    losses = []
    for k in range(1, len(sequence)):
        logits = (
            model(input_ids=torch.tensor([sequence[:k]]), use_cache=False)
            .logits[0, -1]
            .double()
            .numpy()
        )
        losses.append(
            float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[sequence[k]])
        )
    return losses


# loss by position ---------------------------------------------------------------------------------


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
    want = [
        np.log(np.exp(z).sum()) - z[target]
        for z, target in zip(logits, ids[0, 1:].tolist(), strict=True)
    ]
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
    assert one.mean_between(np.array([1, 2, 4])).tolist() == [2.0, 5 / 3]
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
        assert np.allclose(
            lines[name], loss.mean_between(octaves(49)), rtol=TOLERANCE[torch.float64]
        )
    assert {line.get_label() for line in right.lines} >= set(MODELS)


def test_a_model_that_does_not_go_on_is_read_whole() -> None:
    """transformers' RWKV mixes the states of a batch up."""
    model = foreign(
        lambda: RwkvForCausalLM(
            RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2)
        )
    )
    ids = tokens(1, LENGTH)
    assert (
        error(token_losses(model, ids), np.array([by_prefixes(model, ids[0].tolist())]))
        < TOLERANCE[torch.float32]
    )
    with pytest.warns(UserWarning, match="a RwkvForCausalLM does not go on from its cache"):
        assert torch.equal(token_losses(model, ids, chunk=4), token_losses(model, ids))


@pytest.mark.parametrize(("count", "length"), [(1, 5), (5, 1)])
def test_too_few_tokens(count: int, length: int) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        nll_by_position(tiny(), tokens(count).numpy(), length)


def test_batches_may_differ_in_length() -> None:
    model = tiny()
    batches: list[Tensor] = [tokens(2, 5), tokens(1, 9, seed=1)]
    loss = losses_by_position(model, batches, None)
    assert loss.counts.tolist() == [3] * 4 + [1] * 4


# items --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", eval_files.ITEMS)
def test_items_are_what_the_file_says(name: str, tmp_path: Path) -> None:
    assert SOURCES[name].items(eval_files.write(tmp_path)) == eval_files.ITEMS[name]


@pytest.mark.parametrize("content", [b"{", b'{"ctx": 1}\n', b"\x1f\x8b", b"[1, 2]\n", b"\xff"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "hellaswag_val.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"hellaswag_val\.jsonl\.gz"):
        SOURCES["hellaswag"].items(tmp_path)


HELLASWAG = {"activity_label": "Roofing", "ctx": "A man", "endings": ["a", "b"], "label": 1}


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("hellaswag", {**HELLASWAG, "label": 9}, "not the number of an option; there are 0 … 1"),
        ("hellaswag", {**HELLASWAG, "label": -1}, "-1 is not the number of an option"),
        ("hellaswag", {**HELLASWAG, "label": "x"}, "invalid literal for int"),
        ("hellaswag", {**HELLASWAG, "endings": []}, "two options at least; there are 0"),
        ("hellaswag", {"ctx": "A man"}, "it has no 'activity_label'"),
        ("lambada", {}, "it has no 'text'"),
        ("lambada", {"text": " "}, "its text is empty"),
        ("lambada", {"text": 5}, "AttributeError"),
        ("lambada", "{", "Expecting property name"),
    ],
)
def test_a_line_that_makes_no_item_is_named(
    task: str, line: dict[str, object] | str, message: str, tmp_path: Path
) -> None:
    (file,) = SOURCES[task].files
    right = json.dumps({**HELLASWAG, "text": "He came in"})
    wrong = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / file).write_text(f"{right}\n{wrong}")
    with pytest.raises(ValueError, match=rf"{file} is not .*\(line 2: .*{message}"):
        SOURCES[task].items(tmp_path)


def test_labels_may_be_texts(tmp_path: Path) -> None:
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps({**HELLASWAG, "label": "1"}))
    (found,) = SOURCES["hellaswag"].items(tmp_path)
    assert isinstance(found, Choice)
    assert found.gold == 1


@pytest.mark.parametrize("labels", ["0\n", "0\n1\n1\n"])
def test_every_question_has_its_label(labels: str, tmp_path: Path) -> None:
    folder = eval_files.write(tmp_path)
    (folder / "piqa_valid-labels.lst").write_text(labels)
    with pytest.raises(ValueError, match=r"piqa_valid-labels\.lst is not in the form"):
        SOURCES["piqa"].items(folder)


def test_recall_in_its_minimal_form_and_of_another_encoding(tmp_path: Path) -> None:
    path, line = tmp_path / "swde.jsonl", json.dumps({"text": "Born in", "value": "Ulm"})
    path.write_bytes(line.encode("utf-8-sig"))
    assert recall_prompts(path) == [Prompt(Question("Born in", ("Ulm",)))]
    path.write_bytes(line.encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"swde\.jsonl seems to be UTF-16LE; convert it"):
        recall_prompts(path)


@pytest.mark.parametrize("line", ["{", "3", '{"text": "Born in"}', '{"text": 1, "value": "Ulm"}'])
def test_recall_that_is_damaged_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "swde.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"swde\.jsonl, line 1, "):
        recall_prompts(tmp_path / "swde.jsonl")


@pytest.mark.parametrize("sizes", [{"length": -5}, {"batch": 0}, {"chunk": -1}, {"chunk": 0}])
def test_sizes_of_reading_are_checked(sizes: dict[str, int]) -> None:
    given = {"length": 8, **sizes}
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} = .*; it must be 1 or more"):
        nll_by_position(tiny("metala"), np.arange(20), **given)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"piqa_valid\.jsonl does not exist"):
        SOURCES["piqa"].items(tmp_path)


def test_shots_are_solved_words_before_the_word(tmp_path: Path) -> None:
    (item,) = SOURCES["anagrams1"].items(eval_files.write(tmp_path), shots=2)
    assert isinstance(item, Prompt)
    assert item.question.text == "\nskcits = sticks\nrorrim = mirror\nonisac ="


# likelihood ---------------------------------------------------------------------------------------

PAIRS = [
    ("He came", " in."),
    ("He", " came in, he saw"),
    ("", "so"),
    ("It ends in ", "é"),
    ("a\n", " b"),
]


@pytest.fixture(scope="module")
def bytewise() -> tuple[FastWeightsForCausalLM, PreTrainedTokenizerFast]:
    return tiny("hybrid", vocab_size=258), Bytes().build([])


def test_queries_are_cut_as_the_harness_cuts_them(bytewise) -> None:
    model, tokenizer = bytewise
    found = []
    reader = HarnessModel(model, tokenizer)
    reader._loglikelihood_tokens = lambda requests, **_: found.extend(requests)
    reader.loglikelihood(
        [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS], disable_tqdm=True
    )
    assert [query(tokenizer, *pair) for pair in PAIRS] == [
        (context, after) for _, context, after in found
    ]


def test_bpe_queries_are_one_text() -> None:
    tokenizer = BPE(300).build(["he came in and he came out, " * 20])
    context, after = query(tokenizer, "he came", " in and he")
    assert tokenizer.decode(context + after) == "he came in and he"
    assert query(tokenizer, "", "he").context == [tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="adds no token"):
        query(tokenizer, "he", "")


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_likelihoods_are_those_of_every_prefix(bytewise, batch: int) -> None:
    model, tokenizer = bytewise
    queries = [query(tokenizer, *pair) for pair in PAIRS]
    for found, (context, after) in zip(
        likelihoods(model, queries, batch=batch), queries, strict=True
    ):
        losses = by_prefixes(model, context + after)[-len(after) :]
        assert found.tokens == len(after)
        assert abs(found.nll - sum(losses)) < 1e2 * TOLERANCE[torch.float64]


def test_answers_that_differ_in_their_last_token_are_read_once(bytewise) -> None:
    model, _ = bytewise
    question = [*b"Is it so? "]
    queries = [Query(question, [*answer]) for answer in (b"A", b"B", b"no", b"nn", b"yes")]
    told = []

    def follow(pieces: Collection[int], what: str) -> Iterator[int]:
        assert what == "reading"
        told.append(len(pieces))
        yield from pieces

    found = likelihoods(model, queries, batch=1, follow=follow)
    assert told == [3]
    for one, (context, after) in zip(found, queries, strict=True):
        losses = by_prefixes(model, context + after)[-len(after) :]
        assert abs(one.nll - sum(losses)) < 1e2 * TOLERANCE[torch.float64]


def test_greedy_is_what_greedy_decoding_says(bytewise) -> None:
    model, tokenizer = bytewise
    context = tokenizer.encode("He")
    after = model.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False)[
        0, len(context) :
    ].tolist()
    wrong = [*after[:3], (after[3] + 1) % 256]
    right, off = likelihoods(model, [Query(context, after), Query(context, wrong)])
    assert right.greedy
    assert not off.greedy


# scores -------------------------------------------------------------------------------------------


def test_choices_are_divided_by_tokens_and_by_characters() -> None:
    """Sums choose the first, means per token the second, means per character the third."""
    row = ChoiceScore(nll=(3.0, 4.0, 6.0), tokens=(3, 8, 7), characters=(3, 4, 12), gold=0)
    assert (row.by_sum, row.by_token, row.by_character) == (True, False, False)
    assert replace(row, gold=1).by_token
    assert replace(row, gold=2).by_character


@pytest.mark.parametrize("name", ["hellaswag", "winogrande", "lambada"])
def test_scores_are_those_of_every_prefix(bytewise, name: str) -> None:
    model, tokenizer = bytewise
    scores = score(model, tokenizer, eval_files.ITEMS[name])
    right = []
    for item, row in zip(eval_files.ITEMS[name], scores.rows, strict=True):
        pairs = (
            [(item.context, item.continuation)]
            if isinstance(item, Ending)
            else [
                (context, f" {after}")
                for context, after in zip(item.contexts, item.continuations, strict=True)
            ]
        )
        losses = [by_prefixes(model, [*f"{a}{b}".encode()])[-len(b.encode()) :] for a, b in pairs]
        sums = [sum(loss) for loss in losses]
        assert np.allclose(np.atleast_1d(row.nll), sums, rtol=TOLERANCE[torch.float64])
        if isinstance(item, Choice):
            right.append(
                np.argmin([s / len(loss) for s, loss in zip(sums, losses, strict=True)])
                == item.gold
            )
    if right:
        assert scores.metrics["accuracy_per_token"] == np.mean(right)
    else:
        assert (
            abs(scores.metrics["nll"] - np.mean([row.nll for row in scores.rows]))
            < TOLERANCE[torch.float64]
        )


def test_scores_are_of_one_kind_of_items(bytewise) -> None:
    with pytest.raises(ValueError, match=r"Choice, Ending|Ending, Choice"):
        score(*bytewise, [*eval_files.ITEMS["copa"], *eval_files.ITEMS["lambada"]])
    with pytest.raises(ValueError, match="got no items"):
        score(*bytewise, [])


def test_answers_are_exact_or_contain_a_value() -> None:
    exact, contained = (
        Prompt(Question("", (" casino",)), exact=True),
        Prompt(Question("", ("Bob", "Ann"))),
    )
    assert [exact.right(text) for text in (" casino", " Casino", " casino royale")] == [
        True,
        False,
        False,
    ]
    assert [contained.right(text) for text in (" it was ANN, perhaps", " no one")] == [True, False]


# answers ------------------------------------------------------------------------------------------


def greedily(model: FastWeightsForCausalLM, ids: list[int], tokens: int) -> str:
    """The likeliest byte after the other, from one forward pass per prefix."""
    new: list[int] = []
    for _ in range(tokens):
        with torch.no_grad():
            new.append(
                int(model(torch.tensor([ids + new]), use_cache=False).logits[0, -1].argmax())
            )
    return bytes(new).decode(errors="replace")


def test_answers_of_a_batch_are_those_of_each_prompt(bytewise) -> None:
    model, tokenizer = bytewise
    prompts = ["one", "a longer prompt", "x", ""]
    texts = answers(model, tokenizer, prompts, until=(), tokens=6, batch=3)
    begin = [tokenizer.eos_token_id]
    assert texts == [greedily(model, [*prompt.encode()] or begin, 6) for prompt in prompts]


def test_answers_end_before_what_ends_them(bytewise) -> None:
    model, tokenizer = bytewise
    whole = greedily(model, [*b"one"], 8)
    end = whole[3]
    (text,) = answers(model, tokenizer, ["one"], until=(end, "\n"), tokens=8)
    assert text == whole[: min(whole.find(c) for c in (end, "\n") if c in whole)]


def test_long_prompts_are_read_from_their_end(bytewise) -> None:
    model, tokenizer = bytewise
    long, short = "never read " * 5 + "the end", "the end"
    kept = answers(model, tokenizer, [long, short], until=(), tokens=4, context=len(short))
    assert kept[0] == kept[1]


# lm-evaluation-harness
# ----------------------------------------------------------------------------------------------


def test_rolling_likelihood_is_of_the_whole_text(bytewise) -> None:
    model, tokenizer = bytewise
    text = "It is said. " * 100
    (found,) = HarnessModel(model, tokenizer).loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), 0)]
    )
    ids = torch.tensor([[tokenizer.eos_token_id, *text.encode()]])
    with torch.no_grad():
        log_p = array(model(ids, use_cache=False).logits.log_softmax(-1))[0, :-1]
    assert np.isclose(
        found, log_p[np.arange(len(text)), ids[0, 1:]].sum(), rtol=TOLERANCE[torch.float64]
    )


# the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(bytewise, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokenizer = bytewise
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    save_model(model, tokenizer, path)
    return path


@pytest.mark.usefixtures("pictures")
def test_the_command_measures_perplexity(bytewise, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Où l'on mange « bien ». " * 20)
    out = tmp_path / "out"
    measured = ["--text", str(text), "--length", "64", "--out", str(out)]
    command = ["--debug", "eval", "perplexity", str(folder), *measured]
    assert main([*command, "--chunk", "16", "--reference", str(folder), "--device", "cpu"]) == 0
    (saved,) = out.glob("*.json")
    loss = PositionLoss.load(saved)
    tokens = np.frombuffer(text.read_bytes(), dtype=np.uint8)
    assert loss.tokens_per_byte == 1
    assert np.allclose(
        loss.nll, nll_by_position(bytewise[0], tokens, 64).nll, rtol=TOLERANCE[torch.float64]
    )
    assert (out / "positions.png").stat().st_size > 1000


def test_the_command_scores_items(bytewise, folder: Path, tmp_path: Path) -> None:
    data, out = eval_files.write(tmp_path / "data"), tmp_path / "out"
    asked = ["--data", str(data), "--tasks", "hellaswag", "lambada", "--limit", "1"]
    command = ["--debug", "eval", "tasks", str(folder), *asked, "--device", "cpu"]
    assert main([*command, "--out", str(out)]) == 0
    (saved,) = out.glob("*.json")
    found = json.loads(saved.read_text())["hellaswag"]["metrics"]["accuracy"]
    assert found == score(*bytewise, eval_files.ITEMS["hellaswag"][:1]).metrics["accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["perplexity", "{}", "--text", "shakespeare", "--reference", "other"],
            "not among the models",
        ),
        (["tasks", "{}", "--data", ".", "--tasks", "hellaswagg"], "no task is called 'hellaswagg'"),
        (["tasks", "{}", "--data", "nowhere", "--tasks", "copa"], "does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    command = [argument.replace("{}", str(folder)) for argument in arguments]
    assert main(["eval", *command, "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_tokenized_text_has_its_size() -> None:
    tokens, size = tokenize_sources(["shakespeare"], Bytes().build([]))
    assert len(tokens) == size.tokens == size.bytes
    assert size.tokens_per_byte == 1
