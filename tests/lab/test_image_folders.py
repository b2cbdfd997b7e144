"""Folders of images: what is read of them, DeiT's augmentation and model, and shares of batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import image_runs
from beside_cpu import require_timm
from distributions import assert_frequencies, rng
from fastweights.lab.sweep import (
    InProcess,
    SweepFolder,
    SweepModel,
    SweepPlan,
    fit,
    sweep,
    unfinished,
)
from fastweights.lab.sweep.trainer import batches
from fastweights.lab.tasks import Crop, DeiTAugmentation, ImageFolder, imagenet
from fastweights.lab.tasks.augmentation import Mixing, posterize
from fastweights.lab.tasks.base import Batch, BatchShare, Examples
from fastweights.lab.tasks.images import ValidationImages
from fastweights.models import PRESETS
from fastweights.training.data.left_out import LeftOutWarning
from fastweights.training.loop.processes import Alone
from image_runs import NAMES, Corner, write_noise
from running import Running, command


def write_images(folder: Path, each: int) -> None:
    """Three classes of red, brighter from class to class, in `train` and `val`."""
    for part in ("train", "val"):
        for label, name in enumerate(NAMES):
            (folder / part / name).mkdir(parents=True)
            for i in range(each):
                picture = Image.new("RGB", (40 + i, 30), (100 * label, 0, 0))
                picture.save(folder / part / name / f"{i}.png")


def noise(folder: Path, each: int) -> ImageFolder:
    write_noise(folder, each)
    return ImageFolder(folder, Corner(8))


def everything(examples: Examples, seed: int = 0, share: BatchShare = BatchShare()) -> Batch:
    """All examples in one batch."""
    return next(examples.batches([torch.arange(len(examples))], [seed], share))


def test_the_middle_of_images_is_shown_in_tests(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    protocol = imagenet.metala(tmp_path, view=Crop(56))
    batch = everything(protocol.test_set(0)[0])
    assert batch.inputs.shape == (6, 3, 56, 56)
    red = batch.inputs[:, 0, 30, 30] * 0.229 + 0.485
    torch.testing.assert_close(red, batch.labels * 100 / 255, rtol=0, atol=1e-5)
    model = protocol.model("softmax", hidden_size=16, num_hidden_layers=1, patch_size=28)
    assert torch.isfinite(protocol.task.loss(model, batch))
    with pytest.raises(ValueError, match="has only 3"):
        protocol.task.draw(rng(), 7)
    with pytest.raises(FileNotFoundError, match="no images"):
        ImageFolder(tmp_path / "nothing")


def test_the_middle_is_seven_eighths_of_the_image() -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32] = 255
    shown = (
        Crop(32)(
            Image.fromarray(pixels),
        )[0]
        * 0.229
        + 0.485
    )
    torch.testing.assert_close(shown[:, :14], torch.ones(32, 14))
    torch.testing.assert_close(shown[:, -14:], torch.zeros(32, 14), rtol=0, atol=1e-6)


def test_training_and_validation_divide_the_images_of_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder that is walked once."""
    write_images(tmp_path, 3)
    walked, walk = list[str](), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda path, *a: walked.append(path.name) or walk(path, *a))
    protocol = imagenet.metala(tmp_path, view=Crop())
    assert walked == ["train", "val"]
    parts = protocol.train, protocol.validation or ()
    train, validation = (
        {path.relative_to(tmp_path).as_posix() for (one,) in [part] for path, _ in one.task.files}
        for part in parts
    )
    assert validation == {f"train/{name}/2.png" for name in NAMES}
    assert train == {f"train/{name}/{i}.png" for name in NAMES for i in (0, 1)}
    assert [part[0].examples for part in parts] == [6, 3]
    assert (range(1300)[ValidationImages()(1300)], range(1)[ValidationImages()(1)]) == (
        range(1248, 1300),
        range(1, 1),
    )


def test_every_epoch_has_other_views_and_every_run_the_same(tmp_path: Path) -> None:
    """Whatever is read beside an image, before it or by which process."""
    examples = noise(tmp_path, 7).examples(rng(), 21)
    before = torch.random.get_rng_state()
    first, second = everything(examples, 1), everything(examples, 2)
    assert torch.equal(first.labels, second.labels)
    assert not any(torch.equal(a, b) for a, b in zip(first.inputs, second.inputs, strict=True))
    pieces = list(examples.batches(torch.arange(21).split(8), [1]))
    assert [len(piece) for piece in pieces] == [8, 8, 5]
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), first.inputs)
    again = next(examples.batches([torch.tensor([3, 24])], [1]))  # 24 is 3 another time
    assert torch.equal(again.inputs[0], first.inputs[3])
    assert not torch.equal(again.inputs[1], first.inputs[3])
    assert again.labels[0] == again.labels[1]
    assert torch.equal(torch.random.get_rng_state(), before)
    begun = examples.batches(torch.arange(21).split(1), [1])
    next(begun)
    begun.close()  # a run that is stopped waits for no file


