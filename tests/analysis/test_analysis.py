"""Memory, attention maps, profiles and reports, against loops over dense matrices."""

from __future__ import annotations

from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from cases import LINEAR, MAPPED, Case, Shape, normal
from fastweights.analysis import maps, memory
from fastweights.analysis.figures import comparison, profile_figures, teacher_distances
from fastweights.analysis.profile import (
    Profile,
    ProfileLimits,
    cuts,
    memory_of,
    profile,
    spread_evenly,
)
from fastweights.analysis.report import write_report
from fastweights.analysis.theory import findings
from fastweights.cli import main
from fastweights.mixers import MIXERS
from fastweights.recurrence import LTV, Decay, HeadGroups, Mesa, Normalized, Softmax
from fastweights.render.plots import png
from fastweights.train import train
from killable_runs import tiny as sitting
from kinds import one_of_each
from tiny import tiny, tokens
from tolerances import array, assert_close

SMALL = ProfileLimits(heads=2, window=6, cuts=2)
SHAPE = Shape(b=2, t=9, h=2, k=3, v=2)
each_linear = pytest.mark.parametrize("case", LINEAR, ids=str)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, generator=Generator().manual_seed(seed))


def system_of(case: Case) -> LTV:
    return case.rule(**case.streams(SHAPE)).ltv()


def products(system: LTV, start: int, end: int) -> np.ndarray:
    """A_end-1 … A_start, ``[b h k k]``."""
    A = array(system.A.dense().expand(*system.B.shape, -1))
    product = np.broadcast_to(np.eye(A.shape[-1]), (*A[:, 0].shape,))
    for t in range(start, end):
        product = A[:, t] @ product
    return product


def impulse_map(system: LTV) -> np.ndarray:
    """Φ without D, ``[b h t s]``, entry by entry."""
    B, C = array(system.B), array(system.C)
    b, length, h, _ = B.shape
    phi = np.zeros((b, h, length, length), dtype=B.dtype)
    for t in range(length):
        for s in range(t + 1):
            state = np.einsum("bhij,bhj->bhi", products(system, s + 1, t + 1), B[:, s])
            phi[:, :, t, s] = np.einsum("bhi,bhi->bh", C[:, t], state)
    return phi


@each_linear
def test_hankel_values_are_those_of_the_map_from_past_to_future(case: Case) -> None:
    system, cut, length = system_of(case), 5, 3
    want = np.linalg.svd(
        impulse_map(system)[:, :, cut : cut + length, cut - length : cut], compute_uv=False
    )
    want = np.pad(want, [(0, 0)] * 2 + [(0, system.A.width - want.shape[-1])])
    assert_close(memory.hankel(system, cut, length), want, "Hankel singular values", torch.float64)


@each_linear
def test_gramians_are_sums_over_the_window(case: Case) -> None:
    system = system_of(case)
    B, C, length = array(system.B), array(system.C), len(system)
    reached = np.stack(
        [
            np.einsum("bhij,bhj->bhi", products(system, s + 1, length), B[:, s])
            for s in range(length)
        ]
    )
    read = np.stack(
        [np.einsum("bhi,bhij->bhj", C[:, t], products(system, 0, t + 1)) for t in range(length)]
    )
    assert_close(
        memory.controllability(system), np.einsum("sbhi,sbhj->bhij", reached, reached.conj()), "W_c"
    )
    assert_close(
        memory.observability(system), np.einsum("tbhi,tbhj->bhij", read.conj(), read), "W_o"
    )


@each_linear
def test_maps_and_responses(case: Case) -> None:
    system = system_of(case)
    phi, _ = memory.map_and_input_factor(system)
    want = impulse_map(system)
    assert_close(phi, want, "Φ")
    by_lag = [
        np.sqrt(np.mean([np.abs(want[..., s + lag, s]) ** 2 for s in range(9 - lag)], 0))
        for lag in range(9)
    ]
    assert_close(memory.response(phi), np.stack(by_lag, -1), "response")


@each_linear
def test_gains_are_singular_values_of_the_product(case: Case) -> None:
    system = system_of(case)
    want = np.linalg.svd(products(system, 0, len(system)), compute_uv=False)
    assert_close(memory.log_gains(system).exp(), want, "gains")


