from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.table import Table

from fastweights import MIXERS, PRESETS
from fastweights.cli import VERBS, main, plain_console
from fastweights.cli.progress import Bar
from fastweights.cli.verbs.generate import (
    Request,
    encode_prompt,
    load_model,
    write_continuation,
)
from fastweights.lab.tasks import TASKS
from fastweights.train import BPE, Bytes, train
from killable_runs import tiny

SMALL = ["--layers", "1", "--width", "8", "--length", "16", "--batch", "4"]
SMALL += ["--device", "cpu", "--log-every", "5"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fastweights.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def data(folder) -> list[str]:
    return ["--data", *tiny(folder).text.sources]


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    train(tiny(folder), folder / "bytes", cpu=True)
    return folder / "bytes"


def fails(capsys, *arguments: object) -> str:
    """The one line of standard error of a command that must fail."""
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastweights: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.long
def test_train_stop_go_on(tmp_path, data, capsys):
    """The command as a user gives it, in a process of its own, and again."""
    out = tmp_path / "out"
    steps = ["--steps", "200", "--eval-every", "200", "--sample", "30"]
    arguments = ["train", *data, *SMALL, *steps, "--out", out]
    first = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "Finishing this step and saving. Press Ctrl-C again" in said
    assert "Run the same command again to resume." in said
    rows = (out / "metrics.jsonl").read_text()

    assert main([str(argument) for argument in arguments]) == 0
    second = capsys.readouterr()
    assert "Resuming after step" in second.out
    assert "step 200/200  loss" in second.out
    assert "nats/byte" in second.out
    assert "a sample:" in second.out
    assert second.err == ""
    assert (out / "metrics.jsonl").read_text().startswith(rows)


@pytest.mark.slow
def test_text_is_streamed(trained):
    generate = command("generate", trained, "--tokens", 10**9, "--device", "cpu")
    process = subprocess.Popen(generate, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(200)) == 200
    process.stdout.close()
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (0, b"")


def test_an_interrupt_ends_quietly(capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VERBS["list"].run.__class__, "__call__", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == ""


def test_generation_repeats_with_its_seed(capsys, trained):
    def text(*arguments: object) -> str:
        given = ["generate", trained, "--prompt", "né à", "--tokens", 40, "--device", "cpu"]
        assert main([*map(str, given), *map(str, arguments)]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("né à")
        assert said.err == ""
        return said.out

    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0) == text("--top-k", 1, "--seed", 5)


def test_a_tolerance_needs_something_to_solve(capsys, trained):
    assert "no Mesa layer" in fails(capsys, "generate", trained, "--tol", 1e-4, "--device", "cpu")


@pytest.mark.long
def test_every_flag_of_train_reaches_the_run(capsys, tmp_path, data):
    mixers = '[{"name": "metala", "heads": 2}, {"name": "softmax", "window": 4}]'
    flags = "--steps 3 --tokenizer bpe:300 --accumulate 2 --lr 0.5 --weight-decay 0.25 --warmup 7"
    flags += " --seed 9 --clip 2.5 --eval-every 2 --checkpoint-every 1 --sample 0"
    flags = [*flags.split(), "--mixers", mixers, "--validation", data[1]]
    arguments = ["train", *data, *SMALL, *flags, "--layers", 2, "--out", tmp_path / "out"]
    assert main([str(a) for a in arguments]) == 0
    config = json.loads((tmp_path / "out" / "run.json").read_text())
    assert config["model"]["mixers"][1] == {"name": "softmax", "window": 4}
    assert config["text"]["tokenization"] == {"type": "BPE", **vars(BPE(300))}
    assert config["text"]["validation"] == [data[1]]
    assert config["optimizer"]["lr"] == 0.5
    assert config["optimizer"]["weight_decay"] == 0.25
    assert config["schedule"]["warmup"] == 7
    assert config["every"] == {"type": "Every", "log": 5, "evaluation": 2, "checkpoint": 1}
    assert [
        config[name] for name in ("steps", "batch", "length", "accumulate", "clip", "seed", "bf16")
    ] == [
        *(3, 4, 16, 2, 2.5, 9),
        False,
    ]
    said = capsys.readouterr().out
    assert "300 token vocabulary" in said
    assert "a sample" not in said


@pytest.mark.long
def test_runs_have_a_folder_of_their_own(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", *data, *SMALL, "--steps", "1", "--mixers", "metala", "--sample", "5"]) == 0
    )
    assert (tmp_path / "runs" / "text-metala" / "model" / "config.json").exists()


GOING_ON = ["--length", "16", "--batch", "2", "--sample", "4", "--device", "cpu"]


@pytest.mark.long
def test_a_run_begins_with_another(tmp_path, monkeypatch, data, trained, capsys):
    """By its own tokenizer, with LoRA, in a folder of its own; then longer than it was to be."""
    monkeypatch.chdir(tmp_path)
    command = ["train", *data, "--from", str(trained), "--lora", "2", *GOING_ON]
    command += ["--schedule", "constant"]
    assert main([*command, "--steps", "1"]) == 0
    run = tmp_path / "runs" / "text-bytes"
    said = capsys.readouterr().out
    assert f"begins with {trained / 'model'}: LoRA of rank 2 is trained in float32" in said
    assert "runs/text-bytes/adapter" in said
    record = json.loads((run / "run.json").read_text())
    assert record["model"]["lora"] == {"type": "LoRA", "rank": 2, "alpha": 4.0, "dropout": 0.0}
    assert record["optimizer"]["lr"] == 2e-4
    assert record["schedule"] == {"type": "Constant", "warmup": 50}
    assert main([*command, "--steps", "3"]) == 0
    assert "Resuming after step 1" in capsys.readouterr().out


@pytest.mark.long
def test_a_softmax_model_writes_a_sample_too(tmp_path, data, trained, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=None, eos_token_id=None)
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "gpt2")
    command = ["train", *data, "--from", str(tmp_path / "gpt2"), *GOING_ON, "--steps", "1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    said, record = capsys.readouterr().out, json.loads((tmp_path / "out/run.json").read_text())
    assert "a sample:" in said
    assert (record["optimizer"]["lr"], record["model"]["lora"]) == (1e-4, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "MODEL", "--layers", "2"], "has an architecture already; leave out --layers"),
        (["--from", "MODEL", "--preset", "x", "--width", "9"], "leave out --width, --preset"),
        (["--lora"], "--lora trains adapters of an existing model; name it by --from"),
        (["--from", "MODEL", "--tokenizer", "bpe:300"], "has other tokens (300) than that of"),
        (["--from", "/not/there"], "no model at '/not/there': there is no such folder"),
        (["--track", "wandb"], "tracking by wandb needs wandb: pip install wandb"),
    ],
)
def test_what_an_existing_model_cannot_be_is_said(
    tmp_path, capsys, monkeypatch, data, trained, options, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastweights.environment.find_spec", lambda name: name != "wandb" or None)
    given = [str(trained) if option == "MODEL" else option for option in options]
    assert message in fails(capsys, "train", *data, *given)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_preset_is_trained_with_the_vocabulary_of_the_text(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    flags = ["--length", "16", "--batch", "2", "--steps", "1", "--sample", "0", "--device", "cpu"]
    assert main(["train", *data, *flags, "--preset", "mqar-softmax"]) == 0
    run = tmp_path / "runs" / "text-mqar-softmax"
    assert json.loads((run / "run.json").read_text())["model"] == {
        "type": "PresetArchitecture",
        "name": "mqar-softmax",
    }
    config = json.loads((run / "model" / "config.json").read_text())
    assert (config["learnt_positions"], config["mlp"], config["hidden_size"]) == (
        512,
        "identity",
        128,
    )
    assert config["vocab_size"] < 300


def test_list_counts_the_parameters_of_presets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "--presets", "metala-deit", "pythia-70m"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {row[0]: row[1:3] for row in rows if row and row[0].startswith(("metala", "pythia"))}
    assert list(counts) == [
        name for name in PRESETS if name.startswith(("metala-deit", "pythia-70m"))
    ]
    assert counts["metala-deit-tiny"] == ["6.114M", "6.1M"]
    assert counts["pythia-70m"] == ["70.43M", "70.43M"]
    assert main(["list", "--presets", "jamba"]) == 0
    assert "51,570M 52,000M mamba, softmax Jamba" in " ".join(capsys.readouterr().out.split())


@pytest.mark.sampled
@pytest.mark.parametrize("what", [["--presets"], ["--tasks"], []])
def test_listed_names_can_be_copied_from_a_narrow_terminal(capsys, monkeypatch, what):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", *what]) == 0
    first = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    names = {"--presets": PRESETS, "--tasks": TASKS}.get(*what) if what else MIXERS
    assert [name for name in names or () if name not in first] == []


def test_list_shows_tasks_and_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["list", "--tasks"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in TASKS)
    assert main(["list", "--tasks", "mqar-small-32x4"]) == 0
    shown = capsys.readouterr().out
    inputs = next(line for line in shown.splitlines() if line.startswith("inputs")).split()[1:]
    labels = next(line for line in shown.splitlines() if line.startswith("labels")).split()[1:]
    assert len(inputs) == len(labels) == 32
    assert sum(label != "." for label in labels) == 4


def test_list_names_every_mixer(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in MIXERS)
    assert main(["list", "metala"]) == 0
    said = capsys.readouterr().out
    assert "tau = 16.0" in said
    assert "MetaLA: Unified Optimal" in said
    assert "mesa" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--width", 10, "--layers", 1], "not divisible by heads = 4"),
        (
            ["train", "--length", 1_100_000, "--batch", 1, "--layers", 1, "--width", 16],
            "fewer than one sequence",
        ),
        (["train", "--length", 10**9], "of memory; make it smaller"),
        (["train", "--batch", 10**9], "of memory; make it smaller"),
        (["train", "--width", 10**8], "parameters takes 7,680 PB at least to train on"),
        (["generate", "."], "no model at ."),
        (["list", "--presets", "metallica"], "no preset begins with metallica"),
        (["list", "--tasks", "metallica"], "no task begins with metallica"),
        (["train", "--preset", "metala-36m"], "did you mean metala-360m"),
        (
            ["train", "--preset", "metala-deit-tiny"],
            "is a FastWeightsForImageClassification; training takes language",
        ),
        (["train", "--preset", "hawk", "--layers", 2], "whole architecture; leave out --layers"),
    ],
)
def test_errors_are_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, *arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["metamorphose"], "invalid choice: 'metamorphose'"),
        (["train", "--mixers", "[{"], "not a JSON list"),
    ],
)
def test_arguments_are_checked(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_empty_prompt_begins_a_text():
    tokenizer = Bytes().build(())
    assert encode_prompt("", tokenizer) == [tokenizer.bos_token_id]
    assert encode_prompt("ab", tokenizer) == [97, 98]
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="the prompt '' has no token"):
        encode_prompt("", tokenizer)


