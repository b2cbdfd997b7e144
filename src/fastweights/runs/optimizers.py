"""Optimisers as values, their learning rates and their saved state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn, optim

from fastweights.runs.ranges import FRACTION, NON_NEGATIVE_NUMBER, POSITIVE_NUMBER


class OptimizerConfig(ABC):
    """The settings of an optimiser; compared by value.

    To add one, such as Muon for the matrices, return several optimisers that divide the parameters
    among them.
    """

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

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        POSITIVE_NUMBER.require(lr=self.lr, eps=self.eps)
        NON_NEGATIVE_NUMBER.require(weight_decay=self.weight_decay)
        FRACTION.require_all(betas=self.betas)

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        decayed = matrices(model)
        chosen = {id(p) for p in decayed}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [
            optim.AdamW(
                [g for g in groups if g["params"]],
                lr=self.lr,
                betas=self.betas,
                eps=self.eps,
                fused=True,
            )
        ]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the weights of linear layers that are not embeddings too.

    Norms, biases and a mixer's own parameters are not among them.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    return [p for p in model.parameters() if p.requires_grad and id(p) in weights]


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