def test_a_sweep_reads_a_folder_of_images(tmp_path: Path) -> None:
    write_images(tmp_path, 3)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "patch_size": 28}
    plan = SweepPlan(
        {"image-folder": imagenet.metala(tmp_path, view=Crop(56))},
        (SweepModel("tiny", "linear", sizes),),
        training={"epochs": 2, "batch": 4, "bf16": False},
    )
    (row,) = sweep(plan, tmp_path / "out", InProcess(), listener=lambda result: None)
    assert row.steps == 4
    assert 0 <= row.accuracy <= 1


def test_what_a_folder_of_images_leaves_out_is_counted(tmp_path: Path) -> None:
    for name in ("cat/1.PNG", "cat/._1.png", ".ipynb_checkpoints/1.png", "2.png", "cat/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name, "png")
    with pytest.warns(LeftOutWarning) as said:
        folder = ImageFolder(tmp_path)
    assert folder.files == [(tmp_path / "cat/1.PNG", 0)]
    assert folder.names == ["cat"]
    assert str(said[0].message) == (
        f"left out of {tmp_path}: hidden files: 2 (.ipynb_checkpoints/1.png; cat/._1.png), images"
        " outside of the classes' folders: 1 (2.png), files of other kinds: 1 (cat/notes.md)"
    )


# shares of a batch, and mixing --------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_shares_divide_a_batch_and_keep_its_ends_together(size: int, count: int) -> None:
    rows = torch.arange(100, 100 + size)
    shares = [BatchShare(index, count)(rows) for index in range(count)]
    assert sorted(torch.cat(shares).tolist()) == rows.tolist()
    for share in shares:
        assert torch.equal(share.flip(0), 199 + size - share)
    if size % (2 * count) == 0:
        assert {len(share) for share in shares} == {size // count}


def test_processes_mix_their_shares_as_one_mixes_the_batch(tmp_path: Path) -> None:
    folder = replace(noise(tmp_path, 4), mixing=Mixing())
    examples = folder.examples(rng(), 12)
    for seed in range(4):
        whole, *shares = (
            everything(examples, seed, share)
            for share in (BatchShare(), BatchShare(0, 2), BatchShare(1, 2))
        )
        order = torch.cat([BatchShare(index, 2)(torch.arange(12)) for index in (0, 1)])
        for name in ("inputs", "labels", "mixed"):
            parts = [getattr(share, name) for share in shares]
            torch.testing.assert_close(torch.cat(parts), getattr(whole, name)[order])


def test_mixed_images_have_the_shares_of_their_classes() -> None:
    """Images are one colour each, so that its mean says how much is left of it."""
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 16, 16).contiguous()
    classes = torch.eye(6)
    mixed, cut = 0, list[float]()
    for seed in range(200):
        shown, shares = Mixing()(images, classes, rng(seed))
        torch.testing.assert_close(shares.sum(1), torch.ones(6))
        torch.testing.assert_close(shown.mean((1, 2, 3)), shares @ torch.arange(6.0))
        if len(shown[0].unique()) > 1:
            cut.append(float(shares[0, 0]))
        else:
            mixed += 1
    assert_frequencies(np.array([mixed, 200 - mixed]), np.full(2, 0.5), "mixup and CutMix")
    assert min(cut) < 0.5
    assert max(cut) > 0.9


def test_an_epoch_shows_its_images_several_times(tmp_path: Path) -> None:
    write_images(tmp_path, 7)
    protocol = imagenet.metala(tmp_path, view=Crop(8))
    repeated = replace(protocol, training=replace(protocol.training, batch=6, epochs=1))
    assert repeated.training.repeats == 3
    (examples,) = protocol.training_set(0)
    seen = list[int]()

    def note(_: Examples, rows: Iterable[Tensor], *_others: object) -> list[Batch]:
        seen.extend(torch.cat(list(rows)).tolist())
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(examples), "batches", note)
        list(batches(repeated, 0))
    assert len(seen) == len(examples) == 18
    assert len(set(seen)) == 18  # no draw twice
    assert len({row % 18 for row in seen}) == 6


def test_losses_are_smoothed_and_of_mixed_classes(tmp_path: Path) -> None:
    task = replace(noise(tmp_path, 1), smoothing=0.3)
    logits = torch.randn(2, 3)
    batch = Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 2]))

    log = logits.log_softmax(1)
    smooth = 0.7 * torch.eye(3)[[0, 2]] + 0.1
    torch.testing.assert_close(task.loss(Model(logits), batch), -(smooth * log).sum() / 2)
    shares = torch.tensor([[0.5, 0.5, 0], [0, 0.2, 0.8]])
    expected = -((0.7 * shares + 0.1) * log).sum() / 2
    torch.testing.assert_close(task.loss(Model(logits), replace(batch, mixed=shares)), expected)


@dataclass
class Model:
    """One that knows its logits."""

    logits: Tensor

    def __call__(self, **_: object) -> Model:
        return self


