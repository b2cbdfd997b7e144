from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.train import (
    BPE,
    AdamW,
    Architecture,
    Bytes,
    CheckpointError,
    DataError,
    Every,
    ExistingTokenizer,
    Linear,
    NonFiniteError,
    Text,
    TextStream,
    Windows,
    model_folder,
    read_corpus,
    sequential_windows,
    train,
)
from fastweights.training.language.plot import plot
from fastweights.training.loop.optimizers import matrices
from killable_runs import Heard, curve, end_of, launch_two, sitting, tiny

KILLED = -9
PROSE = "Où l'on mange\t« bien » :\r\n\n  日本語, emoji 🧑‍🚀, a\u0301, \x00 and   spaces \n"


def train_until(config, out: Path, steps: int):
    """Until so many steps are made and validated."""
    heard = Heard()
    return train(config, out, cpu=True, stop=lambda: len(heard.rows) >= steps, reporter=heard)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def undisturbed(folder) -> tuple:
    train(tiny(folder), folder / "undisturbed", cpu=True)
    return end_of(folder / "undisturbed")


# Text


@pytest.fixture(params=["bytes", "bpe", "pretrained"])
def tokenizer(request, tmp_path):
    made = {"bytes": Bytes(), "bpe": BPE(300), "pretrained": BPE(290)}[request.param].build(
        [PROSE * 20]
    )
    if request.param != "pretrained":
        return made
    made.save_pretrained(tmp_path / "saved")
    return ExistingTokenizer(str(tmp_path / "saved")).build([])


def test_every_text_survives_its_tokens(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for again in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")):
        for text in (PROSE, " ", "\n\n", "x ", " .,!?'s", "".join(map(chr, range(0x250)))):
            assert again.decode(again.encode(text)) == text


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer, generator = Bytes().build([]), random.Random(0)
    texts = [PROSE.encode() * 3, bytes(range(256)), *(generator.randbytes(200) for _ in range(20))]
    for raw in texts:
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, raw)) + stream.close() == raw.decode(errors="replace")
    stream = TextStream(tokenizer)
    assert [stream.push(byte) for byte in "né€".encode()] == ["n", "", "é", "", "", "€"]


def test_a_stream_of_text_remembers_little():
    stream = TextStream(Bytes().build([]))
    for _ in range(1000):
        stream.push(0xE2)
    assert len(stream._recent) < 20


def test_shakespeare_is_bundled():
    corpus = read_corpus(Text())
    assert (len(corpus.train), len(corpus.validation)) == (1_003_854, 111_540)
    assert corpus.train.dtype == np.uint16
    assert corpus.tokenizer.decode(corpus.train[:14]) == "First Citizen:"


