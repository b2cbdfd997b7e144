"""Long Range Arena and MNIST: from a seed, or from files as their authors pack them."""

from __future__ import annotations

import gzip
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from distributions import assert_frequencies, rng
from fastweights.lab.sweep import InProcess, SweepModel, SweepPlan, sweep
from fastweights.lab.sweep.trainer import updates_per_epoch
from fastweights.lab.tasks import FILES, TASKS, ListOps, Pathfinder, Protocol
from fastweights.lab.tasks.archives import Characters, grey
from fastweights.lab.tasks.listops import SYMBOLS
from fastweights.lab.tasks.lra import PATH_X
from fastweights.lab.tasks.pathfinder import Pictures

# ListOps ------------------------------------------------------------------------------------------


def value(tokens: list[str]) -> int:
    """Of a prefix expression with X for closing brackets; takes what it reads from the list."""
    token = tokens.pop(0)
    if token.isdigit():
        return int(token)
    values = []
    while tokens[0] != "X":
        values.append(value(tokens))
    tokens.pop(0)
    if token == "[SM":
        return sum(values) % 10
    return int({"[MIN": np.min, "[MAX": np.max, "[MED": np.median}[token](values))


def test_listops_labels_are_the_values() -> None:
    batch = ListOps(20, 200).draw(rng(), 200)
    assert batch.keep is not None
    for tokens, keep, label in zip(batch.inputs, batch.keep, batch.labels, strict=True):
        symbols = [SYMBOLS[token] for token in tokens[keep]]
        assert symbols.pop() == "<eos>"
        assert 20 < len(symbols) < 200
        assert value(symbols) == label
        assert not symbols


def test_listops_has_the_law_of_the_reference() -> None:
    """Leaves three quarters, arguments and operators uniform; mean length as measured on the
    reference.
    """
    batch = ListOps().draw(rng(), 150)
    assert batch.keep is not None
    assert batch.keep.sum(1).double().mean().item() == pytest.approx(1099, abs=120)
    operators = torch.bincount(batch.inputs[batch.keep], minlength=18)[4:8].numpy()
    assert_frequencies(operators, np.full(4, 0.25), "operators")
    assert len(SYMBOLS) == 18


# Pathfinder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "seed"), [*((Pathfinder(), seed) for seed in range(6)), (PATH_X, 0), (PATH_X, 1)]
)
def test_pathfinder_shows_what_its_label_says(task: Pathfinder, seed: int) -> None:
    scene = task.scene(rng(seed))
    first, second, *short = scene.curves
    ends = [(curve[0, 0], curve[-1, 1]) for curve in (first, second)]
    begin, end = (
        [np.allclose(marker, pair[i]) for pair in ends] for i, marker in enumerate(scene.markers)
    )
    assert sum(begin) == sum(end) == 1
    assert (begin == end) == bool(scene.label)
    assert len(first) == len(second) == 14
    assert all(len(curve) == 4 for curve in short)
    for curve in scene.curves:
        steps = np.linalg.norm(curve[1:, 0] - curve[:-1, 1], axis=1)
        np.testing.assert_allclose(steps, task.gap)
        np.testing.assert_allclose(np.linalg.norm(curve[:, 1] - curve[:, 0], axis=1), task.dash)
        towards = (curve[:, 1] - curve[:, 0]) / task.dash
        assert ((towards[1:] * towards[:-1]).sum(1) > 0).all()
        assert ((curve >= 0) & (curve <= task.side)).all()
    for i, one in enumerate(scene.curves):
        for other in scene.curves[:i]:
            near = np.linalg.norm(one.reshape(-1, 1, 2) - other.reshape(1, -1, 2), axis=2).min()
            assert near >= task.gap + task.width - 1e-9
    picture = task.picture(scene)
    lit = np.argwhere(picture > 0) + 0.5
    ink = np.concatenate([*(curve.reshape(-1, 2) for curve in scene.curves), scene.markers])
    assert (np.linalg.norm(lit[:, None] - ink[None], axis=2).min(1) < task.radius + 1.1).all()
    assert (picture[tuple(np.floor(scene.markers).astype(int).T)] == 255).all()