def test_half_lives() -> None:
    alpha = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64).expand(1, 4, 1, 3)
    q = torch.ones(1, 4, 1, 3, dtype=torch.float64)
    lives = memory.half_lives(Decay(q, q, q, alpha.log()).ltv())[0, 0, 0]
    assert lives[1] == torch.inf
    assert_close(lives[[0, 2]], np.array([1.0, 0.5]), "half-lives")


def test_effective_dimension_counts_equal_values() -> None:
    values = torch.tensor(
        [[1.0, 1, 1, 1], [3, 0, 0, 0], [0, 0, 0, 0], [2, 2, 0, 0]], dtype=torch.float64
    )
    assert_close(memory.effective_dimension(values), np.array([4.0, 1, 0, 2]), "dimensions")


def test_conditions_are_those_of_the_gram_matrix() -> None:
    case = {c.name: c for c in LINEAR}["mesa-scalar"]
    streams = case.streams(SHAPE)
    record = case.rule(**streams)
    assert isinstance(record, Mesa)
    k, beta, gamma = (array(streams[n]) for n in ("k", "beta", "log_decay"))
    gram, want = np.zeros((2, 2, 3, 3)), []
    for t in range(9):
        outer = np.einsum("bhi,bhj->bhij", k[:, t], k[:, t]) * beta[:, t, :, :, None]
        gram = np.exp(gamma[:, t])[..., None] * gram + outer
        values = np.linalg.eigvalsh(
            gram + np.einsum("hi,ij->hij", array(streams["ridge"]), np.eye(3))
        )
        want.append(values[..., -1] / values[..., 0])
    found = memory.linear_systems(record, (1, 4, 9))
    assert_close(found.condition, np.stack([want[0], want[3], want[8]], 1), "condition numbers")


def test_normalisers() -> None:
    q, k, v = (drawn(2, 7, 2, 3, seed=s) for s in range(3))
    positive = Normalized(Decay(q.exp(), k.exp(), v, None))
    want = np.einsum("bthk,bthk->bth", array(q.exp()), np.cumsum(array(k.exp()), 1))
    assert_close(memory.normalisers(positive), want, "η of linear attention")
    scores = np.exp(np.einsum("bthk,bshk->bths", array(q), array(k)) / np.sqrt(3))
    causal = np.tril(np.ones((7, 7)))[None, :, None]
    assert_close(memory.normalisers(Softmax(q, k, v)), (scores * causal).sum(-1), "η of softmax")
    assert memory.normalisers(Softmax(q, k, v, window=3)) is None
    assert memory.normalisers(positive.inner) is None


@pytest.mark.parametrize("case", MAPPED, ids=str)
def test_attention_of_chosen_heads_is_the_map(case: Case) -> None:
    record = case.rule(**{n: s for n, s in case.streams(SHAPE).items() if n != "skip"})
    assert_close(maps.attention(record, [1]), record.attention_map()[:, [1]], "map")


def test_statistics_of_a_map_by_hand() -> None:
    phi = torch.tensor([[2.0, 0, 0], [1, -1, 0], [1, 1, 2]], dtype=torch.float64)[None, None]
    half, third = np.log(2), 1.5 * np.log(2)
    assert_close(
        maps.weights(phi)[0, 0], np.array([[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]), "weights"
    )
    assert_close(maps.entropy(phi)[0, 0], np.array([0, half, third]), "entropy")
    assert_close(maps.dilution(phi)[0, 0], np.array([1, third / np.log(3)]), "dilution")
    assert_close(maps.span(phi)[0, 0], np.array([0, 0.5, 0.75]), "span")
    assert_close(maps.negative_share(phi)[0, 0], np.array(1 / 8), "negative share")
    assert_close(
        maps.rank(torch.eye(5, dtype=torch.float64)[None, None])[0, 0], np.array(5.0), "rank"
    )


def test_distance_from_a_teacher() -> None:
    teacher_map = drawn(2, 3, 6, 6).exp().tril()
    student = drawn(2, 3, 6, 6, seed=1).exp().tril()
    p, q = (array(m / m.sum(-1, keepdim=True)) for m in (teacher_map, student))
    rows = [
        sum(p[..., t, s] * np.log(p[..., t, s] / q[..., t, s]) for s in range(t + 1))
        for t in range(6)
    ]
    found = maps.distance(student, teacher_map)
    assert_close(found.kl, np.mean(rows, 0), "KL")
    assert_close(found.mse, ((p - q) ** 2).sum((-2, -1)) / 21, "MSE")
    same = maps.distance(teacher_map, teacher_map)
    assert same.kl.abs().max() == same.mse.max() == same.rank.abs().max() == 0
    blind = maps.distance(torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6), teacher_map)
    assert torch.isinf(blind.kl).all()


