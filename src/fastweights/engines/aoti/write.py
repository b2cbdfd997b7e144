"""A language model as a package of AOTInductor: a program for prompts and one for single tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fastweights.engines.exported.chunks import LoopedChunks, Step
from fastweights.engines.exported.comparison import Call, EngineComparison
from fastweights.engines.exported.errors import ExportError, quietly, reason_of
from fastweights.engines.exported.pairs import is_complex, unguarded
from fastweights.engines.exported.program import DecodingProgram, Exported, Start
from fastweights.methods import Method
from fastweights.recurrence.base import CHUNK

PROMPT = 2 * CHUNK + 5
"""Tokens that the program for prompts is traced with: more than one chunk, and no multiple."""
LARGEST_ERROR = 3e-4
"""Of compiled logits in float32, relative to the largest."""
DESCRIPTION = "fastweights"
"""The key of a program's metadata under which its description is, as JSON."""


def export_programs(model: Exported) -> dict[str, ExportedProgram]:
    """A model as graphs of torch.export.

    ``start`` is a function of ``input_ids [b t]`` alone, and returns the states before the first
    token of b sequences, which are zeros. ``prefill`` reads any number t of tokens, recurrences
    chunk by chunk; ``decode`` reads one, by the rules' steps. Both are functions of ``input_ids``
    and the states, for any number b of sequences, and return ``logits [b t vocab]`` and the states
    after the tokens in the same order.

    Args:
        model: in evaluation mode, on the device that the programs are for

    Raises:
        TypeError: for a model that is not one of ours
        ValueError: for one in training
        ExportError: for a model that torch.export does not take
    """
    program = DecodingProgram(model)
    try:
        with quietly("torch"):
            return {
                "start": Start(program.layout).trace(),
                "prefill": _trace(program, LoopedChunks(), PROMPT),
                "decode": _trace(program, Step(), 1),
            }
    except Exception as error:
        raise ExportError(f"torch.export does not take this model: {reason_of(error)}") from error


def _trace(program: DecodingProgram, method: Method, tokens: int) -> ExportedProgram:
    """The graph, with pairs of real numbers for complex ones, which compilers leave to torch."""
    traced = program.trace(method, tokens)
    return program.trace_in_pairs(traced, tokens) if is_complex(traced) else traced


def write_package(model: Exported, out: Path, note: Callable[[str], None] = lambda _: None) -> None:
    """Write the programs of `export_programs`, compiled for this machine, as one package.

    ``torch._inductor.package.load_package(out, "prefill")``, ``"decode"`` and ``"start"`` load
    them, in C++ ``torch::inductor::AOTIModelPackageLoader``; neither needs this library. Their
    metadata say under "fastweights", as JSON, what their states are, with shapes and dtypes.

    Args:
        model: as for `export_programs`
        out: the file, which ends in .pt2; ``prefill`` and ``decode`` have the weights in them
        note: hears which program is compiled

    Raises:
        ValueError: for another ending, a file that exists, or without a C++ compiler
        ExportError: for a model that is not exported or compiled, or not to the same function
    """
    if out.suffix != ".pt2":
        raise ValueError(f"{out} does not end in .pt2, as torch wants packages to; name it so")
    if out.exists():
        raise ValueError(f"{out} exists; remove it or write elsewhere")
    require_compiler()
    from torch._inductor.package.package import package_aoti

    description = json.dumps(DecodingProgram(model).description())
    programs = export_programs(model)
    with TemporaryDirectory() as folder, quietly("torch"):
        files = dict[str, Any]()
        for name, program in programs.items():
            note(f"compiling {name}, of {len(program.graph.nodes):,} operations")
            files[name] = _compile(program, description, Path(folder, name))
        package = Path(folder, out.name)
        package_aoti(str(package), files)
        require_equal(model, package)
        shutil.copyfile(package, out)


def read_by(programs: Mapping[str, Callable[..., Any]]) -> Call:
    """How a `EngineComparison` reads tokens by the programs for prompts and single tokens."""

    def call(ids: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        logits, *after = programs["prefill" if ids.shape[1] > 1 else "decode"](ids, *states)
        return logits, after

    return call


def require_equal(model: Exported, package: Path) -> None:
    """Raise ExportError where the compiled programs are not the model."""
    from torch._inductor.package.package import load_package

    compiled = {name: load_package(str(package), name) for name in ("prefill", "decode")}
    error = EngineComparison(PROMPT, decoded=2).error(model, read_by(compiled))
    if not error <= max(LARGEST_ERROR, 30 * torch.finfo(model.dtype).eps):
        raise ExportError(
            f"torch {torch.__version__} has compiled another model: its logits are {error:.0e} of"
            " the largest one from those of this model; export it as .onnx, or with another"
            " version of torch"
        )


def require_compiler() -> None:
    """Raise unless there is a C++ compiler that torch uses."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "there is no C++ compiler, which compiling ahead of time needs; install g++ or clang,"
            " and name it in the environment variable CXX unless it is called g++"
        ) from error


def _compile(program: ExportedProgram, description: str, folder: Path) -> Any:
    """The files of a program for a package."""
    options = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.metadata": {DESCRIPTION: description},
    }
    assert program.example_inputs is not None
    inputs, _ = program.example_inputs
    try:
        module = unguarded(program)
        return torch._inductor.aot_compile(module, inputs, options=options)  # type: ignore[arg-type]
    except Exception as error:
        raise ExportError(f"torch does not compile this model: {reason_of(error)}") from error
