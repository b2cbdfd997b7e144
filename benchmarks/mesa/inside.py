"""What the Mesa layers of a trained model solve: ``python benchmarks/mesa/inside.py MODEL TEXT``.

Figure 13 of the paper (gates, condition numbers and steps by head), warm starts of conjugate
gradients at equal tolerance, and how far recursive least squares carry the model's own streams.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.analysis.capture import mesa_records
from fastweights.lab.bench.mesa_speed import CountingSolver
from fastweights.methods import Chunkwise, evaluate
from fastweights.models import FastWeightsForCausalLM
from fastweights.recurrence import (
    ConjugateGradient,
    Mesa,
    ShermanMorrison,
    condition_numbers,
    solver_statistics,
)
from fastweights.recurrence.solvers import ratio
from fastweights.train import ExistingTokenizer, Text, model_folder, read_corpus, sequential_windows

SEQUENCES, LENGTH, CHUNK = 4, 512, 32
FIGURE_TOL = 1e-3
"""The error to which Figure 13 counts steps."""
TOLERANCES = (1e-2, 1e-3, 1e-4)
MOST = 64
POSITIONS = (0, 16, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a run or a model folder")
    parser.add_argument("text", help="whose last tenth is read")
    parser.add_argument("--out", type=Path, default=Path("docs/measured/mesa_inside.json"))
    chosen = parser.parse_args()
    folder = model_folder(chosen.model)
    model = FastWeightsForCausalLM.from_pretrained(folder).eval()
    tokens = read_corpus(
        Text((chosen.text,), tokenization=ExistingTokenizer(str(folder)))
    ).validation
    with torch.no_grad():
        records = mesa_records(model, next(sequential_windows(tokens, LENGTH, SEQUENCES)))
        found = {"positions": POSITIONS, "heads": [], "warm": [], "least_squares": []}
        for layer, record in enumerate(records):
            found["heads"] += heads(record, layer)
            found["warm"] += warm_starts(record, layer)
            found["least_squares"] += least_squares(record, layer)
            print("layer", layer, flush=True)
    chosen.out.write_text(json.dumps(found, indent=1))


def by_position(values: Tensor) -> list[float]:
    """Means of ``[b t]`` between neighbours of `POSITIONS`."""
    return [values[:, first:last].mean().item() for first, last in pairwise(POSITIONS)]


def heads(record: Mesa, layer: int) -> list[dict[str, object]]:
    """Figure 13: a row per head."""
    condition = condition_numbers(record)
    steps = solver_statistics(replace(record, solver=ConjugateGradient(30, FIGURE_TOL))).steps
    optimal, _ = evaluate(record)
    unsolved, _ = evaluate(replace(record, solver=ConjugateGradient(0)))
    similarity = F.cosine_similarity(optimal, unsolved, dim=-1)
    gamma, ridge = (
        record.log_decays().exp()[..., 0].transpose(1, 2),
        record.ridge.expand(1, 1, record.shape[2], -1),
    )
    return [
        {
            "layer": layer,
            "head": head,
            "beta": record.beta[:, :, head].mean().item(),
            "gamma": gamma[..., head].mean().item(),
            "ridge": ridge[..., head, :].mean().item(),
            "condition": by_position(condition[..., head]),
            "steps": by_position(steps[..., head]),
            "cosine": by_position(similarity[..., head]),
        }
        for head in range(record.shape[2])
    ]


# warm starts --------------------------------------------------------------------------------------
# ------------------


@dataclass(frozen=True)
class Systems:
    """(H_t + Λ) x_t = q_t of all tokens and heads: ``matrix [n t k k]``, ``q [n t k]``; exact
    solutions ``x``; and H + Λ before the chunk of each token, solved: ``before [n t k]``.
    """

    matrix: Tensor
    q: Tensor
    x: Tensor
    before: Tensor

    @classmethod
    def of(cls, record: Mesa) -> Systems:
        pieces = [(operator.dense(), q) for operator, q in record.iterate_systems(size=CHUNK)]
        matrix, q = (torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
        last = matrix[:, CHUNK - 1 :: CHUNK].repeat_interleave(CHUNK, 1)
        ridge = torch.diag_embed(
            record.ridge.expand(1, CHUNK, record.shape[2], -1)[0].transpose(0, 1)
        )
        empty = ridge.repeat(record.shape[0], 1, 1, 1)
        stale = torch.cat([empty, last], 1)[:, : matrix.shape[1]]
        return cls(matrix, q, torch.linalg.solve(matrix, q), torch.linalg.solve(stale, q))

    def times(self, p: Tensor) -> Tensor:
        return (self.matrix @ p[..., None]).squeeze(-1)

    @property
    def jacobi(self) -> Tensor:
        return self.q / self.matrix.diagonal(dim1=-2, dim2=-1)

    @property
    def previous(self) -> Tensor:
        """x_{t-1}, exact; 0 at the first token."""
        return F.pad(self.x, (0, 0, 1, -1))

    def scaled(self, start: Tensor) -> Tensor:
        """The multiple of a start that is nearest to x in the norm of H + Λ."""
        return (
            ratio(
                (start * self.q).sum(-1, keepdim=True),
                (start * self.times(start)).sum(-1, keepdim=True),
            )
            * start
        )

    def both(self) -> Tensor:
        """The point nearest to x, in the same norm, between and beyond the Jacobi start and
        x_{t-1}.
        """
        basis = torch.stack(
            [F.normalize(self.jacobi, dim=-1), F.normalize(self.previous, dim=-1)], -1
        )
        weights = torch.linalg.lstsq(
            basis.mT @ self.matrix @ basis, basis.mT @ self.q[..., None]
        ).solution
        return (basis @ weights).squeeze(-1)


STARTS: dict[str, Callable[[Systems], Tensor]] = {
    "Jacobi": lambda s: s.jacobi,
    "zero": lambda s: torch.zeros_like(s.q),
    "previous token": lambda s: s.previous,
    "previous token, scaled": lambda s: s.scaled(s.previous),
    "Jacobi and previous token": Systems.both,
    "inverse before the chunk": lambda s: s.before,
}


def steps_from(systems: Systems, start: Tensor, target: Tensor) -> Tensor:
    """How many steps of conjugate gradients each system takes until ‖r‖ ≤ target, ``[n t]``."""
    x, r = start, systems.q - systems.times(start)
    p, size, steps = r, r.square().sum(-1), torch.zeros_like(target)
    for _ in range(MOST):
        active = size.sqrt() > target
        if not active.any():
            break
        product = systems.times(p)
        length = torch.where(active, ratio(size, (p * product).sum(-1)), 0)[..., None]
        x, r = x + length * p, r - length * product
        after = torch.where(active, r.square().sum(-1), size)
        p, size, steps = r + ratio(after, size)[..., None] * p, after, steps + active
    return steps


def warm_starts(record: Mesa, layer: int) -> list[dict[str, object]]:
    """Steps per token until the residual is `tol` of the Jacobi start's, in float64: all starts
    have one target.
    """
    systems = Systems.of(
        replace(record, **{name: s[:2].double() for name, s in record.streams.items()})
    )
    size = (systems.q - systems.times(systems.jacobi)).norm(dim=-1)
    starts = {name: start(systems) for name, start in STARTS.items()}
    return [
        {
            "layer": layer,
            "start": name,
            "tol": tol,
            "residual": (
                (systems.q - systems.times(start)).norm(dim=-1).mean() / size.mean()
            ).item(),
            "steps": steps_from(systems, start, tol * size).mean().item(),
        }
        for tol in TOLERANCES
        for name, start in starts.items()
    ]


# recursive least squares
# --------------------------------------------------------------------------------------------


def least_squares(record: Mesa, layer: int) -> list[dict[str, object]]:
    """Per head, of the last quarter's tokens decoded one by one: how many the fallback had to
    solve.
    """
    rows, first = [], 3 * LENGTH // 4
    for head in range(record.shape[2]):
        one = replace(record, **{n: _head(s, head) for n, s in record.streams.items()})
        for tol in TOLERANCES:
            counted = CountingSolver(ConjugateGradient(30, 1e-6))
            decoded = replace(one, solver=ShermanMorrison(tol, counted))
            _, state = evaluate(decoded[:first], method=Chunkwise())
            counted.systems.clear()
            for t in range(first, LENGTH):
                _, state = evaluate(decoded[t : t + 1], state)
            gamma = one.log_decays().exp()[..., first:, :].mean().item()
            part = sum(counted.systems) / (record.shape[0] * (LENGTH - first))
            rows.append(
                {"layer": layer, "head": head, "gamma": gamma, "tol": tol, "fallbacks": part}
            )
    return rows


def _head(stream: Tensor, head: int) -> Tensor:
    return stream if stream.shape[2] == 1 else stream[:, :, head : head + 1]


if __name__ == "__main__":
    main()
