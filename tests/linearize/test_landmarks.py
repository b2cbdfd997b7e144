"""Landmarks: softmax over keys that stand for others, placed without training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Generator, Tensor

from conversions import conversion, shorten, write_source
from extension import compiled
from families import LAYERS, VOCABULARY, padded, student, teacher
from fastweights import kernels
from fastweights.features import Landmarks
from fastweights.kernels import CHUNK_LOOP
from fastweights.kernels.native import windowed
from fastweights.kernels.native.abi import FeatureKind
from fastweights.kernels.native.windowed import NATIVE_WINDOW, read_tokens
from fastweights.linearize import (
    LinearAttentionConfig,
    WindowOnly,
    branches,
    linearize,
    place_landmarks,
    use_mode,
)
from fastweights.linearize.convert.landmarks import FARTHEST, cluster
from fastweights.linearize.distill import student as student_module
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.student import ModelLoader, StudentModel
from tolerances import SAME, error

IDS = torch.randint(3, VOCABULARY, (2, 40), generator=Generator().manual_seed(3))


def config(landmarks: int = 16, window: int = 4) -> LinearAttentionConfig:
    return LinearAttentionConfig("landmarks", landmarks // 2, window)


def softmax_over_landmarks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q0: np.ndarray, k0: np.ndarray, branch
) -> np.ndarray:
    """Σ_s w_ts v_s / Σ_s w_ts of one head's q, k, v ``[t ·]``: w_ts = γ e^(q_t·k_s) in the window,
    Σ_j e^(q0_t·c_j) φ_j(k0_s) before it, where q0·c are the scores of the query map, and q0 and k0
    what q and k were before rotary positions.
    """
    heads = branch.attention.heads // branch.attention.kv_heads
    maps = (branch.phi_q, heads), (branch.phi_k, 1)
    (Wq, bq), (Wk, bk) = (
        (
            phi.W.detach().double().numpy().reshape(-1, phi.size, q.shape[1])[0],
            phi.b.detach().double().numpy().reshape(-1, phi.size)[0],
        )
        for phi, _ in maps
    )
    window, gamma = branch.config.window, 1 / (1 + np.exp(-branch.mix[0].item()))
    out = np.zeros_like(v)
    for t in range(len(q)):
        weights = np.zeros(t + 1)
        for s in range(t + 1):
            if t - s < window:
                weights[s] = gamma * np.exp(q[t] @ k[s] * branch.attention.scaling)
            else:
                near = np.exp(Wk @ k0[s] + bk)
                weights[s] = np.exp(Wq @ q0[t] + bq) @ (near / near.sum())
        out[t] = weights @ v[: t + 1] / weights.sum()
    return out


def test_a_layer_is_softmax_with_landmarks_for_keys() -> None:
    model = student(analog=config()).double()
    branch = branches(model)[1].double()
    g = Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    found = branch(q, k, v, None, None, None)[0, :, 0]
    places = torch.arange(20)[None]
    before = branch.phi_q.unrotate(q, places), branch.phi_k.unrotate(k, places)
    streams = (s[0, :, 0].numpy() for s in (q, k, v, *before))
    wanted = softmax_over_landmarks(*streams, branch)
    assert error(found, torch.from_numpy(wanted)) < 1e-6  # γ is computed in float32


def test_more_landmarks_are_nearer_to_softmax() -> None:
    """Of positions that keys do not turn by: one for each key is softmax."""
    softmax, errors = teacher("gpt2"), []
    wanted = softmax(IDS).logits
    for count in (2, 8, 32, 80):
        model = linearize(teacher("gpt2"), config(count))
        place_landmarks(model, [{"input_ids": IDS}])
        errors.append(error(model(IDS).logits, wanted))
    assert all(more < fewer for fewer, more in pairwise(errors))
    with use_mode(model, WindowOnly()):
        window = error(model(IDS).logits, wanted)
    assert errors[-1] < window / 2


def test_padding_is_no_key() -> None:
    whole = padded(pad=5)
    whole["position_ids"] = (whole["attention_mask"].cumsum(1) - 1).clamp(min=0)
    apart = [
        {"input_ids": whole["input_ids"][:1, 5:]},
        {"input_ids": whole["input_ids"][1:]},
    ]
    models = [linearize(teacher(), config(4)) for _ in range(2)]
    for model, texts in zip(models, ([whole], apart), strict=True):
        place_landmarks(model, texts)
    one, other = (branches(model)[0].phi_k.W for model in models)
    assert error(one, other) < 1e-4


def test_clusters_are_found() -> None:
    g = Generator().manual_seed(0)
    centres = 100 * torch.randn(5, 3, generator=g)
    points = (centres[:, None] + torch.randn(5, 40, 3, generator=g)).flatten(0, 1)
    found = cluster(points, 5, g)
    order = torch.cdist(found, centres).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
    assert error(found, points.view(5, 40, 3).mean(1)[order]) < 1e-5


def test_equal_points_are_one_cluster_and_some_empty_ones() -> None:
    found = cluster(torch.ones(9, 2), 4, Generator().manual_seed(0))
    assert torch.equal(found, torch.ones(4, 2))


def test_the_same_seed_places_the_same_landmarks() -> None:
    def placed(seed: int) -> Tensor:
        model = linearize(teacher(), config())
        place_landmarks(model, [{"input_ids": ids[None]} for ids in IDS], seed)
        return branches(model)[2].phi_k.W

    assert torch.equal(placed(1), placed(1))
    assert not torch.equal(placed(1), placed(2))


def test_landmarks_of_windows_beyond_the_farthest_distance_are_turned_to_the_windows_end() -> None:
    model = linearize(teacher(), config(window=FARTHEST + 1))
    place_landmarks(model, [{"input_ids": IDS}])
    q, k = branches(model)[0].phi_q.W.detach(), branches(model)[0].phi_k.W.detach()
    assert q.isfinite().all()
    assert min(q.abs().amax(), k.abs().amax()) > 0.01


@compiled
@pytest.mark.parametrize("sharper", [1, 100])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_c_makes_landmarks_features_and_their_scale(monkeypatch, window: int, sharper: int) -> None:
    model, sources = linearize(teacher(), config(window=window)), list[Any]()
    place_landmarks(model, [{"input_ids": IDS}])
    with torch.no_grad():
        for branch in branches(model).values():
            branch.phi_q.W.mul_(sharper)
    monkeypatch.setattr(
        windowed,
        "read_tokens",
        lambda *given: (sources.append(given[2]), read_tokens(*given))[1],
    )
    found = []
    for kernel in (NATIVE_WINDOW.name, CHUNK_LOOP.name):
        cache = model(IDS[:1, :9], use_cache=True).past_key_values
        with kernels.only(kernel), torch.no_grad():
            read = [model(IDS[:1, t : t + 1], past_key_values=cache).logits for t in range(9, 16)]
        found.append([*read, *(part for layer in cache.layers for part in layer.state)])
    for by_c, by_torch in zip(*found, strict=True):
        assert error(by_c.float(), by_torch.float()) <= 2 * SAME
    assert [source.f for source in sources] == [FeatureKind.LANDMARKS] * (7 * LAYERS)


def test_a_single_token_has_gradients() -> None:
    model = linearize(teacher(), config())
    cache = model(IDS[:, :9], use_cache=True).past_key_values
    model(IDS[:, 9:10], past_key_values=cache).logits.sum().backward()
    for branch in branches(model).values():
        assert all(p.grad is not None and p.grad.any() for p in branch.phi_q.parameters())


@pytest.mark.parametrize(
    ("model", "texts", "message"),
    [
        (teacher, [], "no linear layers; call fastweights.linearize.linearize"),
        (student, [], "layer 0 has the features 'hedgehog', which are trained"),
        (
            lambda: linearize(teacher(), config(16)),
            [{"input_ids": IDS[:1, :15]}],
            "16 landmarks in each head of layer 0, and texts with 15 keys: give longer texts",
        ),
    ],
)
def test_what_cannot_be_placed(model, texts, message) -> None:
    with pytest.raises(ValueError, match=message):
        place_landmarks(model(), texts)


def test_scores_of_any_size_leave_numbers() -> None:
    phi = Landmarks(1, 2, 2)
    with torch.no_grad():
        phi.W.mul_(1e6)
    x = torch.tensor([[[[1e3, -1e3]]]])
    features, scale = phi(x), phi.log_scale(x)
    assert features.isfinite().all()
    assert scale.isfinite().all()
    assert features.sum() == 1


def test_a_run_places_them_once(tmp_path: Path, monkeypatch) -> None:
    """And again as they were, if the file was lost; layers that stay softmax need none."""
    monkeypatch.setattr(student_module, "LANDMARK_TOKENS", 480)
    out, recipe = tmp_path / "out", shorten(RECIPES["landmarks"])
    recipe = recipe.with_stages(recipe.stages[1:])  # adaptation alone leaves them where they are
    whole = conversion(write_source(tmp_path), recipe=recipe, softmax_layers=1)
    with monkeypatch.context() as patch:
        load, loaded = ModelLoader.load, list[Any]()
        patch.setattr(
            ModelLoader,
            "load",
            lambda *given: (loaded.append(load(*given)), loaded[-1])[1],
        )
        assert run_conversion(whole, out, until="convert")
    assert len(loaded) == 1
    placed = load_file(out / "landmarks.safetensors")
    assert len([name for name in placed if name.startswith("windows.")]) == LAYERS
    maps = {name for name in placed if "phi_" in name}
    assert len(_layers(maps)) == LAYERS
    assert len(maps) + LAYERS == len(placed)
    (out / "landmarks.safetensors").unlink()
    assert run_conversion(whole, out)
    again = load_file(out / "landmarks.safetensors")
    assert placed.keys() == again.keys()
    assert all(torch.equal(placed[name], again[name]) for name in placed)
    exported = load_file(out / "model" / "model.safetensors")
    kept = [name for name in placed if name in exported]
    assert len(_layers(kept)) == LAYERS - 1
    assert all(torch.equal(placed[name], exported[name]) for name in kept)


def _layers(names: Iterable[str]) -> set[str]:
    return {name.partition(".linear_branch.")[0] for name in names}


def test_a_model_of_some_layers_has_those_of_all(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(student_module, "LANDMARK_TOKENS", 480)
    whole = conversion(write_source(tmp_path), recipe=shorten(RECIPES["landmarks"]))

    def made(out: Path, layers: list[int] | None) -> Any:
        return StudentModel.begin(ConversionRun(whole, out)).loader.linearize(layers, None)

    for name, layers in {"all": None, "one": [1]}.items():
        (tmp_path / name).mkdir()
        assert branches(made(tmp_path / name, layers)).keys() == {*(layers or range(LAYERS))}
    of_all, of_one = (load_file(tmp_path / n / "landmarks.safetensors") for n in ("all", "one"))
    assert of_all.keys() == of_one.keys()
    assert all(torch.equal(of_all[name], of_one[name]) for name in of_all)


def test_a_landmark_that_no_key_is_near_has_no_weight() -> None:
    """However little there is of it, the window alone is a number."""
    model = linearize(teacher(), config())
    for branch in branches(model).values():
        with torch.no_grad():
            branch.phi_q.W.mul_(300)
            branch.phi_k.b[::3] = -90
    with use_mode(model, WindowOnly()):
        assert model(IDS).logits.isfinite().all()
    assert model(IDS).logits.isfinite().all()
