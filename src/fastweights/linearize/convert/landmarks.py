"""Landmarks, by which linear attention tells keys apart, placed among the keys of some texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Generator, Tensor

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import attend_all, branches
from fastweights.linearize.convert.landmark_branch import DocumentPlaces, LandmarkBranch
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.linearize.convert.rotary import Turning, find_turnings
from fastweights.models.evaluation import evaluation_mode
from fastweights.shapes import Output
from fastweights.training.loop.report import Follow, unfollowed

SHARPNESS = 4.0
"""τ: a key goes to the landmarks in the proportions e^(-τ d/2), d the mean square of the error that
a landmark in its place makes in the scores."""
ROUNDS = 20
"""Of Lloyd's algorithm."""
FARTHEST = 1024
"""Tokens between a query and a key, at most, over which scores of landmarks are averaged; a window
that ends beyond has those at its end alone."""


def place_landmarks(
    model: Any,
    texts: Collection[Mapping[str, Tensor]],
    seed: int = 0,
    follow: Follow = unfollowed,
) -> None:
    """Place the landmarks of a linearized model, in place, where the keys of some texts are.

    Nothing is trained. In each key head the keys k of the softmax model, as they are before rotary
    positions, are divided into clusters by k-means, started by k-means++ (Arthur and Vassilvitskii,
    2007), in the metric that counts: the distance of k and c is the mean square, over the texts'
    queries, of how far q·P c is from q·P k. P is the mean of what rotary positions turn a key by at
    the distances from the window's end to `FARTHEST`, each with a weight of one over it; the
    identity without such positions. A landmark c is the mean of its cluster's keys. The query map
    becomes log φ(q)_c = q·P c less the logarithm of their sum, and the key map φ(k) the softmax of
    minus τ/2 times the distances, so that φ(q) φ(k)ᵀ is a sum over the landmarks near k of what
    softmax would give them. Sinks, the first tokens of each text or document, are in no cluster.

    Args:
        model: A model linearized with ``LinearAttentionConfig(features="landmarks")``.
        texts: Inputs of the model, such as ``{"input_ids": [b t]}``, of which every key head gets
            at least as many keys as it has landmarks; some ten thousand tokens do.
        seed: Of where the clusters begin.
        follow: Told of every text that is read, and of every layer that has its landmarks.

    Raises:
        ValueError: If the model has other features, or the texts are too short.
    """
    converted = _with_landmarks(model)
    place_among(read_keys(model, texts, follow), converted, seed, follow)


def read_keys(
    model: Any, texts: Collection[Mapping[str, Tensor]], follow: Follow = unfollowed
) -> Keys:
    """Read some texts with the softmax of a linearized model.

    Returns:
        What `place_among` places landmarks by.
    """
    with evaluation_mode(model):
        mode = _GatherStreams(find_turnings(model))
        for layer, branch in _with_landmarks(model).items():
            mode.turnings[layer].write(branch.phi_q, branch.phi_k)
        for inputs in follow(texts, "reading keys for landmarks"):
            attend_all(model, inputs, mode)
    return Keys(mode.turnings, mode.seen)


def place_among(
    keys: Keys, branches: Mapping[int, Any], seed: int = 0, follow: Follow = unfollowed
) -> None:
    """Place the landmarks of branches, in place, as `place_landmarks` does."""
    for layer, branch in follow(branches.items(), "placing landmarks"):
        seen = keys.by_layer.get(layer, [])
        _require_keys(layer, sum(len(text.keys) for text in seen), branch.phi_k.size)
        _place(branch, keys.turnings[layer], seen, Generator().manual_seed(seed + layer))


def _with_landmarks(model: Any) -> dict[int, LandmarkBranch]:
    """The branches by layer, all of which have landmarks."""
    converted, found = branches(model), dict[int, LandmarkBranch]()
    if not converted:
        raise ValueError(
            f"{type(model).__name__} has no linear layers; call fastweights.linearize.linearize"
            ' with LinearAttentionConfig(features="landmarks") first'
        )
    for layer, branch in converted.items():
        if not isinstance(branch, LandmarkBranch):
            raise ValueError(
                f"layer {layer} has the features {branch.config.features!r}, which are trained;"
                ' landmarks are placed in models with features="landmarks"'
            )
        found[layer] = branch
    return found


def _require_keys(layer: int, count: int, landmarks: int) -> None:
    if count < landmarks:
        raise ValueError(
            f"{landmarks} landmarks in each head of layer {layer}, and texts with {count} keys:"
            " give longer texts, or take fewer landmarks by a smaller feature_dim"
        )


@dataclass(frozen=True, eq=False)
class _Seen:
    """Of one layer and one text, as they were before rotary positions: its keys ``[n g k]`` but for
    those of sinks, Σ qᵀq ``[g k k]`` over the queries of each key head, and how many these are."""

    keys: Tensor
    moments: Tensor
    queries: int

    @classmethod
    def of(cls, call: AttentionCall, turning: Turning) -> Self:
        count = torch.zeros(len(call.k), dtype=torch.long, device=call.k.device)
        rank = DocumentPlaces.of(count, call.k.shape[1], call.keep, call.segments).rank
        q, k = (turning.undo(upcast(s), rank) for s in (call.q, call.k))
        queries = q[rank >= 0].unflatten(1, (k.shape[2], -1))
        keys = k[rank >= call.branch.config.sinks]
        moments = torch.einsum("ngri,ngrj->gij", queries, queries)
        return cls(keys, moments, len(queries) * queries.shape[2])