def test_pictures_take_a_byte_per_pixel_until_they_are_asked_for() -> None:
    task = TASKS["lra-pathfinder-small"].train[0].task
    drawn, examples = task.draw(rng(1), 6), task.examples(rng(1), 6)
    assert isinstance(examples, Pictures)
    assert examples.stored.inputs.dtype == torch.uint8
    (batch,) = examples.batches([torch.tensor([4, 1])], [])
    assert torch.equal(batch.inputs, drawn.inputs[[4, 1]])
    assert torch.equal(batch.labels, drawn.labels[[4, 1]])
    assert batch.inputs.dtype == torch.long


def test_path_x_has_16384_pixels_and_the_model_of_table_a4() -> None:
    protocol = TASKS["lra-path-x"]
    assert protocol.task.length == 16_384
    config = protocol.config("metala")
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (6, 32, 32)
    assert (config.mixers, config.bidirectional) == ([{"name": "metala", "heads": 8}], True)
    assert protocol.training.rates == (7.5e-4,)


def test_pathfinder_is_balanced() -> None:
    task = Pathfinder(side=16, dashes=3, distractors=1, distractor_dashes=2, apart=4.0)
    batch = task.draw(rng(), 200)
    assert batch.inputs.shape == (200, 256)
    assert_frequencies(torch.bincount(batch.labels).numpy(), np.full(2, 0.5), "labels")


# readers ------------------------------------------------------------------------------------------


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def trained(protocol: Protocol, **fields: object) -> torch.Tensor:
    """The loss of a small model on two training examples, differentiable."""
    torch.manual_seed(0)
    model = protocol.model("softmax", **{"hidden_size": 16, "num_hidden_layers": 1, **fields})
    batch = protocol.train[0].task.draw(rng(), 2)
    loss = protocol.task.loss(model, batch)
    loss.backward()
    return loss


def test_imdb(tmp_path: Path) -> None:
    texts = {
        f"aclImdb/{part}/{kind}/{i}_7.txt": f"{word} film {'!' * i}".encode()
        for part in ("train", "test")
        for kind, word in (("neg", "bad"), ("pos", "good"), ("unsup", "some"))
        for i in range(20)
    }
    hidden = {"aclImdb/train/pos/._0_7.txt": b"\x00\x05\x16\x07\xb0"}  # as macOS packs
    protocol = FILES["lra-text"](pack(tmp_path / "aclImdb_v1.tar.gz", texts | hidden))
    batch = protocol.training_set(0)[0]
    assert len(batch) == 40
    assert batch.keep is not None
    first = batch.inputs[batch.labels == 1][0]
    characters = Characters.of(
        text.decode() for name, text in texts.items() if "train" in name and "unsup" not in name
    )
    letters = {number: char for char, number in characters.ids.items()}
    assert "".join(letters.get(int(token), "") for token in first).startswith("good film")
    assert (batch.inputs.gather(1, batch.keep.sum(1, keepdim=True) - 1) == 2).all()
    assert protocol.task.classes == 2
    assert torch.isfinite(trained(protocol))
    with pytest.raises(ValueError, match="aclImdb_v1"):
        FILES["lra-text"](pack(tmp_path / "other.tar.gz", {"a": b"b"}))


def test_rare_characters_are_unknown() -> None:
    characters = Characters.of(["aaab"], least=2)
    tokens, lengths = characters.encode(["abz", "aaaaaa"], 4)
    assert tokens.tolist() == [[3, 1, 1, 2], [3, 3, 3, 2]]
    assert lengths.tolist() == [4, 4]


def test_aan(tmp_path: Path) -> None:
    for part, count in (("train", 30), ("eval", 4), ("test", 5)):
        lines = [
            f"{float(i % 2)}\t{i}\t{i + 1}\tpaper {'one' * (i + 1)}\tpaper two"
            for i in range(count)
        ]
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n")
    protocol = FILES["lra-retrieval"](tmp_path)
    (batch,) = protocol.training_set(0)
    assert batch.inputs.shape[:2] == (30, 2)
    assert sorted(batch.labels.tolist()) == [0] * 15 + [1] * 15
    assert (len(protocol.validation_set(0)[0]), len(protocol.test_set(0)[0])) == (4, 5)
    assert torch.isfinite(trained(protocol))
    (tmp_path / "new_aan_pairs.test.tsv").write_text("1\t2\n")
    with pytest.raises(ValueError, match="2 columns"):
        FILES["lra-retrieval"](tmp_path)


