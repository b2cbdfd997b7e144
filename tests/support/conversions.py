"""Conversions of a very small softmax model, of a few steps each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill import steps
from fastweights.linearize.distill.fit import TRAINED, Fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.train import Bytes, Every
from fastweights.training.data.documents import Data
from fastweights.training.loop.report import Reporter
from killable_runs import FORKS, kill_at
from pretrained import llama

SHORT = Fit(steps=4, batch=2, every=Every(log=1, evaluation=2, checkpoint=2))


def write_source(folder: Path) -> Path:
    """A softmax model on disk, with its tokenizer and a text."""
    llama(3, torch.float32, vocab_size=258).save_pretrained(folder / "model")
    Bytes().build([]).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(
        "".join(f"{n} sheep and {n * n % 97} goats\n" for n in range(200))
    )
    return folder


def copy_tokenizer(source: Path, target: Path) -> None:
    for path in source.glob("tokenizer*"):
        (target / path.name).write_bytes(path.read_bytes())


def conversion(source: Path, **changes) -> Conversion:
    recipe = LinearizationRecipe(
        LinearAttentionConfig(window=4), (TransferConfig(fit=SHORT), AdaptationConfig(fit=SHORT))
    )
    data = Data((str(source / "text.txt"),), length=24, held_out=94)
    return replace(Conversion(str(source / "model"), data, recipe), **changes)


def shorten(recipe: LinearizationRecipe, fit: Fit = SHORT) -> LinearizationRecipe:
    """The recipe with a window and stages for a very small model."""
    analog = replace(recipe.analog, window=min(recipe.analog.window, 4))
    stages = (replace(stage, length=None).with_fit(fit) for stage in recipe.stages)
    return replace(recipe, analog=analog).with_stages(stages)


def skip_pages(set_attribute: Callable[..., None]) -> None:
    """The page of a run takes longer to draw than a very small model to convert."""
    set_attribute(steps, "write_report", lambda *_: None)


class KillAfter(Reporter):
    """Kills its process at call number `calls`, after the beginning of a step, that makes something
    on disk final."""

    def __init__(self, step: str, calls: int) -> None:
        self.beginning, self.calls = f"── {step}", calls

    def note(self, message: str) -> None:
        if message == self.beginning:
            kill_at(self.calls)


def _sit(whole: Conversion, out: Path, step: str, calls: int) -> None:
    skip_pages(setattr)
    run_conversion(whole, out, reporter=KillAfter(step, calls))


def killed(whole: Conversion, out: Path, step: str, calls: int) -> bool:
    """Whether a process of its own was killed so while it ran a conversion."""
    process = FORKS.Process(target=_sit, args=(whole, out, step, calls))
    process.start()
    process.join()
    return process.exitcode == -9


def results(out: Path, checkpoints: bool = True) -> dict[str, bytes]:
    """What a conversion gives, by path: the model, the adapter, all that was trained, and what was
    measured; with checkpoints of runs that were not stopped."""
    folders = (out / name for name in ("model", "adapter", "positions"))
    paths = [*out.glob("*.json"), *out.glob(f"*/**/{TRAINED}")]
    paths += [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in paths
        if path.name not in ("plan.json", "results.json")
        and (checkpoints or "checkpoints" not in path.parts)
    }


def differing(one: Path, other: Path, checkpoints: bool = True) -> list[str]:
    """The paths of what two conversions do not have alike."""
    first, second = (results(out, checkpoints) for out in (one, other))
    return [name for name in first | second if first.get(name) != second.get(name)]