class Keys(NamedTuple):
    """What layers have read: how their positions turn keys, and each text."""

    turnings: Mapping[int, Turning]
    by_layer: Mapping[int, list[_Seen]]


class _GatherStreams(Mode):
    """Softmax, which leaves behind what its layers have read."""

    constant = False

    def __init__(self, turnings: Mapping[int, Turning]) -> None:
        self.turnings, self.seen = turnings, dict[int, list[_Seen]]()

    def attend(self, call: AttentionCall) -> Output:
        seen = _Seen.of(call, self.turnings[call.layer])
        self.seen.setdefault(call.layer, []).append(seen)
        return call.softmax()


def _place(
    branch: LandmarkBranch, turning: Turning, seen: list[_Seen], generator: Generator
) -> None:
    attention, phi_q, phi_k = branch.attention, branch.phi_q, branch.phi_k
    repeats = attention.heads // attention.kv_heads
    keys = torch.cat([text.keys for text in seen]).transpose(0, 1)
    # P, by which a key k and a query q have the mean score q·(k P) behind the window
    nearest = max(branch.config.window, 1)
    distances = torch.arange(nearest, max(nearest, FARTHEST) + 1)
    weights = 1 / distances / (1 / distances).sum()
    P = turning.mean(distances, weights).to(keys)
    moments = P @ torch.stack([text.moments for text in seen]).sum(0) @ P.mT
    # x metric xᵀ is the mean square of q·(x P): what an error x of a key does to scores
    metrics = attention.scaling**2 * moments / sum(text.queries for text in seen)
    means, W, b = list[Tensor](), list[Tensor](), list[Tensor]()
    for own, metric in zip(keys, metrics, strict=True):
        # in z = k R, with R Rᵀ the metric, the mean squares of errors are squares of distances
        root = _square_root(metric)
        points = own @ root
        places = cluster(points, phi_k.size, generator)
        nearest = torch.cdist(points, places).argmin(-1)
        # as queries meet them, turned by P; an empty cluster's place is taken back from z to a key
        means.append(_means(own, nearest, places @ torch.linalg.pinv(root)) @ P)
        # -τ/2 ‖z - z_c‖², but for ‖z‖², which all landmarks have in common
        W.append(SHARPNESS * places @ root.mT)
        b.append(-SHARPNESS / 2 * places.square().sum(-1))
    turning.write(phi_q, phi_k)
    _write(phi_k, torch.stack(W), torch.stack(b))
    # the query heads of a key head score its means alike
    of_queries = attention.scaling * torch.stack(means).repeat_interleave(repeats, 0)
    _write(phi_q, of_queries, of_queries.new_zeros(of_queries.shape[:2]))


def _write(phi: Any, W: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        phi.W.copy_(W.flatten(0, 1).unsqueeze(-1))
        phi.b.copy_(b.flatten())


def _square_root(metric: Tensor) -> Tensor:
    """The symmetric R ``[k k]`` with R Rᵀ = metric; R Rᵀ is positive definite by rounding's size,
    so that R has an inverse."""
    values, vectors = torch.linalg.eigh(metric.double())
    least = values[-1].clamp(min=torch.finfo(torch.float32).tiny) * 1e-7
    return ((vectors * values.clamp(min=least).sqrt()) @ vectors.mT).to(metric.dtype)


def _means(keys: Tensor, nearest: Tensor, empty: Tensor) -> Tensor:
    """The mean ``[c k]`` of the keys ``[n k]`` nearest to each landmark, or `empty`'s row."""
    counts = nearest.bincount(minlength=len(empty)).unsqueeze(-1)
    sums = torch.zeros_like(empty).index_add_(0, nearest, keys)
    return torch.where(counts > 0, sums / counts.clamp(min=1), empty)


def cluster(points: Tensor, count: int, generator: Generator) -> Tensor:
    """Return the means ``[count w]`` of clusters of ``points [n w]``: Lloyd's algorithm from a
    start by k-means++. A cluster that loses all its points stays where it was."""
    places = _spread(points, count, generator)
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, places).argmin(-1)
        places = _means(points, nearest, places)
    return places


def _spread(points: Tensor, count: int, generator: Generator) -> Tensor:
    """k-means++: each next point with probability in proportion to its squared distance from those
    chosen before, or any if all points are chosen."""
    draws = torch.rand(count, generator=generator, dtype=torch.float64).to(points.device)
    sizes = points.square().sum(-1)
    chosen = (draws[:1] * len(points)).long()
    distance = torch.full_like(sizes, torch.inf)
    for draw in draws[1:]:
        last = chosen[-1]
        # ‖x - c‖² = ‖x‖² - 2 x·c + ‖c‖², which rounding may take below zero
        to_last = (sizes - points @ (2 * points[last]) + sizes[last]).clamp_(min=0)
        distance = torch.minimum(distance, to_last).index_fill_(0, last, 0)
        weights = (distance if distance.any() else torch.ones_like(distance)).double().cumsum(0)
        drawn = torch.searchsorted(weights, draw * weights[-1:], right=True)
        chosen = torch.cat([chosen, drawn.clamp(max=len(points) - 1)])
    return points[chosen]
