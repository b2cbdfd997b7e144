"""A pytest plugin that records how long every test function takes, in tests/durations.json.

``python tests/support/durations.py`` prints the table of tests/README.md from there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "durations.json"
Record = dict[str, tuple[float, int]]
"""(seconds of all its cases, cases) by function, ``tests/part/test_file.py::test_name``."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Functions that were not run this time keep what they have."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    reports = [one for kind in terminalreporter.stats.values() for one in kind]
    RECORD.write_text(json.dumps({**known, **_record(reports)}, indent=0, sort_keys=True) + "\n")


def _record(reports: list[Any]) -> Record:
    """Set-up and teardown count as well."""
    seconds, cases = defaultdict(float), defaultdict(int)
    for report in reports:
        if hasattr(report, "duration"):
            name = report.nodeid.partition("[")[0]
            seconds[name] += report.duration
            cases[name] += report.when == "call"
    return {name: (round(seconds[name], 2), cases[name]) for name in seconds}


def totals(record: Record) -> Record:
    """By file, slowest first."""
    seconds, cases = defaultdict(float), defaultdict(int)
    for name, found in record.items():
        file = name.partition("::")[0]
        seconds[file] += found[0]
        cases[file] += found[1]
    return {file: (seconds[file], cases[file]) for file in sorted(seconds, key=seconds.get)[::-1]}


def main() -> None:
    print("| file | seconds | cases |\n| --- | --- | --- |")
    for file, (seconds, cases) in totals(json.loads(RECORD.read_text())).items():
        print(f"| `{file.removeprefix('tests/')}` | {seconds:.0f} | {cases} |")


if __name__ == "__main__":
    main()
