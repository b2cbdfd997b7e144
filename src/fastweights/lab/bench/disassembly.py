"""A kernel's binary as NVIDIA's disassembler prints it: instructions, the loops that they are in,
and how often launches issue them.

A warp issues one instruction at a time and each of a multiprocessor's four schedulers one in every
clock, so that instructions, as bytes and products, are a time that no launch can stay below.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

EARLY = "return"
"""The name, among the lines that programs pass, of a kernel's `return` before its end."""

_PLACE = re.compile(r'\s*//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LABEL = re.compile(r"(?P<label>\.L\w+):")
_INSTRUCTION = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z0-9_]+)(?P<rest>[^;]*);"
)


class Instruction(NamedTuple):
    """Attributes:
    name: without modifiers, as in "HGMMA"
    guard: the predicate under which it takes effect, as in "@!P0"; "" for always
    rest: modifiers and operands
    line: of the kernel's source, as in "decay.py:87"; "" where that is not known
    """

    name: str
    guard: str
    rest: str
    line: str


class CodeLoop(NamedTuple):
    """Attributes:
    first, last: places of its instructions in the binary; the last jumps to the first
    line: of the statement in the kernel's source, as in "decay.py:87"
    """

    first: int
    last: int
    line: str


@dataclass(frozen=True)
class Code:
    """A binary's instructions in order.

    Attributes:
        labels: the place of the instruction behind each label
    """

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @classmethod
    def read(cls, text: str) -> Code:
        """What the disassembler printed, with lines of the source (`nvdisasm -g`)."""
        found: list[Instruction] = []
        labels, line = {}, ""
        for row in text.splitlines():
            if place := _PLACE.match(row):
                line = f"{Path(place['file']).name}:{place['line']}"
            elif label := _LABEL.match(row):
                labels[label["label"]] = len(found)
            elif one := _INSTRUCTION.match(row):
                guard, rest = (one["guard"] or "").strip(), one["rest"].strip()
                found.append(Instruction(one["name"], guard, rest, line))
        return cls(tuple(found), labels)

    @classmethod
    def of(cls, binary: bytes) -> Code:
        """Raises CalledProcessError for what is no binary of a kernel."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        handle, path = tempfile.mkstemp(suffix=".cubin")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(binary)
            found = subprocess.run(
                [str(tool), "-g", path], capture_output=True, text=True, check=True
            )
        finally:
            os.unlink(path)
        return cls.read(found.stdout)

    @cached_property
    def loops(self) -> tuple[CodeLoop, ...]:
        """Outer ones before those inside them."""
        last: dict[int, int] = {}
        for place, one in enumerate(self.instructions):
            target = self._target(one)
            if target is not None and target < place:
                last[target] = place
        return tuple(
            CodeLoop(first, end, self.instructions[end].line) for first, end in sorted(last.items())
        )

    def _target(self, one: Instruction) -> int | None:
        """The place to which a branch goes; None for any other instruction."""
        label = re.search(r"\.L\w+", one.rest) if one.name == "BRA" else None
        return self.labels[label[0]] if label else None

    @cached_property
    def per_pass(self) -> tuple[Counter[str], ...]:
        """For each loop, the instructions of one pass by name, without those of loops inside it;
        last, those outside of loops.
        """
        counts = tuple(Counter[str]() for _ in range(len(self.loops) + 1))
        for place, one in enumerate(self.instructions):
            around = [i for i, loop in enumerate(self.loops) if loop.first <= place <= loop.last]
            if one.name != "NOP":
                counts[around[-1] if around else -1][one.name] += 1
        return counts

    def issued(self, programs: float, passed: Mapping[str, float]) -> float:
        """How many instructions each warp place of a launch issues, all programs together.

        Both sides of a branch count. A loop that the compiler made of one statement has as many
        passes as the statement; several copies of it share them.

        Args:
            programs: of the launch
            passed: passes of all programs, by the lines of loops; under `EARLY`, programs that
                ended at a `return` before the kernel's end
        """
        early, copies = passed.get(EARLY, 0.0), Counter(loop.line for loop in self.loops)
        *within, outside = (sum(names.values()) for names in self.per_pass)
        passes = (passed.get(loop.line, 0.0) / copies[loop.line] for loop in self.loops)
        repeated = sum(n * times for n, times in zip(within, passes, strict=True))
        return early * self._before_exit() + (programs - early) * outside + repeated

    def _before_exit(self) -> int:
        """Instructions up to the first exit."""
        return 1 + next(i for i, one in enumerate(self.instructions) if one.name == "EXIT")
