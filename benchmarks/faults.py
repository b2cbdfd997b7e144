"""Makes every fault happen to the command, and writes what came of it.

    python benchmarks/faults.py [--slow]

runs tests/faults, writes their table to benchmarks/results/faults.json, and draws a run that was
killed again and again beside an undisturbed one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt

from fastweights.render.plots import png
from fastweights.training.loop.files import atomic_file
from fastweights.training.loop.json_lines import read_rows

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "faults.json"
PICTURE = ROOT / "docs" / "assets" / "faults.png"
TRAINING = ("--steps", "60", "--layers", "1", "--width", "32", "--length", "64", "--batch", "8")
OFTEN = ("--log-every", "1", "--eval-every", "20", "--checkpoint-every", "5", "--sample", "0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="the slow faults, too")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="of the two runs")
    chosen = parser.parse_args()
    draw(chosen.folder)
    marks = ["-m", "slow or not slow"] if chosen.slow else []
    words = ["-m", "pytest", "tests/faults", "--faults", str(TABLE), *marks]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


def draw(folder: Path) -> None:
    """Train twice, once undisturbed and once killed at random moments, and draw both curves."""
    _train(folder / "undisturbed").wait()
    ends = _train_killed(folder / "killed")
    both = [_losses(folder / name) for name in ("undisturbed", "killed")]
    assert both[0] == both[1]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for losses, label, style in zip(both, ("undisturbed", "killed"), ("-", "--"), strict=True):
        axes.plot(
            losses.keys(),
            losses.values(),
            style,
            linewidth=3 - 2 * (style == "--"),
            label=label,
            color="C0" if style == "-" else "black",
        )
    for step in ends:
        axes.axvline(step, color="C3", alpha=0.4, linewidth=1)
    axes.set(xlabel="step", ylabel="loss [nats/token]", title=f"{len(ends)} times kill -9 (red)")
    axes.legend()
    figure.tight_layout()
    with atomic_file(PICTURE) as new:
        new.write_bytes(png(figure))


def _train(out: Path) -> subprocess.Popen[bytes]:
    words = ["train", "--data", "shakespeare", "--device", "cpu", *TRAINING, *OFTEN]
    start = [sys.executable, "-m", "fastweights.cli", *words, "--out", str(out)]
    return subprocess.Popen(start, stdout=subprocess.DEVNULL)


def _train_killed(out: Path) -> list[int]:
    """The last step before each kill."""
    generator, ends = random.Random(0), list[int]()
    while not (out / "model").exists():
        process, before = _train(out), _last_step(out)
        aim = before + generator.randint(4, 14)
        while process.poll() is None and _last_step(out) < aim:
            time.sleep(0.01)
        if process.poll() is None:
            ends.append(_last_step(out))
            process.kill()
        if process.wait() > 0:
            raise RuntimeError(f"the training in {out} has failed")
    return ends


def _last_step(out: Path) -> int:
    return max(_losses(out), default=0)


def _losses(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(out / "metrics.jsonl")}


if __name__ == "__main__":
    sys.exit(main())