@pytest.mark.parametrize("begun", [False, True])
def test_processes_train_as_one_does(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, by gloo, on batches of 8 and 7 images: the same curve and scores; also of a run
    that one of them has begun."""
    for part in ("train", "val"):
        write_noise(tmp_path / part, 6 if part == "train" else 3)
    (alone,) = image_runs.train(tmp_path, tmp_path / "alone", Alone())
    if begun:
        monkeypatch.setattr(unfinished, "INTERVAL", 0.0)
        run = next(image_runs.plan(tmp_path).runs())
        state = tmp_path / "two" / "unfinished" / f"{run.key}.safetensors"
        with pytest.raises(StopIteration):
            fit(run, lambda point, left=iter([None]): next(left), unfinished=state)
        assert state.exists()
    words = [str(tmp_path), str(tmp_path / "two")]
    running = Running(command(words, processes=2, module="image_runs"), tmp_path / "said")
    assert running.end() == 0, running.errors
    (two,) = (SweepFolder(tmp_path / "two").row(next(image_runs.plan(tmp_path).runs())),)
    assert two is not None
    assert two.steps == alone.steps == 4
    assert (two.accuracy, two.parts) == (alone.accuracy, alone.parts)
    assert two.loss == pytest.approx(alone.loss, rel=1e-5)
    for ours, theirs in zip(two.curve, alone.curve, strict=True):
        assert ours.step == theirs.step
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


# DeiT by timm -------------------------------------------------------------------------------------


def test_without_timm_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, 2)
    monkeypatch.setattr("fastweights.environment.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="DeiTAugmentation needs timm: pip install timm"):
        imagenet.deit(tmp_path)


def test_no_bits_of_a_colour_are_black() -> None:
    image = Image.new("RGB", (2, 2), (200, 100, 3))
    assert posterize(image, 0).getpixel((0, 0)) == (0, 0, 0)
    assert posterize(image, 1).getpixel((0, 0)) == (128, 0, 0)


def test_deits_augmentation_is_timms(tmp_path: Path) -> None:
    require_timm()
    write_noise(tmp_path, 40)
    examples = ImageFolder(tmp_path, DeiTAugmentation(32)).examples(rng(), 120)
    first, again, other = (everything(examples, seed).inputs for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert first.shape == (120, 3, 32, 32)
    assert not (first == other).flatten(1).all(1).any()
    steps = [type(step).__name__ for step in DeiTAugmentation()._transform.transforms]
    assert steps == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "RandAugment",
        "MaybeToTensor",
        "Normalize",
        "RandomErasing",
    ]


@pytest.mark.parametrize("first", [0.1, 0.9])
def test_batches_are_mixed_as_timm_mixes_them(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same draws."""
    require_timm()
    from timm.data.mixup import Mixup

    images, labels = torch.randn(4, 3, 7, 7), torch.tensor([2, 0, 1, 2])
    theirs = Mixup(0.8 * (first < 0.5), 1.0 * (first > 0.5), label_smoothing=0, num_classes=3)
    places = iter((5, 2))
    monkeypatch.setattr(np.random, "beta", lambda *_, **__: 0.4)
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(places))
    found = Mixing()(images, torch.eye(3)[labels], cast(Any, Draws(first)))
    for ours, expected in zip(found, theirs(images.clone(), labels), strict=True):
        torch.testing.assert_close(ours, expected)


@dataclass
class Draws:
    """A generator whose draws are known."""

    first: float

    def random(self) -> float:
        return self.first

    def beta(self, *_: float) -> float:
        return 0.4

    def integers(self, *_: int, **__: int) -> np.ndarray:
        return np.array([5, 2])


def test_deits_model_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    require_timm()
    write_images(tmp_path, 2)
    for size, published in ((imagenet.TINY, 5.7e6), (imagenet.SMALL, 22.0e6)):
        protocol = imagenet.deit(tmp_path, size)
        with torch.device("meta"):
            model = protocol.model("softmax", num_labels=1000)
        found = sum(p.numel() for p in model.parameters())
        assert found == pytest.approx(published, abs=0.1e6)


def test_a_sweep_trains_deit(tmp_path: Path) -> None:
    require_timm()
    write_images(tmp_path, 3)
    plan = SweepPlan(
        {"deit": imagenet.deit(tmp_path, view=DeiTAugmentation(32))},
        (SweepModel("softmax", "softmax", {}),),
        training={"epochs": 1, "batch": 4},
    )
    (row,) = sweep(plan, tmp_path / "out", InProcess(), listener=lambda result: None)
    assert (row.steps, row.width) == (2, 192)


def test_table_6_has_the_printed_numbers_of_parameters(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    printed = {"hgrn": (6.1, 23.7), "gla": (6.1, 23.5), "mamba": (6.1, 23.7), "metala": (6.1, 23.7)}
    for size in (imagenet.TINY, imagenet.SMALL):
        protocol = imagenet.metala(tmp_path, size, Crop())
        for name, sizes in printed.items():
            with torch.device("meta"):
                model = protocol.model(name, num_labels=1000)
            millions = sum(p.numel() for p in model.parameters()) / 1e6
            assert millions == pytest.approx(sizes[size.column], abs=0.35)
        heads = protocol.config("metala").mixers[0]["heads"]
        assert heads == PRESETS[f"metala-deit-{size.name}"].fields["mixers"][0]["heads"]
