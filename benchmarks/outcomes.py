"""Take the outcomes of claims over into benchmarks/results/reproduce: ``python
benchmarks/outcomes.py RUNS``.

RUNS is a folder in which ``fastweights reproduce CLAIM --out RUNS/CLAIM`` was run; `make pages`
then writes docs/reproduce.md from them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "reproduce"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path)
    take(parser.parse_args().runs)


def take(runs: Path) -> None:
    """outcome.json of every claim in `runs`, as CLAIM-SIZE.json."""
    for path in sorted(runs.glob("*/outcome.json")):
        save(json.loads(path.read_text(encoding="utf-8")))


def save(outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a claim where the pages find it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{outcome['claim']}-{outcome['size']}.json").write_text(
        json.dumps(outcome, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
