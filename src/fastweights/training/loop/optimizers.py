"""Optimisers as values, their learning rates and their saved state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim

from fastweights.errors import TrainingError
from fastweights.ranges import FRACTION, NON_NEGATIVE_NUMBER, POSITIVE_NUMBER


class OptimizerConfig(ABC):
    """The settings of an optimiser; compared by value."""

    kept: ClassVar[int] = 0
    """Numbers that it keeps of every trained parameter at least."""

    @abstractmethod
    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        """Build optimisers that together hold every trainable parameter once, at their peak
        learning rates."""


@dataclass(frozen=True)
class AdamW(OptimizerConfig):
    """AdamW whose weight decay applies to the matrices of linear layers only.

    Attributes:
        lr: Peak learning rate.
        betas: Coefficients of the running means.
        weight_decay: Decay per step, before it is multiplied by the learning rate.
        eps: Added to the denominator.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    kept: ClassVar[int] = 2
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        POSITIVE_NUMBER.require(lr=self.lr, eps=self.eps)
        NON_NEGATIVE_NUMBER.require(weight_decay=self.weight_decay)
        FRACTION.require_all(betas=self.betas)

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        return self.build_for(model, _trainable(model))

    def build_for(
        self, model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> list[optim.Optimizer]:
        """Build an optimiser of some of a model's parameters; none, if there are none."""
        decayed, others = _divide(parameters, matrices(model))
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if not parameters:
            return []
        return [
            optim.AdamW(
                [g for g in groups if g["params"]],
                lr=self.lr,
                betas=self.betas,
                eps=self.eps,
                fused=True,
            )
        ]


@dataclass(frozen=True)
class Muon(OptimizerConfig):
    """Muon for the hidden matrices, AdamW for everything else.

    An update of a matrix is its averaged gradient made orthogonal, U Vᵀ of U Σ Vᵀ, whether it lies
    whole or in parts, by five Newton-Schulz steps in bfloat16 (`torch.optim.Muon`; Jordan et al.,
    2024). Hidden matrices are the weights of linear layers but the head's (`hidden_matrices`).

    Attributes:
        lr: Peak learning rate of the hidden matrices; `others` has one of its own.
        momentum: Coefficient of the running mean of gradients, in Nesterov's form.
        weight_decay: Decay of hidden matrices per step, before it is multiplied by the learning
            rate.
        matched: Whether an update of n × m numbers is scaled by 0.2 √max(n, m), to the size of
            AdamW's, whose learning rate then serves both (Liu et al., 2025, eq. 4); otherwise by
            √max(1, n / m), as first published.
        others: The optimiser of all other parameters.

    Raises:
        TrainingError: If a number lies outside of its range, or torch is older than 2.9.
    """

    kept: ClassVar[int] = 1
    lr: float = 3e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    matched: bool = True
    others: AdamW = AdamW()

    def __post_init__(self) -> None:
        POSITIVE_NUMBER.require(lr=self.lr)
        FRACTION.require(momentum=self.momentum)
        NON_NEGATIVE_NUMBER.require(weight_decay=self.weight_decay)
        if not hasattr(optim, "Muon"):
            raise TrainingError(
                f"Muon needs torch 2.9 or later, and this is {torch.__version__}; install a later"
                " one, or train with AdamW"
            )

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        hidden, others = _divide(_trainable(model), hidden_matrices(model))
        if not hidden:
            raise TrainingError(
                f"a {type(model).__name__} has no hidden matrices that are trained; train it with"
                " AdamW"
            )
        muon = optim.Muon(
            hidden,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            adjust_lr_fn="match_rms_adamw" if self.matched else "original",
        )
        return [muon, *self.others.build_for(model, others)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the weights of linear layers that are not embeddings too.

    Norms, biases and a mixer's own parameters are not among them.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    return [p for p in _trainable(model) if id(p) in weights]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the `matrices` that are not of the model's head: of its output embeddings, or of what a
    classifier begins anew."""
    head = {id(p) for part in _heads(model) for p in part.parameters()}
    return [p for p in matrices(model) if id(p) not in head]


def _heads(model: Any) -> Iterable[nn.Module]:
    if (output := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        yield output
    if (name := getattr(model, "new_head", None)) is not None:
        yield model.get_submodule(name)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _divide(
    parameters: Iterable[nn.Parameter], chosen: Iterable[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(those of `parameters` that are chosen, the others)."""
    ids = {id(p) for p in chosen}
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for p in parameters:
        parts[id(p) not in ids].append(p)
    return parts


def set_learning_rates(
    optimizers: Iterable[optim.Optimizer], rate: Callable[[float], float]
) -> None:
    """Set every parameter group's learning rate to `rate` of its peak, with which it was built."""
    for group in _groups(optimizers):
        group["lr"] = rate(group.setdefault("initial_lr", group["lr"]))


def state_tensors(optimizers: Iterable[optim.Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """Collect the optimisers' state as ``"<parameter>/<quantity>"`` → tensor."""
    name = {id(p): n for n, p in model.named_parameters()}
    return {
        f"{name[id(p)]}/{quantity}": tensor.contiguous()
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for quantity, tensor in state.items()
    }


def load_state_tensors(
    optimizers: Iterable[optim.Optimizer], model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Restore the optimisers' state that `state_tensors` collected."""
    name = {id(p): n for n, p in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, _, quantity = key.rpartition("/")
        states.setdefault(parameter, {})[quantity] = tensor
    for optimizer in optimizers:
        held = [name[id(p)] for group in optimizer.param_groups for p in group["params"]]
        state = {
            index: states[parameter] for index, parameter in enumerate(held) if parameter in states
        }
        optimizer.load_state_dict(
            {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        )


def _groups(optimizers: Iterable[optim.Optimizer]) -> Iterable[dict]:
    return chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