STEPS = {"gated_deltaproduct": 2, "mamba3": 2}
"""How many steps a token makes, if not one: a layer is looked at step by step."""

WITHOUT_MAP = ("ttt_linear", "ttt_mlp")


@pytest.mark.sampled
@pytest.mark.parametrize("name", one_of_each([*MIXERS, "hybrid"]))
def test_every_model_has_a_profile(name: str) -> None:
    found, n = profiled(name), STEPS.get(name, 1)
    for layer in found.layers:
        count = len(layer.heads)
        assert count == min(2, layer.of)
        assert (layer.phi is None) == (name in WITHOUT_MAP)
        if layer.phi is not None:
            assert layer.phi.shape == (count, 6 * n, 6 * n)
            assert torch.isfinite(layer.phi).all()
        if layer.memory is None:
            assert layer.algorithms is None
            continue
        m, k = layer.memory, layer.memory.hankel.shape[-1]
        assert m.eigenvalues.shape == m.half_lives.shape
        assert m.eigenvalues.shape[:2] == (17 * n, count)
        assert m.eigenvalues.shape[2] <= k
        assert m.hankel.shape == m.log_gains.shape == (2, count, k)
        assert (m.dimensions <= k + 1e-9).all()
        assert (m.eigenvalues.abs() <= 1 + 1e-9).all()
        assert m.response.shape == (count, 6)
        assert layer.algorithms is not None
        assert next(v.algorithm.name for v in layer.algorithms if v.refusal is None) == "recurrence"


def test_a_system_is_looked_at_head_by_head() -> None:
    record = next(c for c in LINEAR if c.name == "decay-vector").rule(
        **next(c for c in LINEAR if c.name == "decay-vector").streams(SHAPE)
    )
    system = record.ltv()
    assert_close(
        memory.hankel(system.heads([1]), 5, 3), memory.hankel(system, 5, 3)[:, [1]], "one head"
    )


def test_every_layer_is_told() -> None:
    told = []

    def follow(paths: list[str], what: str) -> list[str]:
        told.append((what, len(paths)))
        return paths

    model = tiny("metala", torch.float32, num_hidden_layers=3)
    profile("three", model, tokens(1, 9), ProfileLimits(window=3), follow=follow)
    assert told == [("profiling layers", 3)]


def test_groups_of_heads_are_looked_at_like_one_record() -> None:
    """In another order, and beside a head with fewer state rows."""
    case = next(c for c in LINEAR if c.name == "decay-vector")
    streams, extent = case.streams(SHAPE), ProfileLimits(window=3, cuts=2)
    whole, heads = case.rule(**streams), range(case.rule(**streams).shape[2])

    def of_head(head: int, rows: int | None = None) -> Any:
        own = {name: x[:, :, [head]] if x.shape[2] > 1 else x for name, x in streams.items()}
        return case.rule(**{n: x if n == "v" else x[..., :rows] for n, x in own.items()})

    backwards = tuple(of_head(head) for head in reversed(heads))
    wanted = memory_of(whole, [*heads], extent)
    found = memory_of(HeadGroups(backwards, tuple(reversed(heads))), [*heads], extent)
    for name, value in vars(wanted).items():
        assert_close(getattr(found, name), value, name)
    narrow = memory_of(HeadGroups((of_head(0), of_head(1, 1)), (0, 1)), [0, 1], extent)
    assert_close(narrow.hankel[:, 0], wanted.hankel[:, 0], "the wider head")
    assert (narrow.hankel[:, 1, 1:] == 0).all()
    assert (narrow.log_gains[:, 1, 1:] == -torch.inf).all()
    assert_close(narrow.dimensions[:, 1], torch.ones_like(narrow.dimensions[:, 1]), "one row")


