"""Numbers hidden in texts: where they stand, and who finds them."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.cli import main
from fastweights.cli.verbs import eval as verb
from fastweights.errors import DataError
from fastweights.lab.evals.needles import NeedleGrid, NeedleScores, draw, measure_needles
from fastweights.train import Bytes
from fastweights.training.loop.checkpoint import save_model
from tiny import tiny

TOKENIZER = Bytes().build([])
PROSE = "".join(f"This is sentence {word} of the book. " for word in "abcdefghijklmnopqrstuvw")


class Finder(nn.Module):
    """Continues with the last number that is told in the last `reach` bytes, and keeps the texts
    that it was asked to continue."""

    device = torch.device("cpu")

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach, self.read = reach, list[str]()

    def forward(self, input_ids: Tensor, **given: Any) -> SimpleNamespace:
        del given
        ids = input_ids.clone()
        for row in ids:
            text = bytes(row[row < 256].tolist()).decode()
            self.read.append(text)
            asked = text.rindex("provided text is") + len("provided text is")
            told = re.findall(r"is: (\d{7})\.", text[max(0, asked - self.reach) : asked])
            row[asked : asked + 8] = torch.tensor([*f" {told[-1] if told else 'unknown'}".encode()])
        return SimpleNamespace(logits=20 * F.one_hot(ids.roll(-1, 1), 258).float())


def found(model: nn.Module, grid: NeedleGrid, text: str | None = None) -> NeedleScores:
    return measure_needles(model, TOKENIZER, grid, text, batch=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, PROSE])
def test_numbers_stand_where_the_grid_says(text: str | None) -> None:
    grid = NeedleGrid((600, 1200), depths=3, repeats=2, seed=5)
    model = Finder(10_000)
    assert (found(model, grid, text).accuracy == 1).all()
    assert len(model.read) == 12
    for number, read in enumerate(model.read):
        length = grid.lengths[number // 6]
        assert length - 100 < len(read) <= length
        hay = read[: read.rindex("\nWhat is")].partition("afterwards.\n")[2]
        told = re.search(r"One of [^:]*: \d{7}\.", hay)
        assert told is not None
        place = told.start() / (len(hay) - len(told.group()))
        assert abs(place - grid.places[number // 2 % 3]) < 0.15
        if text is not None:
            assert set(re.findall(r"sentence (\w)", hay)) <= set("abcdefghijklmnopqrstuvw")
    again = Finder(10_000)
    found(again, grid, text)
    assert again.read == model.read


def test_who_sees_only_the_end_finds_only_what_stands_there() -> None:
    grid = NeedleGrid((600, 2400), depths=3, repeats=4)
    scores = found(Finder(700), grid)
    assert scores.accuracy.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (scores.nll[scores.accuracy == 1] < 1e-3).all()
    assert (scores.nll[scores.accuracy == 0] > 20).all()
    assert scores.mean == pytest.approx(4 / 6)
    assert scores.weighted_mean == pytest.approx((1 * 1 + 2 * 1 / 3) / 3)


def test_grids_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="do not ascend"):
        NeedleGrid((512, 256))
    with pytest.raises(ValueError, match="repeats"):
        NeedleGrid(repeats=0)
    with pytest.raises(ValueError, match="no room for a sentence beside the question"):
        found(Finder(9), NeedleGrid((64,)))
    with pytest.raises(DataError, match="1 sentences is too short"):
        found(Finder(9), NeedleGrid((600,)), "Only one.")


def test_the_picture_has_a_column_for_each_model() -> None:
    grid = NeedleGrid((600, 1200), depths=2, repeats=1)
    scores = NeedleScores(grid, np.array([[1.0, 0.5], [0.0, 0.25]]), np.ones((2, 2)))
    figure = draw({"one": scores, "other": scores})
    assert len(figure.axes) == 4
    assert [text.get_text() for text in figure.axes[0].texts] == ["100%", "50%", "0%", "25%"]


@pytest.mark.usefixtures("pictures")
def test_the_command_looks_for_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    save_model(tiny("metala", vocab_size=258), TOKENIZER, folder)
    grid = ["--lengths", "450,600", "--depths", "2", "--repeats", "1"]
    command = ["--debug", "eval", "needles", str(folder), *grid, "--device", "cpu"]
    assert main([*command, "--out", str(out)]) == 0
    (saved,) = out.glob("*.json")
    record = json.loads(saved.read_text())
    assert record["lengths"] == [450, 600]
    assert np.shape(record["accuracy"]) == np.shape(record["nll"]) == (2, 2)
    assert (out / "needles.png").stat().st_size > 1000
    assert "100% deep" in capsys.readouterr().out


def test_the_command_reads_no_more_of_a_text_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}. " * 3)
    monkeypatch.setattr(verb, "HAY_CHARACTERS", 1)
    sources = [str(tmp_path / f"{name}.txt") for name in ("one", "two")]
    assert verb._text_of(Namespace(text=sources, field=None)) == "This is one. " * 3
    monkeypatch.undo()
    whole = "This is one. " * 3 + "\n" + "This is two. " * 3 + "\n"
    assert verb._text_of(Namespace(text=sources, field=None)) == whole
