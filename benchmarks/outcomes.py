"""Take the outcomes of claims over into benchmarks/results/reproduce: ``python
benchmarks/outcomes.py RUNS``.

RUNS is a folder in which ``fastweights reproduce CLAIM --out RUNS/CLAIM`` was run; `make pages`
then writes docs/reproduce.md from them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "reproduce"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path)
    take(parser.parse_args().runs)


def take(runs: Path) -> None:
    """outcome.json of every claim in `runs`, as CLAIM-SIZE.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in sorted(runs.glob("*/outcome.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        (RESULTS / f"{found['claim']}-{found['size']}.json").write_text(
            json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
