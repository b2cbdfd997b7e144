"""One call of a language model as a function of tensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fastweights.engines.exported.linearized import LinearizedStates
from fastweights.engines.exported.pairs import InPairs
from fastweights.engines.exported.states import OwnStates, StateLayout
from fastweights.linearize.convert.model_classes import LinearizedModel
from fastweights.methods import Method
from fastweights.models import FastWeightsForCausalLM

Exported = FastWeightsForCausalLM | LinearizedModel
"""What is exported."""

BATCH, TOKENS, CACHED = 2, 5, 3
"""Lengths of the tensors that graphs are traced with; no two are equal, and none is 1."""


class DecodingProgram(nn.Module):
    """(input_ids ``[b t]``, \\*states) → (logits ``[b t vocab]``, \\*states after them).

    Attributes:
        model: in evaluation mode, without gradients
        layout: what the states are
    """

    def __init__(self, model: Exported) -> None:
        """
        Args:
            model: it stays as it is, but needs gradients no more

        Raises:
            TypeError: for a model that is neither one of ours nor a linearized one
            ValueError: for one in training
            ExportError: for a linearized one with layers that keep more than graphs hold
        """
        super().__init__()
        own = isinstance(model, FastWeightsForCausalLM)
        if not own and not isinstance(model, LinearizedModel):
            raise TypeError(
                f"a {type(model).__name__} is not exported; pass a FastWeightsForCausalLM, such as"
                " one that fastweights.import_model makes of a model of transformers, or a"
                " linearized model"
            )
        if model.training:
            raise ValueError("the model is in training; call model.eval() before it is exported")
        self.model = model.requires_grad_(False)
        self.layout: StateLayout = OwnStates(model) if own else LinearizedStates(model)

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        model, tokens = self.model, input_ids.shape[1]
        given = self.layout.arguments(past, tokens)
        output: Any = model(input_ids=input_ids, use_cache=True, **given)
        # compiled programs take states in the layout in which they were traced
        after = (state.contiguous() for state in self.layout.after(given, past, tokens))
        return output.logits, *after

    def examples(self, tokens: int) -> tuple[Tensor, ...]:
        """Inputs to trace with."""
        ids = torch.zeros(BATCH, tokens, dtype=torch.long, device=self.model.device)
        return ids, *self.layout.empty(BATCH, CACHED)

    def description(self) -> dict[str, Any]:
        """What a reader of its graphs has to know, as JSON: of every state what it is, and its
        shape before the first token, of one sequence.
        """
        config: Any = self.model.config.get_text_config(decoder=True)
        states = self.layout.tensors
        return {
            "vocab_size": config.vocab_size,
            "eos_token_id": config.eos_token_id,
            "states": [state.meaning for state in states],
            "shapes": [list(zeros.shape) for zeros in self.layout.empty()],
            "dtypes": [str(state.empty.dtype).removeprefix("torch.") for state in states],
        }

    def trace(self, method: Method, tokens: int) -> ExportedProgram:
        """The graph of a call.

        Args:
            method: evaluates recurrences by what a graph holds
            tokens: 1 for a graph of single tokens, else one of any number
        """
        with self.layout.use_method(method):
            return self._export(self, tokens)

    def trace_in_pairs(self, traced: ExportedProgram, tokens: int) -> ExportedProgram:
        """What `trace` made of these arguments, with pairs of real numbers for complex ones."""
        return self._export(InPairs(traced), tokens)

    def _export(self, call: nn.Module, tokens: int) -> ExportedProgram:
        time = Dim.DYNAMIC if tokens > 1 else None
        past = (_free(state.growing) for state in self.layout.tensors)
        shapes = {"input_ids": {0: Dim.DYNAMIC, 1: time}, "past": tuple(past)}
        with torch.no_grad():
            return torch.export.export(
                call, self.examples(tokens), dynamic_shapes=shapes, strict=False
            )


class Start(nn.Module):
    """input_ids ``[b t]`` → the states of so many sequences before their first token."""

    def __init__(self, layout: StateLayout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layout.empty(input_ids.shape[0]))

    def trace(self) -> ExportedProgram:
        """The graph of a call, for any numbers of sequences and tokens."""
        ids = torch.zeros(
            BATCH, TOKENS, dtype=torch.long, device=self.layout.tensors[0].empty.device
        )
        free = {"input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
        with torch.no_grad():
            return torch.export.export(self, (ids,), dynamic_shapes=free, strict=False)


def _free(growing: int | None) -> dict[int, Any]:
    """The axes of a state that may be of any length."""
    return {axis: Dim.DYNAMIC for axis in (0, growing) if axis is not None}
