"""Mixtures of experts: MLPs of which every token passes a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.layers.functions import upcast
from fastweights.layers.linear import Linear
from fastweights.layers.mlp import MLP, GatedMLP
from fastweights.shapes import Embedded


@dataclass(frozen=True)
class Routing:
    """How a token chooses among experts, and what it weighs them with.

    With the scores s = softmax(x W), or σ(x W), a token passes the experts with the largest s + b
    and adds up their outputs with the weights s (Shazeer et al., 2017; DeepSeek-V3, eq. 12-16).

    Attributes:
        count: Experts that there are.
        chosen: Experts that a token passes.
        sigmoid: Whether s is σ, each expert's by itself.
        normalized: Whether the weights of the chosen experts are divided by their sum.
        floor: What is added to that sum (LFM2).
        corrected: Whether there is a bias b of the choice, which no gradient reaches: what trains
            a model moves it towards experts that are chosen too rarely.
        groups: Into how many groups the experts are divided, in their order.
        chosen_groups: Groups that a token chooses among: those whose two best s + b have the
            largest sums.
        scale: What all weights are multiplied by.

    Raises:
        ValueError: There are fewer experts, groups or experts in a group than are chosen.
    """

    count: int
    chosen: int
    sigmoid: bool = False
    normalized: bool = True
    floor: float = 0.0
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.count % self.groups:
            raise ValueError(f"count = {self.count} is no multiple of groups = {self.groups}")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"chosen_groups = {self.chosen_groups} of groups = {self.groups}")
        each = self.count // self.groups
        if self.groups > 1 and each < 2:
            raise ValueError(f"groups = {self.groups} leaves {each} expert to a group; 2 or more")
        if not 1 <= self.chosen <= each * self.chosen_groups:
            raise ValueError(
                f"chosen = {self.chosen}; a token chooses among {each * self.chosen_groups} experts"
            )


class Router(nn.Module):
    """The choice of experts that `Routing` describes.

    Attributes:
        W: The projection to the logits of the scores.
    """

    bias: Tensor | None

    def __init__(self, d: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.W = Linear(d, routing.count, bias=False)
        self.register_buffer("bias", torch.zeros(routing.count) if routing.corrected else None)

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, numbers of the experts) ``[n chosen]`` each, of ``x [n d]``."""
        logits, how = upcast(self.W(x)), self.routing
        scores = logits.sigmoid() if how.sigmoid else logits.softmax(-1)
        merit = scores if self.bias is None else scores + self.bias
        chosen = self._of_best_groups(merit).topk(how.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if how.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + how.floor)
        return (how.scale * weights).to(x.dtype), chosen

    def _of_best_groups(self, merit: Tensor) -> Tensor:
        """−∞ for the experts of the other groups."""
        how = self.routing
        if how.groups == how.chosen_groups:
            return merit
        of_groups = merit.unflatten(-1, (how.groups, -1))
        best = of_groups.topk(2, dim=-1).values.sum(-1).topk(how.chosen_groups, dim=-1).indices
        others = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return of_groups.masked_fill(others[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """Σ_e w_e MLP_e(x) over the experts that a token chooses, and an MLP that all tokens pass.

    Tokens are gathered by expert, so that each multiplies once by the weights of an expert.

    Args:
        d: Channels of x.
        width: Channels inside an expert.
        activation: σ of all MLPs.
        bias: Whether their projections have biases.
        routing: The fields of `Routing`.
        gated: Whether they are `GatedMLP`, or else `MLP`.
        shared: Channels inside the MLP that all tokens pass; None for none.
        shared_gate: Whether its output is multiplied by σ(x w) (Qwen).
        latent: Channels that x is projected to before the experts, and their sum back from
            (Nemotron); None for experts that read x itself.
    """

    def __init__(
        self, d: int, width: int, activation: nn.Module, *, bias: bool, routing: Mapping[str, Any],
        gated: bool = True, shared: int | None = None, shared_gate: bool = False,
        latent: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kind, read = GatedMLP if gated else MLP, latent or d
        if shared_gate and shared is None:
            raise ValueError("shared_gate = True, but shared = None: there is nothing to gate")
        self.router = Router(d, Routing(**routing))
        self.experts = nn.ModuleList(
            kind(read, width, activation, bias=bias) for _ in range(self.router.routing.count)
        )
        self.W_in = None if latent is None else Linear(d, latent, bias=bias)
        self.W_out = None if latent is None else Linear(latent, d, bias=bias)
        self.shared = None if shared is None else kind(d, shared, activation, bias=bias)
        self.w_shared = Linear(d, 1, bias=False) if shared_gate else None

    @property
    def writers(self) -> list[nn.Module]:
        """The projections that write the output."""
        experts = [*self.experts] if self.W_out is None else [self.W_out]
        return [writer for part in (*experts, self.shared) for writer in writers_of(part)]

    @property
    def idle_parameters(self) -> int:
        """How many parameters a token passes by: those of the experts that it does not choose."""
        each = sum(p.numel() for p in self.experts[0].parameters())
        return (self.router.routing.count - self.router.routing.chosen) * each

    def forward(self, x: Embedded) -> Embedded:
        weights, chosen = self.router(x.flatten(0, 1))
        read = x if self.W_in is None else self.W_in(x)
        y = self._mix(read.flatten(0, 1), weights, chosen).view_as(read)
        y = y if self.W_out is None else self.W_out(y)
        if self.shared is None:
            return y
        z = self.shared(x)
        return y + (z if self.w_shared is None else self.w_shared(x).sigmoid() * z)

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Σ_e w_e MLP_e(x) of ``x [n d]`` by ``weights`` and ``chosen [n k]``."""
        k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        passing = x[order // k].split(self._counts(chosen))
        runs = [e for e, some in enumerate(passing) if self._runs(some)]
        y = torch.cat([self.experts[e](passing[e][None])[0] for e in runs])
        return (y[order.argsort()].unflatten(0, (-1, k)) * weights[..., None]).sum(1)

    def _counts(self, chosen: Tensor) -> list[int]:
        """Tokens per expert; on the meta device, where nobody chooses, all for the first ones."""
        n, k = chosen.shape
        if chosen.is_meta:
            return [n] * k + [0] * (len(self.experts) - k)
        return torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()

    @staticmethod
    def _runs(some: Tensor) -> bool:
        """Whether an expert has tokens, or autograd is to give it a gradient of zeros."""
        return len(some) > 0 or torch.is_grad_enabled()


def writers_of(mlp: nn.Module | None) -> list[nn.Module]:
    """The projections of an MLP that write its output."""
    match mlp:
        case Experts():
            return mlp.writers
        case GatedMLP() | MLP():
            return [mlp.W_o]
        case nn.Linear():
            return [mlp]
        case _:
            return []


MLPS: dict[str, Callable[..., nn.Module]] = {
    "gated": GatedMLP,
    "plain": MLP,
    "identity": nn.Identity,
    "experts": Experts,
}
"""Channel mixers by name, called as (d, width, activation, bias=…); "identity" adds the normalised
stream itself, and "experts" needs a routing as well.
"""
