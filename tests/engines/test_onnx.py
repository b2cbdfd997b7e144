"""Our models in ONNX Runtime, against our own decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
WITH_NODES = ["gla", "gated_deltanet", "kda", "metala", "rwkv6", "lru", "mamba3"]
WITH_LOOPS = ["rwkv7", "s4"]


def rows(*arguments: str) -> list[dict]:
    """Of benchmarks/engines.py, in a process without the type checker of the tests."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "benchmarks/engines.py", "onnx", *arguments]
        out = ["--out", f"{folder}/rows.json"]
        done = subprocess.run([*command, *out], cwd=ROOT, check=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.onnx
@pytest.mark.parametrize("domain", ["com.microsoft", "ai.onnx"])
def test_nodes_agree(domain: str) -> None:
    found = rows(*WITH_NODES, "--domain", domain)
    assert [row["mixer"] for row in found] == WITH_NODES
    for row in found:
        assert row["error"] < 1e-4, row
        assert row["nodes"]["LinearAttention"] == 1, row
        assert row["nodes"]["Scan"] == 0, row


@pytest.mark.onnx
def test_loops_and_softmax_agree() -> None:
    for row in rows(*WITH_LOOPS, "softmax"):
        assert row["error"] < 1e-4, row
        assert row["nodes"]["Scan"] == (row["mixer"] != "softmax"), row
