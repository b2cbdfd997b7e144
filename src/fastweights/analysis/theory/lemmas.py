"""DSF's Lemma 1 (softmax needs an infinite state), Lemma 2 (a larger state loses nothing) and
appendix I.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, factorial

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fastweights.analysis import dsf
from fastweights.analysis.theory.finding import TheoryFinding, equal, largest
from fastweights.recurrence import LTV, Decay, DiagonalTransition, Normalized, Softmax
from fastweights.render.plots import PALETTE, label, legend


@dataclass(frozen=True, eq=False)
class TaylorSoftmax(TheoryFinding):
    """DSF Lemma 1: softmax attention by Taylor features up to each of the `orders` (DSF eq. 18,
    24-25).

    Attributes:
        orders: Highest orders of the Taylor polynomials.
        features: Number n of features per key; the state has N = n·v numbers.
        values: Number v of value channels.
        score_errors: max |Σ_p (q·k)^p/p! - e^(q·k)|, at most the remainder in `bounds`.
        bounds: Lagrange's remainder for each order.
        map_errors: max |Φ - softmax| of the normalised maps.
        points, ranks: Sizes and ranks of the matrices e^(x_i x_j) of distinct numbers: n features
            give rank n at most, and these have full rank, so that no finite n suffices.
    """

    source = "DSF Lemma 1"
    statement = "Softmax attention is a linear system only with infinitely many state rows."

    orders: tuple[int, ...]
    features: tuple[int, ...]
    values: int
    score_errors: tuple[float, ...]
    bounds: tuple[float, ...]
    map_errors: tuple[float, ...]
    points: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def verdict(self) -> bool:
        bounded = all(
            equal(error - bound, bound)
            for error, bound in zip(self.score_errors, self.bounds, strict=True)
        )
        inexact = all(not equal(error) for error in self.score_errors)
        return bounded and inexact and self.ranks == self.points

    def figures(self) -> list[dict[str, object]]:
        columns = (self.orders, self.features, self.score_errors, self.bounds, self.map_errors)
        return [
            {
                "order": order,
                "features n": n,
                "state N": n * self.values,
                "error of e^(q·k)": score,
                "bound": bound,
                "error of the map": error,
            }
            for order, n, score, bound, error in zip(*columns, strict=True)
        ]

    def draw(self, axes: Axes) -> None:
        sizes = [n * self.values for n in self.features]
        axes.loglog(sizes, self.bounds, color=PALETTE[7], linestyle=":", label="remainder's bound")
        axes.loglog(
            sizes,
            self.score_errors,
            color=PALETTE[0],
            marker="o",
            markersize=4,
            label="of $e^{q·k}$",
        )
        axes.loglog(
            sizes, self.map_errors, color=PALETTE[1], marker="o", markersize=4, label="of the map"
        )
        for size, error, order in zip(sizes, self.map_errors, self.orders, strict=True):
            axes.annotate(
                str(order),
                (size, error),
                (0, -11),
                textcoords="offset points",
                fontsize=7,
                ha="center",
            )
        label(
            axes,
            "Lemma 1: softmax by Taylor features of each order",
            "state size N",
            "largest error",
        )
        legend(axes)


def taylor_softmax(
    q: Tensor, k: Tensor, v: Tensor, orders: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
) -> TaylorSoftmax:
    """Execute Lemma 1 on the streams ``q, k [b t h k]``, ``v [b t h v]``; scores are q·k / √d_k as
    in `Softmax`."""
    width = q.shape[-1]
    wanted, scaled = Softmax(q, k, v).attention_map(), q / width**0.5
    scores = (scaled.transpose(1, 2) @ k.permute(0, 2, 3, 1)).tril()
    features, score_errors, map_errors = [], [], []
    for order in orders:
        phi, psi = dsf.taylor_features(scaled, order), dsf.taylor_features(k, order)
        inner = Decay(phi, psi, v, None)
        features.append(phi.shape[-1])
        score_errors.append(largest((inner.attention_map() - scores.exp()).tril()))
        map_errors.append(largest(Normalized(inner).attention_map() - wanted))
    # |e^x - Σ_{p≤P} x^p / p!| ≤ |x|^(P+1) / (P+1)! e^|x|
    top = largest(scores)
    bounds = tuple(top ** (p + 1) / factorial(p + 1) * exp(top) for p in orders)
    points = (2, 4, 8, 16)
    ranks = tuple(_rank_of_exponentials(m) for m in points)
    return TaylorSoftmax(
        orders,
        tuple(features),
        v.shape[-1],
        tuple(score_errors),
        bounds,
        tuple(map_errors),
        points,
        ranks,
    )


def _rank_of_exponentials(points: int) -> int:
    x = torch.linspace(-4, 4, points, dtype=torch.float64)
    return int(torch.linalg.matrix_rank((x[:, None] * x).exp()))


@dataclass(frozen=True, eq=False)
class Embedding(TheoryFinding):
    """DSF Lemma 2: a system of `width` rows inside larger ones, whose other rows are arbitrary and
    never read.

    Attributes:
        width: Rows of the system.
        widths: Rows of the larger systems.
        differences: max |y - ȳ| for each of the `widths`, relative to max |y|.
    """

    source = "DSF Lemma 2"
    statement = "A system with a larger state reproduces every system with a smaller one."

    width: int
    widths: tuple[int, ...]
    differences: tuple[float, ...]

    @property
    def verdict(self) -> bool:
        return all(map(equal, self.differences))

    def figures(self) -> list[dict[str, object]]:
        pairs = zip(self.widths, self.differences, strict=True)
        return [
            {"rows": self.width, "embedded in": wide, "difference": error} for wide, error in pairs
        ]

    def draw(self, axes: Axes) -> None:
        axes.bar([str(wide) for wide in self.widths], self.differences, color=PALETTE[0], width=0.5)
        axes.set_ylim(0, max(4e-16, 1.3 * max(self.differences)))
        label(
            axes,
            f"Lemma 2: {self.width} rows inside a larger state",
            "rows of the larger state",
            "max |y - ȳ| / max |y|",
        )


def embedding(system: LTV, u: Tensor, widths: tuple[int, ...], seed: int = 0) -> Embedding:
    """Execute Lemma 2 for a diagonal system, with random rows beside its own.

    Args:
        system: The system.
        u: Inputs ``[b t h v]``.
        widths: Rows of the larger systems.
        seed: Seed of the random rows.

    Raises:
        ValueError: If the transition is not diagonal.
    """
    y = system.simulate(u)[0]
    g = torch.Generator().manual_seed(seed)
    differences = tuple(
        largest(_random_embedding(system, wide, g).simulate(u)[0] - y) / largest(y)
        for wide in widths
    )
    return Embedding(system.A.width, widths, differences)


def _random_embedding(system: LTV, width: int, g: torch.Generator) -> LTV:
    """`extend` with any Λ and B in the new rows instead of zeros."""
    wide, own = system.extend(width), system.A.width
    if not isinstance(wide.A, DiagonalTransition):
        raise ValueError(
            "the embedding adds diagonal rows; pass a system with a diagonal transition"
        )
    new = torch.arange(width) >= own
    decay = torch.where(
        new, torch.rand(wide.B.shape, generator=g, dtype=torch.float64), wide.A.decay
    )
    B = torch.where(new, torch.randn(wide.B.shape, generator=g, dtype=torch.float64), wide.B)
    return replace(wide, A=DiagonalTransition(decay, width), B=B)


@dataclass(frozen=True, eq=False)
class ReversedSigmoid(TheoryFinding):
    """DSF appendix I: S6's Λ_i = exp(-softplus(x) a) beside σ(-x)^a, for several powers a.

    Attributes:
        x: ``[n]``, the projected inputs W u + b.
        powers: The powers a.
        transitions: ``[powers n]``, S6's Λ.
        differences: max |exp(-softplus(x) a) - σ(-x)^a| of each power.
    """

    source = "DSF appendix I, eq. 23"
    statement = "S6's transition with A = a I is a reversed sigmoid to the power a: a forget gate."

    x: Tensor
    powers: tuple[float, ...]
    transitions: Tensor
    differences: tuple[float, ...]

    @property
    def verdict(self) -> bool:
        return all(map(equal, self.differences))

    def figures(self) -> list[dict[str, object]]:
        pairs = zip(self.powers, self.differences, strict=True)
        return [{"a": power, "largest difference": error} for power, error in pairs]

    def draw(self, axes: Axes) -> None:
        order = self.x.argsort()
        for color, power, transition in zip(PALETTE, self.powers, self.transitions, strict=False):
            axes.plot(self.x[order], transition[order], color=color, label=f"a = {power:g}")
        axes.plot(
            self.x[order],
            self.x[order].sigmoid(),
            color=PALETTE[7],
            linestyle=":",
            label="σ(x), qLSTM",
        )
        label(axes, "Appendix I: S6's transition is σ(-x)^a", "x = W u + b", "Λ")
        legend(axes)


def reverse_sigmoid_transition(
    x: Tensor, powers: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0)
) -> ReversedSigmoid:
    """Execute appendix I at the projected inputs ``x [n]``, with Λ taken from eq. 19's matrices."""
    u, weight = x[None, :, None], torch.ones(1, 1, dtype=x.dtype)
    delta = torch.nn.functional.softplus(u)
    transitions = torch.stack(
        [dsf.s6(u, delta, a * weight, weight, weight, weight[0]).A.flatten() for a in powers]
    )
    reversed_ones = [dsf.reverse_sigmoid(x, a) for a in powers]
    differences = tuple(largest(t - r) for t, r in zip(transitions, reversed_ones, strict=True))
    return ReversedSigmoid(x, powers, transitions, differences)
