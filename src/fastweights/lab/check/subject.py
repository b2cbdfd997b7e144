"""The model that is checked, asked in the ways in which people ask language models."""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from fastweights.models.continuation import NoCacheError, plain_tokens, read_with_cuts


class NotTaken(Exception):  # noqa: N818 - no error, but an answer
    """The model's forward has no argument by which it could be asked."""


@dataclass(frozen=True)
class Subject:
    """A causal language model in evaluation mode.

    Attributes:
        model: of transformers' interface, ours or anyone's
        tokenizer: the model's, if it has one
    """

    model: Any
    tokenizer: Any = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def arguments(self) -> frozenset[str]:
        """What its forward takes by name."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    def require(self, *names: str) -> None:
        """Raise `NotTaken` unless the forward takes these, by name or with all others."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        for name in names:
            if name not in self.arguments:
                raise NotTaken(f"its forward takes no {name}")

    def tokens(self, *shape: int) -> Tensor:
        """Tokens to ask with, the same at every call; none of them is special to the model."""
        generator = torch.Generator().manual_seed(sum(shape))
        drawn = torch.randint(len(self._plain), shape, generator=generator)
        return self._plain[drawn].to(self.device)

    def other(self, ids: Tensor) -> Tensor:
        """Tokens of which each differs from that of `ids` in its place."""
        places = torch.searchsorted(self._plain, ids.cpu())
        return self._plain[(places + 1) % len(self._plain)].to(self.device)

    @cached_property
    def _plain(self) -> Tensor:
        return plain_tokens(self.model)

    @torch.no_grad()
    def logits(self, ids: Tensor, **given: Any) -> Tensor:
        """``[b t vocabulary]``, of one call that keeps no cache."""
        return self.model(input_ids=ids, use_cache=False, **given).logits

    @torch.no_grad()
    def continued(self, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
        """``[b t vocabulary]``, of calls that each read on from the cache of the one before.

        Args:
            ids: ``[b t]``
            cuts: where a new call begins, ascending
        """
        return self._read(ids, cuts)

    def _read(self, ids: Tensor, cuts: tuple[int, ...], **given: Any) -> Tensor:
        try:
            return read_with_cuts(self.model, ids, cuts, **given)
        except NoCacheError as error:
            raise NotTaken("it returns no cache") from error

    def generate(self, ids: Tensor, new: int, **given: Any) -> Any:
        """What `generate` returns of `new` tokens behind each row, with logits and scores."""
        return self.model.generate(
            ids,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **({"attention_mask": torch.ones_like(ids)} | given),
        )

    def trainer_loss(self, ids: Tensor, **settings: Any) -> Tensor:
        """The loss of transformers' Trainer under these settings, of labels that are the tokens."""
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            cpu = self.device.type == "cpu"
            chosen = TrainingArguments(folder, report_to=[], use_cpu=cpu, **settings)
            trainer = Trainer(self.model, chosen)
            loss = trainer.compute_loss(self.model, {"input_ids": ids, "labels": ids.clone()})
        assert isinstance(loss, Tensor)
        return loss

    def gradients(
        self,
        ids: Tensor,
        weights: Tensor | None = None,
        cuts: tuple[int, ...] = (),
        **given: Any,
    ) -> dict[str, Tensor]:
        """Of the mean of all logits times `weights` ``[b t 1]``, by parameter.

        Args:
            ids: ``[b t]``
            weights: ``[b t 1]``; None for ones
            cuts: where a new call begins, from the cache of the one before
            given: to the model, of each call
        """
        self.model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            self._objective(ids, weights, cuts, **given).backward()
        found = {
            name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return found

    def _objective(
        self, ids: Tensor, weights: Tensor | None, cuts: tuple[int, ...] = (), **given: Any
    ) -> Tensor:
        logits = self._read(ids, cuts, **given)
        weights = torch.ones(*ids.shape, 1, device=ids.device) if weights is None else weights
        return (logits.sin() * weights).sum() / logits.shape[-1]

    def curvature(self, ids: Tensor, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        """The second derivative of the mean of all logits times a direction, by parameter."""
        named = {n: p for n, p in self.model.named_parameters() if n in direction}
        weighed = [*named.values()]
        with torch.enable_grad():
            slopes = torch.autograd.grad(
                self._objective(ids, None), weighed, create_graph=True, allow_unused=True
            )
            pairs = zip(slopes, direction.values(), strict=True)
            along = torch.stack([(s * d).sum() for s, d in pairs if s is not None]).sum()
            found = torch.autograd.grad(along, weighed, allow_unused=True)
        return {name: f for name, f in zip(named, found, strict=True) if f is not None}

    def direction(self) -> dict[str, Tensor]:
        """A direction of length 1 among the weights that learn, the same at every call."""
        learnt = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(p.shape, generator=generator).to(p) for p in learnt.values()]
        size = torch.stack([d.norm() for d in drawn]).norm()
        return {name: d / size for name, d in zip(learnt, drawn, strict=True)}

    @torch.no_grad()
    def move(self, direction: dict[str, Tensor], by: float) -> None:
        """Add to the weights."""
        for name, p in self.model.named_parameters():
            if name in direction:
                p.add_(direction[name], alpha=by)