def test_cifar(tmp_path: Path) -> None:
    generator = rng()

    def rows(count: int) -> bytes:
        labels = generator.integers(10, size=(count, 1))
        return (
            np.hstack([labels, generator.integers(256, size=(count, 3072))])
            .astype(np.uint8)
            .tobytes()
        )

    batches = {f"cifar-10-batches-bin/data_batch_{i}.bin": rows(1_200) for i in range(1, 6)}
    archive = pack(
        tmp_path / "cifar-10-binary.tar.gz",
        {**batches, "cifar-10-batches-bin/test_batch.bin": rows(7)},
    )
    protocol = FILES["lra-image"](archive)
    assert [
        segment.examples
        for part in (protocol.train, protocol.validation or (), protocol.test)
        for segment in part
    ] == [1_000, 5_000, 7]
    batch = protocol.test_set(0)[0]
    assert batch.inputs.shape == (7, 1024)
    assert torch.isfinite(trained(protocol))
    with pytest.raises(ValueError, match="cifar-10-binary"):
        FILES["lra-image"](
            pack(tmp_path / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": b""})
        )


def test_grey_is_pillows() -> None:
    pixels = rng().integers(256, size=(1, 3, 16, 16)).astype(np.uint8)
    np.testing.assert_array_equal(
        grey(pixels)[0], np.asarray(Image.fromarray(pixels[0].transpose(1, 2, 0)).convert("L"))
    )


def write_mnist(folder: Path, train: int, test: int) -> None:
    for name, count in (("train", train), ("t10k", test)):
        images = rng(count).integers(256, size=(count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def test_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path, 5_030, 20)
    plain, permuted, images = (FILES[name](tmp_path) for name in ("smnist", "pmnist", "mnist"))
    a, b = plain.test_set(0)[0], permuted.test_set(0)[0]
    order = np.random.default_rng(0).permutation(784)
    assert torch.equal(a.inputs[:, order], b.inputs)
    picture = images.test_set(0)[0]
    assert picture.inputs.shape == (20, 1, 28, 28)
    raw = gzip.decompress((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    chosen = rng(0, 2, 0).permutation(20)
    expected = np.frombuffer(raw, np.uint8).reshape(20, 28, 28)[chosen]
    assert (a.inputs.reshape(20, 28, 28).numpy() == expected).all()
    torch.testing.assert_close(
        picture.inputs[:, 0], torch.from_numpy((expected / 255 - 0.1307) / 0.3081).float()
    )
    assert [protocol.train[0].examples for protocol in (plain, permuted, images)] == [30, 30, 30]
    assert torch.isfinite(trained(plain))
    assert torch.isfinite(trained(images))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match="not an IDX file"):
        FILES["mnist"](tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels"):
        FILES["mnist"](tmp_path)


@pytest.mark.parametrize("name", ["smnist", "mnist"])
def test_sweeps_train_on_files(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path, 5_030, 20)
    model = SweepModel("tiny", "linear", {"hidden_size": 8, "num_hidden_layers": 1})
    settings = {"steps": 1, "batch": 2}
    rows, again = (
        sweep(
            SweepPlan(
                {name: replace(protocol, validation=protocol.test)},
                (model,),
                rates=(1e-3,),
                training=settings,
            ),
            tmp_path / "out",
            InProcess(),
            listener=lambda result: None,
        )
        for protocol in (FILES[name](tmp_path), FILES[name](tmp_path))
    )
    assert len(rows) == 1
    assert rows == again


@pytest.mark.parametrize(
    ("name", "examples", "updates"),
    [
        ("lra-listops", 96_000, 50_000),
        ("lra-pathfinder", 160_000, 500_000),
        ("lra-path-x", 160_000, 500_000),
    ],
)
def test_the_arena_has_its_own_number_of_examples(name: str, examples: int, updates: int) -> None:
    protocol = TASKS[name]
    assert protocol.train[0].examples == examples
    made = (protocol.training.epochs or 0) * updates_per_epoch(protocol)
    assert abs(made - updates) <= updates_per_epoch(protocol) / 2
