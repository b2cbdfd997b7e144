"""MetaLA's appendix A2: who can overwrite (A2.1), who can draw any attention map (A2.2), who needs
least (A2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fastweights.analysis.theory.finding import TheoryFinding, equal, largest
from fastweights.recurrence import Decay, Delta, Recurrence
from fastweights.render.plots import PALETTE, label, legend


@dataclass(frozen=True)
class Attempt:
    """A model's attempt to replace row 1 of a full state by a new value.

    Attributes:
        model: Name of the model.
        row: ‖(S_{t+1})_1 - v_{t+1}‖ with the paper's key k = 1.
        others: Largest change of another row under the key that harms least, e_1.
        least: Smallest ‖(S_{t+1})_1 - v_{t+1}‖ that any key reaches.
    """

    model: str
    row: float
    others: float
    least: float


@dataclass(frozen=True, eq=False)
class Overwriting(TheoryFinding):
    """MetaLA Proposition A2.1: attempts to overwrite by models with no, fixed or dynamic decay, and
    by the delta rule."""

    source = "MetaLA Proposition A2.1"
    statement = "Only a dynamic decay (or an erasing key) replaces an old value by a new one (C1)."

    attempts: tuple[Attempt, ...]

    @property
    def verdict(self) -> bool:
        return all(equal(a.least) == (a.model in _OVERWRITING) for a in self.attempts)

    def figures(self) -> list[dict[str, object]]:
        return [
            {
                "model": a.model,
                "error of row 1, k = 1": a.row,
                "at best": a.least,
                "other rows": a.others,
            }
            for a in self.attempts
        ]

    def draw(self, axes: Axes) -> None:
        places = torch.arange(len(self.attempts))
        axes.bar(
            places - 0.2, [a.row for a in self.attempts], 0.4, color=PALETTE[0], label="key of ones"
        )
        axes.bar(
            places + 0.2, [a.least for a in self.attempts], 0.4, color=PALETTE[1], label="best key"
        )
        axes.set_xticks(places, [a.model for a in self.attempts], fontsize=7)
        label(axes, "A2.1: overwriting row 1 of a full state", "", "‖row 1 - new value‖")
        legend(axes)


_OVERWRITING = ("dynamic decay", "tied key 1 - α", "delta rule")


def overwriting(values: Tensor, new: Tensor, decay: float = 0.9) -> Overwriting:
    """Execute Prop. A2.1.

    Args:
        values: The stored rows ``[k v]``.
        new: The new value ``[v]``.
        decay: The fixed decay, in (0, 1).
    """
    one = torch.ones(len(values), dtype=values.dtype)
    first = torch.zeros_like(one).index_fill(0, torch.tensor(0), 1)
    dynamic, fixed = 1 - first, torch.full_like(one, decay)
    return Overwriting(
        (
            _attempt("no decay", values, new, one, first, None),
            _attempt("fixed decay", values, new, one, first, fixed),
            _attempt("dynamic decay", values, new, one, first, dynamic),
            _attempt("tied key 1 - α", values, new, first, first, dynamic),
            _attempt_erasing(values, new, first),
        )
    )


def _attempt(
    model: str, values: Tensor, new: Tensor, key: Tensor, first: Tensor, decay: Tensor | None
) -> Attempt:
    """The record writes with `key`, and once more with the key e_1; the best k_1 is a least-squares
    one.
    """
    log_decay = None if decay is None else decay.log()[None, None, None]
    rows = [
        _state_after(
            Decay(k[None, None, None], k[None, None, None], new[None, None, None], log_decay),
            values,
        )
        for k in (key, first)
    ]
    kept = values[0] if decay is None else decay[0] * values[0]
    # the best k_1 leaves of the kept row what is not along the new value
    along = (kept @ new) / (new @ new)
    return Attempt(
        model,
        row=float((rows[0][0] - new).norm()),
        others=largest(rows[1][1:] - values[1:]),
        least=float((kept - along * new).norm()),
    )


def _attempt_erasing(values: Tensor, new: Tensor, first: Tensor) -> Attempt:
    key, beta = first[None, None, None], torch.ones(1, 1, 1, 1, dtype=values.dtype)
    state = _state_after(Delta(key, key, new[None, None, None], beta), values)
    error = float((state[0] - new).norm())
    return Attempt("delta rule", row=error, others=largest(state[1:] - values[1:]), least=error)


def _state_after(record: Recurrence, values: Tensor) -> Tensor:
    _, state = record.step(values[None, None])
    assert isinstance(state, Tensor)
    return state[0, 0]


@dataclass(frozen=True)
class MapConstruction:
    """A given attention map constructed from some parameter groups, with one channel per query.

    Attributes:
        groups: The parameter groups.
        error: max |P_ts - p_ts| of the record's attention map.
        query, key: The largest |q| and |k| used.
        decays: The smallest and the largest α.
    """

    groups: str
    error: float
    query: float
    key: float
    decays: tuple[float, float]

    @property
    def exact(self) -> bool:
        """Whether the map is exact, with |q|, |k| and α in [0, 1], up to rounding."""
        low, high = self.decays
        return equal(self.error) and equal(max(self.query, self.key, high) - 1) and low >= 0


@dataclass(frozen=True, eq=False)
class Approximation(TheoryFinding):
    """A given attention map by every choice of parameter groups.

    Attributes:
        solutions: The paper's, for (Q, K), (Q, K, Λ_t) and (Q, Λ_t): α_s = (S_{s-1}/S_s)^θ and
            k_s = p_s / S_s^θ for θ = 0, ½, 1, with S_s = Σ_{j≤s} p_tj.
        lengths, needed: For a fixed decay, the least |k_1| for a uniform map of each length,
            p_t1 / α^(t-1).
        monotone: A lower bound of max |P_ts - p_ts| without Q where keys are not negative: then
            P_ts falls with t.
        signed: Without Q, but with keys of either sign, which the proposition overlooks: channel
            c lives until token c and k_sc = p_cs - p_{c+1,s}, so that the channels alive at t add
            up to p_ts.
    """

    source = "MetaLA Proposition A2.2"
    statement = (
        "(Q, Λ_t), (Q, K) and (Q, K, Λ_t) draw any attention map with bounded parameters; a fixed"
        " decay does not, nor does (K, Λ_t) with keys ≥ 0."
    )

    solutions: tuple[MapConstruction, ...]
    decay: float
    lengths: tuple[int, ...]
    needed: tuple[float, ...]
    monotone: float
    signed: MapConstruction

    @property
    def verdict(self) -> bool:
        grows = all(b > a for a, b in zip(self.needed, self.needed[1:], strict=False))
        return (
            all(s.exact for s in self.solutions)
            and grows
            and self.needed[-1] > 1
            and not equal(self.monotone)
        )

    def figures(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = [
            {
                "groups": s.groups,
                "error": s.error,
                "max |k|": s.key,
                "α from": s.decays[0],
                "to": s.decays[1],
            }
            for s in (*self.solutions, self.signed)
        ]
        rows.append({"groups": "(K, Λ_t), k ≥ 0", "error": f"≥ {self.monotone:.3g}"})
        fixed = zip(self.lengths, self.needed, strict=True)
        return rows + [
            {"groups": f"fixed α = {self.decay}, T = {t}", "max |k|": f"≥ {k:.3g}"}
            for t, k in fixed
        ]

    def draw(self, axes: Axes) -> None:
        axes.semilogy(
            self.lengths, self.needed, color=PALETTE[1], marker="o", markersize=4, label="fixed α"
        )
        names = ", ".join(s.groups for s in self.solutions)
        axes.axhline(
            max(s.key for s in self.solutions), color=PALETTE[0], linestyle="--", label=names
        )
        label(axes, "A2.2: keys needed for a map", "tokens T", "largest |k|")
        legend(axes)


def approximation(
    target: Tensor, decay: float = 0.8, lengths: tuple[int, ...] = (8, 16, 32, 64, 128)
) -> Approximation:
    """Execute Prop. A2.2 for a softmax map.

    Args:
        target: The map ``[t s]``: lower triangular, ≥ 0, with rows that sum to one.
        decay: The fixed decay.
        lengths: Lengths of the uniform maps for the fixed decay.
    """
    return Approximation(
        solutions=(
            _construction("(Q, K)", target, *_construct_streams(target, 0.0)),
            _construction("(Q, K, Λ_t)", target, *_construct_streams(target, 0.5)),
            _construction("(Q, Λ_t)", target, *_construct_streams(target, 1.0)),
        ),
        decay=decay,
        lengths=lengths,
        needed=tuple(1 / t / decay ** (t - 1) for t in lengths),
        monotone=_rise(target) / 2,
        signed=_construction("(K, Λ_t), signed k", target, *_without_queries(target)),
    )


def _construct_streams(target: Tensor, theta: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, α) ``[t c]``, a channel c per query: q_t = e_t; eq. A16-A21 are θ = 1, where k = 1 -
    α.
    """
    p = target.mT
    total = p.cumsum(0)
    before = total - p
    q = torch.eye(len(target), dtype=target.dtype)
    alpha = torch.where(total > 0, before / total, 1) ** theta
    return q, torch.where(total > 0, p / total**theta, 0), alpha


