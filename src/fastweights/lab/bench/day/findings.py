"""What a stage has found so far, over all calls of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fastweights.lab.bench.day.rows import EndRow, Row, fault, latest
from fastweights.lab.bench.machine import Ceilings
from fastweights.lab.bench.report import Report

NOMINAL = Ceilings(fp32=6e13, fp32_onednn=None, tf32=None, bf16=8e14, bandwidth=3e12)
"""An H100's, where they could not be measured."""


@dataclass
class Findings:
    """The rows of a report, and which groups are done.

    Attributes:
        without: the families that are left out
        expected: the groups that a stage consists of, as far as they are known
    """

    report: Report
    without: frozenset[str] = frozenset()
    expected: dict[str, None] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows that count: of a group that was tried again, the later ones."""
        return latest(self.report.rows)

    def post(self, group: str, row: object) -> None:
        self.report.add(group, [row])

    def expect(self, groups: Iterable[str]) -> None:
        self.expected.update(dict.fromkeys(groups))

    def ends(self) -> dict[str, Row]:
        """How each group that was begun has ended."""
        return {row["group"]: row for row in self.rows if row["type"] == EndRow.__name__}

    def faults(self) -> dict[str, str]:
        """The first fault of every group that has one."""
        found: dict[str, str] = {}
        for row in self.rows:
            if reason := fault(row):
                found.setdefault(row["group"], reason)
        return found

    def done(self) -> frozenset[str]:
        """The groups that have ended without a fault."""
        return frozenset(self.ends().keys() - self.faults().keys())

    def failed(self) -> frozenset[str]:
        """The groups that have ended with a fault."""
        return frozenset(self.ends().keys() & self.faults().keys())

    def left(self) -> list[str]:
        """The groups that have not ended, nor been left out."""
        ends = self.ends()
        return [group for group in self.expected if group not in ends]

    def passed_tests(self) -> list[str]:
        return [
            row["test"]
            for row in self.rows
            if row["type"] == "OutcomeRow" and row["outcome"] != "failed"
        ]

    def missing(self) -> list[str]:
        """What the machine does not have."""
        return [r for r in self.rows if r["type"] == "MachineRow"][-1]["missing"]

    def ceilings(self) -> Ceilings:
        """Those that were measured."""
        found = [row for row in self.rows if row["type"] == Ceilings.__name__]
        names = Ceilings.__dataclass_fields__
        return Ceilings(**{name: found[-1][name] for name in names}) if found else NOMINAL