def test_nats_per_byte_count_bytes_not_tokens(folder):
    corpus = read_corpus(replace(tiny(folder).text, tokenization=BPE(400)))
    text = corpus.tokenizer.decode(corpus.validation[:])
    assert corpus.tokens_per_byte == len(corpus.validation) / len(text.encode()) < 0.6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no text found at .*missing.txt"),
        ("one.txt", b"a", "too few to split"),
        ("short.txt", b"a short text", "10 tokens, fewer than one sequence of 16"),
    ],
)
def test_bad_text_is_named_and_leaves_nothing_behind(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    config = replace(tiny(tmp_path), text=Text((str(tmp_path / name),)))
    with pytest.raises(DataError, match=message):
        train(config, tmp_path / "out", cpu=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokenization", [BPE(256), ExistingTokenizer("/nowhere/at/all")])
def test_bad_tokenizers(folder, tokenization):
    with pytest.raises(DataError, match=r"258|no tokenizer at"):
        read_corpus(replace(tiny(folder).text, tokenization=tokenization))


# Batches


def test_batches_depend_on_the_seed_and_the_step_only():
    tokens = np.arange(1000, dtype=np.uint16)
    one, other = Windows(tokens, 16, seed=3), Windows(tokens.copy(), 16, seed=3)
    late = other.batch(400, 8)
    assert [one.batch(first, 8).tolist() for first in range(0, 408, 8)][-1] == late.tolist()
    assert one.batch(396, 8)[4:].tolist() == late[:4].tolist()
    assert Windows(tokens, 16, seed=4).batch(400, 8).tolist() != late.tolist()


# Optimisation


def test_only_matrices_decay(folder):
    model = tiny(folder).model.build(Bytes().build([]))
    weights = {id(p) for p in matrices(model)}
    names = {
        name.rpartition("layers.0.")[2] for name, p in model.named_parameters() if id(p) in weights
    }
    mixer = {f"mixer.W_{letter}.weight" for letter in ("q", "alpha", "v", "g", "o")}
    assert names == mixer | {f"mlp.W_{i}.weight" for i in (1, 2, 3)} | {"lm_head.weight"}
    groups = AdamW().build(model)[0].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


def test_parts_of_a_batch_add_up(folder, undisturbed):
    train(tiny(folder, accumulate=4), folder / "accumulate", cpu=True)
    for ours, theirs in zip(curve(folder / "accumulate"), undisturbed[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_as_one(folder, undisturbed, tmp_path):
    """Stopped by one of them in the middle, too."""
    launch_two(_train, tiny(folder), tmp_path / "out", 3)
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()]
    assert not (tmp_path / "out" / "model").exists()
    launch_two(_train, tiny(folder), tmp_path / "out", 99)
    for ours, theirs in zip(curve(tmp_path / "out"), undisturbed[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def _train(config, out: Path, steps: int) -> None:
    first, heard = os.environ["RANK"] == "0", Heard()
    stop = lambda: first and len(heard.rows) >= steps  # noqa: E731
    train(config, out, cpu=True, stop=stop, reporter=heard)


def test_bfloat16_goes_on_to_the_same_end(folder, tmp_path):
    config = tiny(folder, bf16=True)
    train(config, tmp_path / "once", cpu=True)
    train_until(config, tmp_path / "twice", 3)
    train(config, tmp_path / "twice", cpu=True)
    assert end_of(tmp_path / "twice") == end_of(tmp_path / "once")


def test_bfloat16_is_close_and_keeps_float32_weights(folder, undisturbed):
    train(tiny(folder, bf16=True), folder / "bf16", cpu=True)
    ours, theirs = curve(folder / "bf16"), undisturbed[0]
    assert ours != theirs
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=0.02)
    weights = load_file(folder / "bf16" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_training_learns(undisturbed):
    losses = [row["loss"] for row in undisturbed[0]]
    assert losses[-1] < losses[0] - 0.5


# Runs


@pytest.mark.usefixtures("pictures")
def test_curves_are_drawn(tmp_path):
    rows = [{"step": n, "loss": 2.0 - n / 4, "lr": 0.1} for n in range(4)]
    sizes = {}
    for name, more in {"one": {}, "both": {"val_loss": 1.5}}.items():
        plot([*rows[:-1], rows[-1] | more], tmp_path / name, "sheep")
        with Image.open(tmp_path / name) as picture:
            assert (picture.format, picture.size) == ("PNG", (676, 468))
        sizes[name] = (tmp_path / name).stat().st_size
    assert sizes["both"] > sizes["one"]


@pytest.mark.usefixtures("undisturbed")
def test_the_result_is_a_plain_model_folder(folder):
    out = folder / "undisturbed"
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = torch.tensor([tokenizer.encode("sheep")])
    last = AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "step-00000006")
    assert torch.equal(model(ids).logits, last(ids).logits)
    assert model_folder(out) == out / "model"
    assert (out / "model" / "modeling_fastweights.py").is_file()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*.partial"))
    assert not [p for p in out.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]


def test_validation_loss_is_that_of_the_saved_model(folder, undisturbed):
    corpus, out = read_corpus(tiny(folder).text), folder / "undisturbed"
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    batches = list(sequential_windows(corpus.validation, 16, 1))
    with torch.no_grad():
        losses = [float(model(input_ids=b, labels=b).loss) * (b.shape[1] - 1) for b in batches]
    assert undisturbed[0][-1]["val_loss"] == pytest.approx(
        sum(losses) / (len(corpus.validation) - 1), rel=1e-5
    )


def test_a_complete_run_is_left_alone(folder, undisturbed):
    result = train(tiny(folder), folder / "undisturbed", cpu=True)
    assert result.complete
    assert result.nats_per_byte == pytest.approx(result.nats_per_token)
    assert end_of(folder / "undisturbed") == undisturbed


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_a_stopped_run_goes_on_to_the_same_end(folder, undisturbed, tmp_path, steps):
    stopped = train_until(tiny(folder), tmp_path / "out", steps)
    assert (stopped.step, stopped.complete) == (steps, False)
    assert not (tmp_path / "out" / "model").exists()
    watch, made = Heard(), len(curve(tmp_path / "out"))
    assert made == steps
    assert train(tiny(folder), tmp_path / "out", cpu=True, reporter=watch).complete
    assert [row["step"] for row in watch.rows] == list(range(made + 1, 7))
    assert end_of(tmp_path / "out") == undisturbed


def last_through(config, out: Path, calls) -> int:
    """Train in processes that kill themselves; how many it takes."""
    for count, limit in enumerate(calls, 1):
        process = sitting(config, out, limit)
        process.join()
        if process.exitcode == 0:
            return count
        assert process.exitcode == KILLED
    raise AssertionError("never came to an end")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_while_writing(folder, undisturbed, tmp_path, seed):
    generator = random.Random(seed)
    calls = (generator.randrange(20, 70) for _ in range(100))
    assert last_through(tiny(folder), tmp_path / "out", calls) > 2
    assert end_of(tmp_path / "out") == undisturbed
    assert not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("calls", range(100))
def test_killed_at_every_point_of_writing(folder, undisturbed, tmp_path, calls):
    last_through(tiny(folder), tmp_path / "out", [calls, None])
    assert end_of(tmp_path / "out") == undisturbed


def stopped_at(folder: Path, out: Path, steps: int) -> Path:
    train_until(tiny(folder), out, steps)
    return out / "checkpoints"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "training.json", "tokenizer.json"]
)
def test_a_damaged_checkpoint_is_passed_over(folder, undisturbed, tmp_path, name):
    damaged = stopped_at(folder, tmp_path / "out", 5) / "step-00000005" / name
    damaged.write_bytes(damaged.read_bytes()[:-20])
    watch = Heard()
    train(tiny(folder), tmp_path / "out", cpu=True, reporter=watch)
    assert len(watch.notes) == 1
    assert str(damaged) in watch.notes[0]
    assert "going back to step-00000004" in watch.notes[0]
    assert end_of(tmp_path / "out") == undisturbed


def test_no_sound_checkpoint_is_an_error(folder, tmp_path):
    checkpoints = stopped_at(folder, tmp_path / "out", 4)
    for weights in checkpoints.rglob("model.safetensors"):
        weights.unlink()
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"step-00000004/model.safetensors.*step-00000002.*remove"
        ):
            train(tiny(folder), tmp_path / "out", cpu=True)


def test_another_run_is_left_alone(folder, undisturbed):
    with pytest.raises(
        CheckpointError, match=r"holds another run \(optimizer.lr was 0.01, is 0.5\)"
    ):
        train(tiny(folder, optimizer=AdamW(lr=0.5)), folder / "undisturbed", cpu=True)
    assert end_of(folder / "undisturbed") == undisturbed


def test_two_at_once_in_one_folder(folder, undisturbed):
    out = folder / "undisturbed"
    with (
        FileLock(out / "run.lock"),
        pytest.raises(CheckpointError, match="another process trains in"),
    ):
        train(tiny(folder), out, cpu=True)
    assert end_of(out) == undisturbed
    assert train(tiny(folder), out, cpu=True).complete


def test_a_damaged_record_is_an_error(folder, tmp_path):
    stopped_at(folder, tmp_path / "out", 0)
    (tmp_path / "out" / "run.json").write_text('{"type')
    with pytest.raises(CheckpointError, match=r"run.json is damaged .* no checkpoint has a copy"):
        train(tiny(folder), tmp_path / "out", cpu=True)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_checkpoints(folder, tmp_path):
    config = tiny(folder, every=Every(log=6, evaluation=6, checkpoint=2), schedule=Cliff())
    with pytest.raises(NonFiniteError, match=r"by step 4; .* lower learning rate"):
        train(config, tmp_path / "out", cpu=True)
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000002"]
    weights = load_file(tmp_path / "out" / "checkpoints" / "step-00000002" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


class Cliff(Linear):
    def factor(self, step: int, steps: int) -> float:
        return 1.0 if step < 2 else float("nan")


@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 3},
        {"length": 1},
        {"model": Architecture(({"name": "metallica"},))},
        {"model": Architecture(({"name": "metala", "heads": 3},), width=16)},
        {"model": Architecture(layers=0)},
    ],
)
def test_what_does_not_fit_leaves_nothing_behind(folder, tmp_path, change):
    with pytest.raises(
        ValueError, match=r"divisible|length = 1|metallica|num_hidden_layers|layers"
    ):
        train(tiny(folder, **change), tmp_path / "out", cpu=True)
    assert not (tmp_path / "out").exists()
