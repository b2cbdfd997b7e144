"""What in a kernel's binary is right only by luck, where upstream has found the compiler wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fastweights.lab.bench.disassembly import Code, Instruction

WARP_GROUP = 4
"""Warps that a wide product belongs to."""

CONVERGENT = frozenset(
    ("BAR", "SHFL", "LDSM", "STSM", "HMMA", "HGMMA", "IMMA", "WARPGROUP", "VOTE", "MATCH", "REDUX")
)
"""Instructions that all lanes of a warp must reach together."""


def writes_after_waits(code: Code, warps: int) -> set[str]:
    """Stores that write shared memory behind a wait for wide products, with no barrier between.

    The wait is of one warp group: another may still read there (triton-lang/triton#11047).
    """
    if warps <= WARP_GROUP:
        return set()
    bodies = (code.instructions[loop.first : loop.last + 1] for loop in code.loops)
    return {name for part in (code.instructions, *(2 * b for b in bodies)) for name in _late(part)}


def _late(instructions: Iterable[Instruction]) -> Iterator[str]:
    waited = False
    for one in instructions:
        if one.name == "WARPGROUP" and "DEPBAR" in one.rest:
            waited = re.search(r"\b0x0\b", one.rest) is not None
        elif one.name in ("BAR", "HGMMA"):
            waited = False
        elif waited and one.name in ("STS", "STSM", "LDGSTS"):
            yield one.name


def divergent_instructions(code: Code) -> set[str]:
    """Convergent instructions inside of branches that lanes of a warp take apart.

    There a pass of LLVM can move the place where lanes meet behind them
    (triton-lang/triton#11148 and #11153).
    """
    regions: list[bool] = []  # whether lanes have parted in them, inner ones last
    found = set()
    for one in code.instructions:
        if one.name == "BSSY":
            regions.append(False)
        elif one.name == "BSYNC" and regions:
            regions.pop()
        elif one.name == "BRA" and one.guard and regions:
            regions[-1] = True
        elif any(regions) and one.name in CONVERGENT:
            found.add(one.name)
    return found


def stray_addresses(code: Code) -> list[str]:
    """Additions that take the stack pointer for the upper half of an address.

    ptxas of CUDA 12.8 makes such of the descriptors of wide products in a loop where products
    before the loop read the same shared memory.
    """
    carried = (one for one in code.instructions if re.match(r"\.X\b", one.rest))
    return [f"{one.name}{one.rest}" for one in carried if re.search(r"\bR1\b", one.rest)]