def _without_queries(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, α) ``[t c]`` of `Approximation.signed`."""
    t = torch.arange(len(target))
    alive = (t[:, None] <= t).to(target.dtype)
    # p_cs - p_{c+1,s}: the channels c ≥ t, which alone live at t, telescope to p_ts
    change = target - torch.cat([target[1:], torch.zeros_like(target[:1])])
    return torch.ones_like(target), change.mT * alive, alive


def _construction(
    groups: str, target: Tensor, q: Tensor, k: Tensor, alpha: Tensor
) -> MapConstruction:
    record = Decay(*(s[None, :, None] for s in (q, k, torch.ones_like(q), alpha.log())))
    found = record.attention_map()[0, 0]
    return MapConstruction(
        groups,
        largest(found - target),
        largest(q),
        largest(k),
        (float(alpha.min()), float(alpha.max())),
    )


def _rise(target: Tensor) -> float:
    """The most that attention to a token grows from one query to a later one."""
    queries = torch.arange(len(target))
    # queries before the token count as 1, which is never the least
    seen = target.masked_fill(queries[:, None] < queries, 1)
    return float((target - seen.cummin(0).values).max())


@dataclass(frozen=True)
class GroupChoice:
    """A choice of parameter groups, and which conditions it can meet.

    Attributes:
        name: The groups.
        size: Number of groups.
        dynamic_memory: Whether it meets C1.
        static_approximation: Whether it meets C2.
        signed: Whether it does so by keys of either sign, which the proposition overlooks.
    """

    name: str
    size: int
    dynamic_memory: bool
    static_approximation: bool
    signed: bool = False

    @property
    def sufficient(self) -> bool:
        return self.dynamic_memory and self.static_approximation


@dataclass(frozen=True, eq=False)
class LeastParameters(TheoryFinding):
    """MetaLA Proposition A2.3: all choices of parameter groups, and which of them suffice.

    A choice for which A2.2 found no bounded solution counts as insufficient.
    """

    source = "MetaLA Proposition A2.3"
    statement = (
        "(Q, Λ_t) is the least choice of parameter groups with C1 and C2 (C3), if keys are ≥ 0"
        " wherever there are no queries."
    )

    choices: tuple[GroupChoice, ...]

    @property
    def verdict(self) -> bool:
        return [c.name for c in self.least if not c.signed] == ["Q, Λ_t"]

    @property
    def least(self) -> list[GroupChoice]:
        """The smallest choices that suffice, among them those with keys of either sign."""
        enough = [c for c in self.choices if c.sufficient]
        size = min(c.size for c in enough)
        return [c for c in enough if c.size == size]

    def figures(self) -> list[dict[str, object]]:
        return [
            {
                "groups": c.name,
                "count": c.size,
                "C1": c.dynamic_memory,
                "C2": c.static_approximation,
            }
            for c in self.choices
        ]

    def draw(self, axes: Axes) -> None:
        cells = [[c.dynamic_memory, c.static_approximation, c.sufficient] for c in self.choices]
        axes.imshow(cells, cmap="RdYlGn", vmin=-0.6, vmax=1.6, aspect="auto")
        axes.set_xticks(range(3), ["C1", "C2", "both"])
        axes.set_yticks(range(len(self.choices)), [c.name for c in self.choices])
        axes.grid(visible=False)
        for row, cell in enumerate(cells):
            for column, met in enumerate(cell):
                axes.text(column, row, "yes" if met else "no", ha="center", va="center", fontsize=8)
        label(axes, "A2.3: what each choice of groups can do", "", "")


def least_parameters(overwrite: Overwriting, approximate: Approximation) -> LeastParameters:
    """Execute Prop. A2.3 from the numbers of the other two."""
    dynamic = {a.model: equal(a.least) for a in overwrite.attempts}
    static = {s.groups: s.exact for s in approximate.solutions}
    signed, memory = approximate.signed, dynamic["dynamic decay"]
    choices = [GroupChoice("K, Λ_t, signed k", 2, memory, signed.exact, signed=True)]
    for decay in ((), ("Λ",), ("Λ_t",)):
        for others in chain.from_iterable(combinations(("Q", "K"), n) for n in range(3)):
            groups = (*others, *decay)
            if groups:
                memory = dynamic[
                    "dynamic decay" if decay == ("Λ_t",) else "fixed decay" if decay else "no decay"
                ]
                name = ", ".join(groups)
                choices.append(
                    GroupChoice(name, len(groups), memory, static.get(f"({name})", False))
                )
    return LeastParameters(tuple(choices))