def test_choices_are_even() -> None:
    assert spread_evenly(3, 16) == [0, 1, 2]
    assert spread_evenly(512, 4) == [0, 170, 341, 511]
    assert spread_evenly(5, 1) == [0]
    assert cuts(100, 4) == (25, 50, 75, 100)
    assert cuts(2, 16) == (1, 2)


def test_what_cannot_be_looked_at_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 or more"):
        profile("short", tiny("metala"), tokens(1, 5))
    with pytest.raises(ValueError, match="at least one head"):
        ProfileLimits(heads=0)
    with pytest.raises(ValueError, match="no mixer"):
        profile("linear", torch.nn.Linear(3, 3).double(), torch.zeros(1, 9, 3, dtype=torch.float64))


def profiled(name: str, **fields: object) -> Profile:
    return profile(name, tiny(name, **fields), tokens(1, 17), SMALL)


class Page(HTMLParser):
    """Tags that are closed in order, pictures, links and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str | None] = []
        self.anchors: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given)
        elif tag != "meta":
            self.open.append(tag)
        if tag == "a":
            self.links.append(given["href"])
        if "id" in given:
            self.anchors.append(given["id"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.long
@pytest.mark.usefixtures("pictures")
def test_reports_are_whole_and_self_contained(tmp_path: Path) -> None:
    models = [profiled(name, num_hidden_layers=1) for name in ("softmax", "mesa")]
    text = write_report(models, findings()[:1], tmp_path).read_text()
    page = Page(text)
    assert not page.open
    assert {f"#{name}" for name in ("compared", "softmax", "mesa", "theory")} == set(page.links)
    assert {link[1:] for link in page.links if link} <= set(page.anchors)
    files = {path.read_bytes() for path in tmp_path.glob("*.png")}
    assert len(files) == len(page.images) > 12
    prefix = "data:image/png;base64,"
    for image in page.images:
        assert image["alt"]
        assert str(image["src"]).startswith(prefix)
        assert b64decode(str(image["src"])[len(prefix) :]) in files
    assert "http" not in text
    assert "refuted" not in text


def test_pictures_show_what_a_model_has() -> None:
    names = ("softmax", "linear", "mesa", "ttt_linear")
    slugs = {
        name: {p.slug for p in profile_figures(profiled(name, num_hidden_layers=1))}
        for name in names
    }
    assert slugs["softmax"] == {"maps", "attention", "normalisers"}
    assert slugs["mesa"] == {
        "maps",
        "attention",
        "half-lives",
        "eigenvalues",
        "hankel",
        "response",
        "conditions",
    }
    assert "normalisers" in slugs["linear"]
    assert slugs["ttt_linear"] == set()


@pytest.mark.usefixtures("pictures")
def test_models_are_compared_with_the_first_softmax_model() -> None:
    softmax, metala = profiled("softmax"), profiled("metala")
    assert teacher_distances([metala]) is None
    assert teacher_distances([metala, metala]) is None
    assert teacher_distances([profiled("ttt_linear"), softmax]) is None
    shown = teacher_distances([metala, softmax])
    assert shown is not None
    assert "softmax" in shown.title
    assert png(comparison([metala, softmax]).figure)


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(sitting(tmp_path), tmp_path / "run", cpu=True)
    text = tmp_path / "text.txt"
    text.write_text("What is the city but the people? " * 3)
    out = tmp_path / "out"
    small = ["--tokens", "20", "--window", "6", "--heads", "1"]
    assert (
        main(["analyze", str(tmp_path / "run"), "--text", str(text), "--out", str(out), *small])
        == 0
    )
    assert "20 tokens" in (out / "report.html").read_text()
    assert str(out / "report.html") in capsys.readouterr().out
    assert main(["analyze", str(tmp_path / "run"), "--out", str(out)]) == 2
    assert "--text" in capsys.readouterr().err


def test_without_models_the_command_executes_the_theory(tmp_path: Path) -> None:
    assert main(["analyze", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("borne out") == len(findings())
