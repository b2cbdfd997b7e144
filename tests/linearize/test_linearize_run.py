"""`fastweights linearize`: a run from a softmax model to a linear one, killed and resumed."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conversions import SHORT, conversion, differing
from fastweights.cli import main
from fastweights.cli.progress import Lines
from fastweights.cli.verbs import linearize as verb_module
from fastweights.errors import TrainingError
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
)
from fastweights.linearize.distill.run import ConversionRun, ConversionText
from fastweights.linearize.distill.steps import steps_of
from fastweights.linearize.distill.trained import AllWeights
from fastweights.linearize.evaluate import report as report_module
from fastweights.linearize.evaluate.comparison import MODES, modes_in
from fastweights.linearize.evaluate.report import LayerMaps, plot_adaptation, plot_maps
from fastweights.render.plots import canvas
from fastweights.train import Bytes, CheckpointError
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.report import WorkDone
from killable_runs import Heard, stop_after
from pretrained import llama
from tolerances import SAME, assert_close

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("pictures")
def test_a_run_gives_a_model_its_numbers_and_a_report(source, tmp_path):
    assert run_conversion(conversion(source, softmax_layers=1), tmp_path / "run")
    read = lambda name: json.loads((tmp_path / "run" / f"{name}.json").read_text())  # noqa: E731
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (tmp_path / "run" / "model" / "modeling_fastweights.py").is_file()
    assert model.config.model_type == "linearized_llama"
    kept = read("ranking")["softmax"]
    rest = [layer for layer in range(3) if layer not in kept]
    again = linearize(
        AutoModelForCausalLM.from_pretrained(source / "model"),
        LinearAttentionConfig(window=4),
        rest,
    )
    light = PeftModel.from_pretrained(again, tmp_path / "run" / "adapter")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(light(ids).logits, model(ids).logits)
    assert len(kept) == 1
    assert sorted(kept + [site["layer"] for site in model.config.linearize["sites"]]) == [0, 1, 2]
    assert read("convert")["largest_difference"] < 1e-5
    judged = read("evaluation")
    modes = modes_in(judged)
    assert modes.keys() == {*MODES}
    require_share(judged)
    assert judged["softmax"]["kl"] == pytest.approx(0, abs=1e-6)
    assert judged["linear"]["kl"] > 0
    assert read("plan")["break_even"] > 0
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert all(
        f"<h2 id='{part}'" in page for part in ("what-it-costs", "attention", "training", "layers")
    )
    assert {p.name for p in (tmp_path / "run" / "report").glob("*.png")} >= {
        "share.png",
        "maps.png",
        "positions.png",
        "losses.png",
    }


def require_share(judged: dict) -> None:
    """The share is that of the rows, or there is a reason that there is none."""
    n = {name: row["nats_per_token"] for name, row in modes_in(judged).items()}
    details = judged["share_details"]
    lost = n["window only"] - n["softmax"]
    assert details["window_loses"] == pytest.approx(lost)
    assert (judged["share"] is None) == (lost <= 2 * details["standard_error"])
    assert (details["undefined"] is None) == (judged["share"] is not None)
    if judged["share"] is not None:
        assert judged["share"] == pytest.approx((n["window only"] - n["linear"]) / lost)


def test_a_run_stopped_anywhere_goes_on_to_the_same_model(source, tmp_path):
    """A sitting that ends at the first question whether to stop, one at the second, one at the
    fifth, and so on."""
    whole = conversion(source, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "once")
    sittings = 0
    while not run_conversion(whole, tmp_path / "often", stop=stop_after(sittings**2)):
        sittings += 1
    assert sittings >= 8
    assert differing(tmp_path / "once", tmp_path / "often", checkpoints=False) == []


def test_a_part_of_a_run_knows_whether_it_is_done(source, tmp_path):
    small = conversion(source, softmax_layers=1)
    verbs = steps_of(small.recipe)
    done = lambda: [verb.name for verb in verbs if verb.is_done(tmp_path / "run")]  # noqa: E731
    assert done() == []
    assert run_conversion(small, tmp_path / "run", until="transfer")
    assert done() == ["plan", "convert", "transfer"]
    assert run_conversion(small, tmp_path / "run")
    assert done() == [verb.name for verb in verbs]


def test_a_damaged_file_is_named_and_written_again(source, tmp_path):
    small, out = conversion(source, softmax_layers=1), tmp_path / "run"
    assert run_conversion(small, out, until="eval")
    names = [*(f"{name}.json" for name in ("plan", "convert", "transfer", "ranking", "evaluation"))]
    names += ["transfer/trained.safetensors", "finetune/trained.safetensors"]
    for number, name in enumerate(names):
        sound = (out / name).read_bytes()
        damages = (
            sound[: len(sound) // 2],
            b"",
            b"[]",
            sound[:-30] + bytes([sound[-30] ^ 1]) + sound[-29:],
        )
        (out / name).write_bytes(damages[number % 4])
        heard = Heard()
        assert run_conversion(small, out, until="eval", reporter=heard)
        said = f"{name} is missing or damaged; writing it again"
        assert any(said in note for note in heard.notes)
        if name != "plan.json":  # how long it would take is measured anew
            assert (out / name).read_bytes() == sound


def test_a_damaged_file_of_an_earlier_version_is_named(source, tmp_path):
    small, out = conversion(source, softmax_layers=1), tmp_path / "run"
    assert run_conversion(small, out, until="transfer")
    for record in out.rglob("results.json"):
        record.unlink()
    for name in ("convert.json", "transfer/trained.safetensors"):
        sound = (out / name).read_bytes()
        (out / name).write_bytes(sound[: len(sound) // 2])
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is damaged .*; remove"):
            run_conversion(small, out, until="transfer")
        (out / name).write_bytes(sound)


def test_what_cannot_be_divided_is_refused(source, tmp_path):
    recipe = conversion(source).recipe
    transfer, adapt = recipe.stages
    blockwise = recipe.with_stages((replace(transfer, blockwise=True), adapt))
    with pytest.raises(TrainingError, match="leave out blockwise or shard"):
        run_conversion(
            conversion(source, recipe=blockwise), tmp_path / "run", layout=Layout(shard=True)
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bfloat16_stopped_anywhere_goes_on_to_the_same_model(source, tmp_path):
    half = replace(SHORT, bf16=True)
    recipe = conversion(source).recipe
    recipe = recipe.with_stages(stage.with_fit(half) for stage in recipe.stages)
    whole, sittings = conversion(source, recipe=recipe, softmax_layers=1), 0
    assert run_conversion(whole, tmp_path / "once")
    while not run_conversion(whole, tmp_path / "often", stop=stop_after(sittings**2)):
        sittings += 1
    assert sittings > 1
    assert differing(tmp_path / "once", tmp_path / "often", checkpoints=False) == []


def test_another_run_is_not_overwritten(source, tmp_path):
    run_conversion(conversion(source), tmp_path / "run", until="convert")
    with pytest.raises(CheckpointError, match=r"holds another run \(seed was 0, is 1\)"):
        run_conversion(conversion(source, seed=1), tmp_path / "run")


def test_all_weights_adapt_and_are_judged_by_the_model_as_it_was(source, tmp_path):
    recipe = LinearizationRecipe(
        LinearAttentionConfig("relu", window=0), (AdaptationConfig(AllWeights(), fit=SHORT),)
    )
    assert run_conversion(conversion(source, recipe=recipe), tmp_path, until="eval")
    judged = json.loads((tmp_path / "evaluation.json").read_text())
    assert modes_in(judged).keys() == {"softmax", "linear"}
    assert judged["share"] is None
    assert judged["share_details"]["undefined"] == "the linear attention has no window beside it"
    swapped = json.loads((tmp_path / "convert.json").read_text())["linear"]
    assert judged["linear"]["perplexity"] != swapped["perplexity"]


def test_the_command_plans_runs_and_generates(source, tmp_path, capsys):
    model, text, out = str(source / "model"), str(source / "text.txt"), str(tmp_path / "run")
    assert main(["linearize", "plan", model, "--window", "4", "--length", "24"]) == 0
    said = capsys.readouterr().out
    assert "linear      layers 0–2" in said
    attention = "rule windowed, features landmarks, window 4 on average, by head, sinks 4"
    assert f"attention   {attention}" in said
    assert "tokens on" in said
    small = ["--length", "24", "--window", "4", "--batch", "2"]
    small += ["--transfer-steps", "2", "--finetune-steps", "2"]
    assert main(["linearize", model, "--data", text, "--out", out, *small, "--device", "cpu"]) == 0
    assert "report.html" in capsys.readouterr().out
    assert main(["linearize", "generate", out, "sheep", "--tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("sheep")
    options = ["--tokens", "5", "--temperature", "0", "--device", "cpu"]
    assert main(["linearize", "generate", out, "sheep", *options]) == 0
    greedy = capsys.readouterr().out
    assert main(["generate", out, "--prompt", "sheep", *options]) == 0
    assert capsys.readouterr().out == greedy


def test_a_stopped_command_ends_as_by_its_signal(source, tmp_path, monkeypatch, capsys):
    class Signalled(Lines):
        def progress(self, row):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(verb_module, "reporter", Signalled)
    given = [str(source / "model"), "--data", str(source / "text.txt"), "--out", str(tmp_path)]
    small = ["--length", "24", "--window", "4", "--batch", "2", "--log-every", "1"]
    assert main(["linearize", *given, *small, "--device", "cpu"]) == 143
    assert capsys.readouterr().out.endswith("Stopped. Run the same command again to resume.\n")


def test_frozen_weights_may_be_quantised_while_the_rest_is_trained(source, tmp_path):
    pytest.importorskip("bitsandbytes")
    original = llama(
        3, torch.float32, vocab_size=258, hidden_size=64, intermediate_size=64, head_dim=16
    )
    original.save_pretrained(tmp_path / "softmax")
    Bytes().build([]).save_pretrained(tmp_path / "softmax")
    small = conversion(source, model=str(tmp_path / "softmax"), bits=8, softmax_layers=1)
    assert run_conversion(small, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "convert.json").read_text())["largest_difference"] <= SAME
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert {weight.dtype for weight in result.values()} == {torch.float32}
    changed = {
        name
        for name, weight in original.state_dict().items()
        if not torch.equal(weight, result[name])
    }
    assert changed
    assert all(".self_attn." in name for name in changed)
    assert any("linear_branch" in name for name in result)


def test_four_bits_are_refused_where_they_pass_no_gradients(source, tmp_path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="bits=4 on a CPU"):
        run_conversion(conversion(source, bits=4), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("package", "bits", "what"), [("bitsandbytes", 8, "bits=8"), ("peft", None, "LoRA")]
)
def test_a_missing_package_is_said_before_anything_is_done(
    source, tmp_path, monkeypatch, package, bits, what
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{what} needs {package}: pip install"):
        run_conversion(conversion(source, bits=bits), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_run(source, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "linearize.md").read_text()
    commands = re.findall(r"<!-- run -->\n```sh\nfastweights (.*?)```", page, re.DOTALL)
    assert len(commands) == 5
    monkeypatch.chdir(tmp_path)
    given = {"MODEL": str(source / "model"), "TEXT": str(source / "text.txt")}
    for command in commands:
        assert (
            main([given.get(word, word) for word in shlex.split(command.replace("\\\n", " "))]) == 0
        )
    assert "Once upon a time" in capsys.readouterr().out
    rows = json.loads((tmp_path / "runs" / "linear" / "bench.json").read_text())["rows"]
    assert [(row["contender"], row["batch"], row["tokens"]) for row in rows] == [
        (contender, batch, tokens)
        for batch in (1, 2)
        for tokens in (8, 32)
        for contender in ("linear", "softmax")
    ]
    assert (tmp_path / "runs" / "linear" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_maps_have_labels_and_one_scale():
    maps = LayerMaps(*torch.rand(3, 2, 8, 8).softmax(-1))
    *panels, bar = plot_maps({0: maps, 1: maps}).axes
    assert {(image.norm.vmin, image.norm.vmax) for a in panels for image in a.images} == {(0, 1)}
    assert bar.get_ylabel().startswith("weight / largest weight")
    assert panels[0].get_ylabel() == "query (token)"
    assert panels[-1].get_xlabel() == "key (token)"
    assert panels[1].get_title(loc="left") == "layer 0, head 0\nlinear, trained"


def test_what_is_trained_and_cross_entropy_have_axes_of_their_own():
    _, panels = canvas()
    rows = [{"step": 1, "loss": 0.002}, {"step": 4, "loss": 0.001, "val_loss": 3.5}]
    plot_adaptation(panels[0, 0], "finetune", rows)
    trained, held_out = panels[0, 0].figure.axes
    assert [line.get_ydata().tolist() for line in trained.lines] == [[0.002, 0.001]]
    assert [line.get_ydata().tolist() for line in held_out.lines] == [[3.5]]
    assert held_out.get_ylabel() == "nats / token, held-out"


def test_without_a_layer_to_keep_none_is_ranked(source, tmp_path):
    small = conversion(source)
    assert run_conversion(small, tmp_path / "run", until="eval")
    assert not (tmp_path / "run" / "ranking.json").exists()
    assert run_conversion(small, tmp_path / "run", until="rank-layers")
    assert json.loads((tmp_path / "run" / "ranking.json").read_text())["softmax"] == []


def test_all_that_takes_long_is_told(source, tmp_path):
    heard, told = Heard(), dict[str, list[WorkDone]]()
    landmarks = LinearAttentionConfig("landmarks", 2, window=4)
    small = conversion(source, recipe=LinearizationRecipe(landmarks, ()), softmax_layers=1)
    assert run_conversion(small, tmp_path / "run", until="report", reporter=heard)
    for phase in heard.phases:
        told.setdefault(phase.what, []).append(phase)
    words = ("landmarks", "comparing", "ranking", "sampling")
    assert all(any(word in what for what in told) for word in words)
    for phases in told.values():
        assert phases[0].done == 0
        assert phases[-1].done == phases[-1].total


def test_a_measurement_stops_when_it_is_asked_to(source, tmp_path):
    small, out, heard = conversion(source), tmp_path / "run", Heard()
    stop = lambda: "sampling" in [phase.what for phase in heard.phases]  # noqa: E731
    assert not run_conversion(small, out, reporter=heard, stop=stop)
    assert heard.phases[-1].what == "sampling"
    assert not (out / "evaluation.json").exists()
    assert run_conversion(small, out)


@pytest.mark.usefixtures("pictures")
def test_maps_before_training_are_those_of_placed_landmarks(source, tmp_path, monkeypatch):
    recorded = list[dict[int, LayerMaps]]()
    monkeypatch.setattr(report_module, "plot_maps", lambda maps: recorded.append(maps) or Figure())
    landmarks = LinearAttentionConfig("landmarks", 4, window=4)
    small = conversion(source, recipe=LinearizationRecipe(landmarks, ()))
    assert run_conversion(small, tmp_path / "run", until="report")
    [maps] = recorded
    assert len(maps) == 3
    for layer in maps.values():  # nothing was trained
        assert_close(layer.untrained, layer.trained, "maps")


def test_measures_beside_a_stage_read_no_more_than_it_trains_on(source, tmp_path):
    small = conversion(source)
    small = replace(small, data=replace(small.data, held_out=400))
    assert run_conversion(small, tmp_path / "run")
    read = lambda name: json.loads((tmp_path / "run" / f"{name}.json").read_text())  # noqa: E731
    run = ConversionRun(small, tmp_path / "run")
    text, stage = ConversionText(run), small.recipe.stages[0]
    beside = text.validation_beside(stage)
    assert beside.tokens == 4 * 23 + 1 < text.validation.tokens
    assert text.validation_beside(stage, length=80).tokens == 2 * 79 + 1
    assert text.validation_beside(stage, length=250).tokens == text.validation.tokens
    softmax = AutoModelForCausalLM.from_pretrained(source / "model")
    ids = torch.cat([batch["input_ids"] for batch in beside.sequential_batches(1)])
    loss = float(softmax(ids, labels=ids).loss.detach())
    for row in (read("convert")["linear"], read("transfer")["linear"]):
        assert row["tokens"] == ids[:, 1:].numel()
        assert row["nats_per_token"] - row["above_softmax"] == pytest.approx(loss, rel=1e-5)
    assert "tokens" not in read("evaluation")["linear"]
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    above = read("convert")["linear"]["above_softmax"]
    swapped = read("evaluation")["softmax"]["nats_per_token"] + above
    assert f">{swapped:.3g}<" in page.partition("swapped")[2].partition("</tr>")[0]
