"""What a stage of a linearization trains, as values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fastweights.linearize.convert.attention import block_of
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.linearize.distill.adapt import prepare_adaptation
from fastweights.linearize.distill.transfer import only_branches
from fastweights.training.language.adapters import LoRA


class Trained(ABC):
    """The parameters that a stage trains; all others are frozen."""

    changes_weights: ClassVar[bool]
    """Whether the model's own weights change, so that it is no longer its own teacher."""

    @abstractmethod
    def prepare(self, model: Any, seed: int = 0) -> Any:
        """Make exactly these parameters of a linearized model require gradients.

        Args:
            model: The model.
            seed: Seed of what is added to it.

        Returns:
            The model, in peft's wrapper if there are adapters.
        """

    @abstractmethod
    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        """Count these parameters before a model is linearized.

        Args:
            model: The softmax model.
            attentions: Paths of the attentions that are converted.
            branch: Number of their branches' parameters.
        """


@dataclass(frozen=True)
class Branches(Trained):
    """The branches alone."""

    changes_weights: ClassVar[bool] = False

    def prepare(self, model: Any, seed: int = 0) -> Any:
        return only_branches(model)

    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        return branch


@dataclass(frozen=True)
class Attentions(Trained):
    """The converted attentions: their projections and norms, and their branches."""

    changes_weights: ClassVar[bool] = True

    def prepare(self, model: Any, seed: int = 0) -> Any:
        model.requires_grad_(False)
        for attention in attentions_with_branch(model):
            attention.requires_grad_(True)
        return model

    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        return branch + sum(_size(model.get_submodule(path)) for path in attentions)


@dataclass(frozen=True)
class AllWeights(Trained):
    """All weights, those of branches too."""

    changes_weights: ClassVar[bool] = True

    def prepare(self, model: Any, seed: int = 0) -> Any:
        return model.requires_grad_(True)

    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        return branch + _size(model)


@dataclass(frozen=True)
class AllButMLPs(Trained):
    """All weights but those of MLPs, in layers that stay softmax too (Wang et al., 2024)."""

    changes_weights: ClassVar[bool] = True

    def prepare(self, model: Any, seed: int = 0) -> Any:
        model.requires_grad_(True)
        with_branch = {id(module) for module in attentions_with_branch(model)}
        paths = [path for path, module in model.named_modules() if id(module) in with_branch]
        for mlp in mlps(model, paths):
            mlp.requires_grad_(False)
        return model

    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        return branch + _size(model) - sum(map(_size, mlps(model, attentions)))


@dataclass(frozen=True)
class Adapters(Trained):
    """Low-rank adapters of the converted attentions' projections.

    Attributes:
        lora: The adapters.
        branches: Whether the branches are trained further, together with them.
    """

    changes_weights: ClassVar[bool] = False
    lora: LoRA = LoRA()
    branches: bool = False

    def prepare(self, model: Any, seed: int = 0) -> Any:
        return prepare_adaptation(model, self.lora, self.branches, seed)

    def count(self, model: nn.Module, attentions: Iterable[str], branch: int) -> int:
        """rank · (inputs + outputs) of every projection."""
        matrices = [
            p for path in attentions for p in model.get_submodule(path).parameters() if p.ndim == 2
        ]
        adapters = self.lora.rank * sum(sum(p.shape) for p in matrices)
        return adapters + (branch if self.branches else 0)


def mlps(model: nn.Module, attentions: Iterable[str]) -> Iterator[nn.Module]:
    """Yield the MLPs of a model: what has matrices in the blocks beside their attentions.

    Args:
        model: The model.
        attentions: Paths of some of its attentions, by whose names in their blocks those of all
            other blocks are known.
    """
    attentions = list(attentions)
    blocks = [block_of(model, path) for path in attentions]
    names = {
        path.removeprefix(f"{block}.").partition(".")[0]
        for path, block in zip(attentions, blocks, strict=True)
    }
    for path in {block.rpartition(".")[0] for block in blocks}:
        for block in model.get_submodule(path).children():
            for name, part in block.named_children():
                if name not in names and any(p.ndim > 1 for p in part.parameters()):
                    yield part


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