def test_generation_ends_where_the_text_ends(capsys, trained):
    """A model that always predicts the end of the text writes nothing more, and says no special
    token."""
    model, tokenizer = load_model(trained, torch.device("cpu"))
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 258)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(100.0 * (torch.arange(258) == tokenizer.eos_token_id))
    write_continuation(model, tokenizer, Request("ab", 50, 0.8, None, 0))
    assert capsys.readouterr().out == "ab\n"


def test_other_runs_are_refused(capsys, trained, data):
    assert "holds another run" in fails(capsys, "train", *data, *SMALL, "--out", trained)


def test_debug_shows_where():
    with pytest.raises(ValueError, match="metallica"):
        main(["list", "metallica", "--debug"])
    with pytest.raises(ValueError, match="metallica"):
        main(["--debug", "list", "metallica"])


def test_version_and_help(capsys):
    for arguments in (["--version"], ["--help"], *([verb, "--help"] for verb in VERBS)):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    assert "fastweights 0." in capsys.readouterr().out


def test_python_runs_the_package_as_the_command():
    line = [sys.executable, "-m", "fastweights", "--version"]
    assert subprocess.run(line, capture_output=True, text=True).stdout.startswith("fastweights 0.")


def test_names_in_square_brackets_are_no_markup() -> None:
    screen, name = io.StringIO(), "runs/[a]/[/b]/:dog:"
    console = plain_console(file=screen, width=60)
    table = Table("model", title=name)
    table.add_row(name)
    for shown in (name, table):
        console.print(shown)
    assert screen.getvalue().count(name) == 3


@pytest.mark.long
def test_the_bar_on_a_terminal(folder, tmp_path):
    screen = io.StringIO()
    console = plain_console(file=screen, force_terminal=True, width=100)
    with Bar(console) as bar:
        train(tiny(folder), tmp_path / "out", cpu=True, reporter=bar)
    assert "6/6" in screen.getvalue()
    assert screen.getvalue().count("validation ") == 2
