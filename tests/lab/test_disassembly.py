"""What is read from a disassembled kernel, of lines whose loops are known."""

from __future__ import annotations

import pytest

from fastweights.lab.bench.disassembly import EARLY, Code
from hazards import divergent_instructions, stray_addresses, writes_after_waits

# a loop of two instructions and a branch within one of three, then two copies of another
NESTED = """
        //## File "/src/device/decay.py", line 10
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_0:
        /*0020*/                   LDS.128 R4, [R2+0x400] ;
.L_x_1:
        //## File "/src/device/scores.py", line 99
        /*0030*/                   FFMA R1, R2, R3, R1 ;
        /*0040*/                   FFMA R2, R2, R3, R1 ;
        //## File "/src/device/scores.py", line 20
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        //## File "/src/device/decay.py", line 12
        /*0060*/                   FADD R1, R1, R1 ;
        //## File "/src/device/decay.py", line 11
        /*0070*/               @P2 BRA `(.L_x_0) ;
        /*0080*/               @P3 BRA `(.L_x_4) ;
.L_x_2:
        /*0090*/                   MUFU.EX2 R3, R3 ;
        //## File "/src/device/delta.py", line 5
        /*00a0*/               @P4 BRA `(.L_x_2) ;
.L_x_3:
        /*00b0*/                   MUFU.EX2 R3, R3 ;
        /*00c0*/               @P5 BRA `(.L_x_3) ;
.L_x_4:
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   BRA `(.L_x_5);
        /*00f0*/                   NOP;
"""


def test_loops_are_branches_to_earlier_instructions() -> None:
    code = Code.read(NESTED)
    assert [(loop.first, loop.last, loop.line) for loop in code.loops] == [
        *((2, 7, "decay.py:11"), (3, 5, "scores.py:20")),
        *((9, 10, "delta.py:5"), (11, 12, "delta.py:5")),
    ], "one to a later instruction, or to itself at the end, is none"
    outer, inner, first, second, outside = code.per_pass
    assert outer == {"LDS": 1, "FADD": 1, "BRA": 1}
    assert inner == {"FFMA": 2, "BRA": 1}
    assert first == second == {"MUFU": 1, "BRA": 1}
    assert outside == {"MOV": 1, "EXIT": 2, "BRA": 2}


def test_instructions_are_issued_in_every_pass() -> None:
    """5 outside, 3 of 40 outer and 3 of 200 inner passes, 2 of the 24 that both copies share; of
    programs that end at their first exit, 2.
    """
    code = Code.read(NESTED)
    passed = {"decay.py:11": 40.0, "scores.py:20": 200.0, "delta.py:5": 24.0}
    assert code.issued(10, passed) == 10 * 5 + 3 * 40 + 3 * 200 + 2 * 24
    assert code.issued(10, {EARLY: 10}) == 10 * 2
    assert code.issued(10, {EARLY: 4, **passed}) == 4 * 2 + 6 * 5 + 3 * 40 + 3 * 200 + 2 * 24


def lines(*instructions: str) -> Code:
    return Code.read("\n".join(f"/*{16 * n:04x}*/ {text} ;" for n, text in enumerate(instructions)))


READS, WAITS, BARRIER = "HGMMA R1, gdesc[UR4]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BAR.SYNC 0x0"


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        ((READS, WAITS, "STS [R1], R2"), {"STS"}),
        ((READS, WAITS, "MOV R1, R2", "LDGSTS.E [R1], desc[UR4][R2.64]"), {"LDGSTS"}),
        ((READS, WAITS, BARRIER, "STS [R1], R2"), set()),
        ((READS, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "STS [R1], R2"), set()),
    ],
)
def test_writes_behind_waits_are_seen(instructions: tuple[str, ...], found: set[str]) -> None:
    assert writes_after_waits(lines(*instructions), 8) == found
    assert writes_after_waits(lines(*instructions), 4) == set(), "a warp group waits for itself"


def test_writes_of_the_next_pass_are_seen() -> None:
    body = f"/*0000*/ STS [R1], R2 ;\n/*0010*/ {READS} ;\n/*0020*/ {WAITS} ;"
    assert writes_after_waits(Code.read(body), 8) == set()
    loop = f".L_x_0:\n{body}\n/*0030*/ @P0 BRA `(.L_x_0) ;"
    assert writes_after_waits(Code.read(loop), 8) == {"STS"}


def test_instructions_of_all_lanes_between_parting_and_meeting_are_seen() -> None:
    part, meet = ("BSSY B0, `(.L_x_0)", "@P0 BRA `(.L_x_1)"), "BSYNC B0"
    assert divergent_instructions(lines(*part, "LDSM.16.M88.4 R1, [R2]", meet)) == {"LDSM"}
    assert divergent_instructions(lines(part[0], "SHFL.BFLY R1, R2", part[1], meet)) == set()
    assert divergent_instructions(lines(*part, meet, "BAR.SYNC 0x0")) == set()
    assert divergent_instructions(lines("@P0 BRA `(.L_x_1)", "BAR.SYNC 0x0")) == set()


def test_an_address_made_of_the_stack_pointer_is_seen() -> None:
    low, high = "IADD3 R20, P1, R1, 0x40, RZ", "IADD3.X R30, R1.reuse, -0x7fffffe0, RZ, P1, !PT"
    assert stray_addresses(lines(low, high)) == [high]
    assert stray_addresses(lines("IADD3 R1, R1, -0x20, RZ", "IADD3.X R3, R12, R1X, RZ, P0")) == []
