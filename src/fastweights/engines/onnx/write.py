"""A language model as one ONNX graph for prompts and for single tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from fastweights.engines.exported.errors import ExportError, quietly, reason_of
from fastweights.engines.exported.pairs import is_complex
from fastweights.engines.exported.program import TOKENS, DecodingProgram, Exported
from fastweights.engines.exported.states import StateLayout
from fastweights.engines.onnx.domains import Domain, translations
from fastweights.engines.onnx.nodes import Nodes, convolution_node
from fastweights.kernels.table import added

TRANSLATION = 1.4
"""Times as long as tracing."""


def write_onnx(
    model: Exported, out: Path, domain: Domain, note: Callable[[str], None] = lambda _: None
) -> dict[str, int]:
    """Write a model as an ONNX graph.

    The graph reads any number b of sequences and t ≥ 1 of tokens. Its inputs are ``input_ids``
    ``[b t]`` and the states ``past_0``, ``past_1``, …; its outputs ``logits`` ``[b t vocab]`` and
    the states after the tokens, ``present_0``, ``present_1``, … in the same order. Zeros are the
    states before the first token, of length 0 on the axis called "cached". What each is stands in
    the graph's metadata, as JSON under "fastweights".

    Args:
        model: in evaluation mode
        out: the file; weights of over 2 GB stand in one beside it
        domain: whose LinearAttention and CausalConvWithState it has, one of `DOMAINS`
        note: hears what is done once the model is traced

    Returns:
        how many nodes there are of each of these two operators, and loops ("Scan")

    Raises:
        ValueError: without the extra `onnx`
        ExportError: for a model whose rule ONNX does not hold
    """
    require_onnx()
    program, began = DecodingProgram(model.float()), time.monotonic()
    try:
        with added(convolution_node(domain)):
            graph = program.trace(Nodes(domain), TOKENS)
        if is_complex(graph):
            graph = program.trace_in_pairs(graph, TOKENS)
        left = timedelta(seconds=round(TRANSLATION * (time.monotonic() - began)))
        note(f"translating what was traced: {left} left")
        written = _translate(graph, program, domain)
    except (RuntimeError, TypeError, ValueError, torch.onnx.OnnxExporterError) as error:
        raise ExportError(f"this model is not written as ONNX: {reason_of(error)}") from error
    _name_axes(written.model, program.layout)
    written.model.metadata_props["fastweights"] = json.dumps(program.description())
    written.save(out)
    kinds = [n.op_type for n in written.model.graph.all_nodes()]
    return {kind: kinds.count(kind) for kind in ("LinearAttention", "CausalConvWithState", "Scan")}


def require_onnx() -> None:
    """Raise a ValueError unless the packages of the extra `onnx` are there."""
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ValueError(
            f"writing ONNX needs {' and '.join(missing)}: pip install 'fastweights[onnx]'"
        )


def _translate(graph: ExportedProgram, program: DecodingProgram, domain: Domain) -> Any:
    count = range(len(program.layout.tensors))
    # of packages that are not there, and operators newer than it knows, which are left as they are
    with quietly("torch.onnx", "onnxscript", "onnx_ir"):
        written: Any = torch.onnx.export(
            graph,
            program.examples(TOKENS),
            input_names=["input_ids", *(f"past_{i}" for i in count)],
            output_names=["logits", *(f"present_{i}" for i in count)],
            opset_version=domain.opset,
            custom_translation_table=translations(),
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        _simplify(written.model)
    written.model.opset_imports[domain.name] = domain.version
    return written


def _simplify(model: Any) -> None:
    """Compute what is constant once, and nothing that is unread or there already.

    In place of torch's `optimize`, whose rules for patterns of several outputs look through the
    whole graph at each of its nodes: hours for 30 layers. ONNX Runtime has its own when it loads.
    """
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(model)
    fold_constants(model)
    Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def _name_axes(model: Any, layout: StateLayout) -> None:
    """Call the axes of inputs and outputs by what they are."""
    graph = model.graph
    for value in (graph.inputs[0], graph.outputs[0]):
        _set_axes(value, {0: "batch", 1: "tokens"})
    for values, cached in ((graph.inputs, "cached"), (graph.outputs, "cached + tokens")):
        for value, state in zip(values[1:], layout.tensors, strict=True):
            growing = {} if state.growing is None else {state.growing: cached}
            _set_axes(value, {0: "batch", **growing})


def _set_axes(value: Any, names: dict[int, str]) -> None:
    shape = value.shape.copy()
    for axis, name in names.items():
        shape[axis] = name
    value.shape = shape
