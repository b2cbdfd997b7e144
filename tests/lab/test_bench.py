"""The benchmarks run on tiny shapes, leave whole files, and survive missing peers and being
killed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from fastweights.cli import main
from fastweights.lab.bench import ops
from fastweights.lab.bench.cases import CASES, RecurrenceCase
from fastweights.lab.bench.contenders import Implementation, Phase, Sizes
from fastweights.lab.bench.decode import plot_flatness
from fastweights.lab.bench.machine import Ceilings, Machine, commit, versions
from fastweights.lab.bench.memory import MemoryTask, peak_bytes
from fastweights.lab.bench.ops import OpsPlan, measure, relative
from fastweights.lab.bench.report import FORMAT, Header, Report
from fastweights.lab.bench.timing import Budget, Failure, Times, WallClock, time_in_turn
from fastweights.lab.bench.training import TrainPlan, equal_config
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train import Bytes
from fastweights.training.loop.checkpoint import save_model

pytestmark = pytest.mark.long
with_known_ceilings = pytest.mark.usefixtures("known_ceilings")

CPU = torch.device("cpu")
HEADER = Header("test", None, {}, {}, {})
CEILINGS = {"fp32": 1e9, "fp32_onednn": None, "tf32": None, "bf16": 1e9, "bandwidth": 1e9}
HURRY = Budget(0.001, 2)
TINY = Sizes(1, 64, 2, 4, 4)


@dataclass(frozen=True)
class Note:
    text: str


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine reaches is measured once, where that is what is tested."""
    monkeypatch.setattr(Ceilings, "measure_now", lambda device, *, quick: Ceilings(**CEILINGS))


def report(path: Path, header: Header = HEADER) -> Report:
    return Report.open(path, header, lambda: CEILINGS)


def named(name: str) -> RecurrenceCase:
    return next(case for case in CASES if case.name == name and isinstance(case, RecurrenceCase))


def run(*arguments: object) -> None:
    assert main(["bench", *map(str, arguments)]) == 0


def rows(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def test_times_are_quantiles_of_alternating_calls():
    calls: list[str] = []
    found = time_in_turn(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, _Slow(), Budget(10, 3)
    )
    assert calls == ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert found["a"] == Times(0.2, 0.2, 0.2, 3)
    times = Times.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert times.low <= 2.0 <= times.median == 3.0 <= times.high
    assert Times.of([5.0]).spread == 0


class _Slow(WallClock):
    """Every call takes 0.2 s."""

    def sample(self, function, calls):
        function()
        return 0.2


def test_a_failure_is_a_result():
    def broken() -> None:
        raise MemoryError("too large\nby far")

    found = time_in_turn({"it": broken, "other": lambda: None}, WallClock(), HURRY)
    assert found["it"] == Failure("MemoryError: too large")
    assert isinstance(found["other"], Times)


def test_a_report_goes_on_where_it_was_killed(tmp_path):
    path = tmp_path / "new" / "r.json"
    script = (
        "import os, sys; from dataclasses import make_dataclass; from pathlib import Path\nfrom"
        " fastweights.lab.bench.report import Header, Report\nNote = make_dataclass('Note',"
        " ['text'])\nr = Report.open(Path(sys.argv[1]), Header('test', None, {}, {}, {}),"
        f" lambda: {CEILINGS})\nr.add('one', [Note('kept')])\nPath.replace = lambda *_:"
        " os._exit(9)\nr.add('two', [Note('lost')])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", script, str(path)], env=environment, timeout=60)
    assert killed.returncode == 9
    assert [row["group"] for row in rows(path)] == ["one"]
    again = report(path)
    assert again.has("one")
    assert not again.has("two")
    again.add("two", [Note("kept")])
    assert rows(path) == [{"group": g, "type": "Note", "text": "kept"} for g in ("one", "two")]


def test_a_report_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "r.json"
    report(path).add("one", [Note("kept")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="choose another --out"):
        report(path, replace(HEADER, commit="another"))
    path.write_text("[")
    with pytest.raises(ValueError, match="choose another --out"):
        report(path)
    path.write_bytes(before)
    assert report(path).rows


def test_the_header_names_commit_machine_and_versions():
    machine = asdict(Machine.here(CPU))
    assert machine["cores"] >= 1
    assert machine["threads"] == torch.get_num_threads()
    assert {"python", "torch", "transformers"} <= versions().keys()
    found = commit()
    assert found is None or len(found.rstrip("+")) == 40
    precision = torch.backends.mkldnn.matmul.fp32_precision
    ceilings = Ceilings.measure_now(CPU, quick=True)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision
    assert min(ceilings.fp32, ceilings.bf16, ceilings.bandwidth) > 0
    assert ceilings.gemm(torch.float32) >= ceilings.fp32


@with_known_ceilings
def test_ops_rows_have_all_figures(tmp_path):
    path = tmp_path / "ops.json"
    run("ops", "--quick", "--no-memory", "--only", "decay scalar", "--out", path)
    content = json.loads(path.read_text())
    assert content["format"] == FORMAT
    assert content["header"]["target"] == "ops"
    assert {row["phase"] for row in content["rows"]} == {"forward", "forward+backward"}
    for row in content["rows"]:
        names = {field.name for field in fields(ops.OpRow)}
        assert row.keys() == {"group", "type", *names}
        if row["seconds"] is None:
            assert "Error" in row["note"] or NO_DEVICE in row["note"]
        else:
            assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    first = content["rows"][0]
    assert first["auto"]
    assert first["ratio"] == 1
    assert first["gemm"] > 0
    assert first["bandwidth"] > 0
    assert max(first["error"], first["gradient_error"]) < 1e-4
    mamba = next(row for row in content["rows"] if row["contender"] == "Mamba-2 chunk scan")
    assert max(mamba["error"], mamba["gradient_error"]) < 1e-4
    before = path.read_bytes()
    run("ops", "--quick", "--no-memory", "--only", "decay scalar", "--out", path)
    assert path.read_bytes() == before


NO_DEVICE = "Triton is not supported on current platform"
"""What fla says where it is installed and has no GPU."""


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_agrees_with_its_exact_peers(tmp_path, case):
    sizes = Sizes(1, 20, 6, 3 if case.name == "selective scan" else 1, 1) if case.channels else TINY
    filled = report(tmp_path / "r.json")
    measure(filled, OpsPlan(budget=HURRY, memory_limit=0), case, sizes, CPU)
    assert filled.rows[0]["library"] == "fastweights"
    for row in filled.rows:
        ours = row["library"] == "fastweights"
        forward_only = ours and ("computes no gradients" in row["note"] or not row["seconds"])
        missing = ("no kernel takes this record",) if forward_only else ("No module", NO_DEVICE)
        assert row["seconds"] or any(why in row["note"] for why in missing), row
        errors = [e for e in (row["error"], row["gradient_error"]) if e is not None]
        assert all(error < 1e-4 for error in errors), row
        assert not ours or len(errors) == (1 if forward_only else 2), row


def test_a_missing_or_broken_peer_is_a_row(tmp_path):
    def missing():
        raise ImportError("no module named nobody")

    def broken(_):
        raise RuntimeError("not on Tuesdays")

    peers = (
        Implementation("missing", "nobody", missing),
        Implementation("broken", "nobody", lambda: broken),
    )
    shape = (Implementation("misshapen", "nobody", lambda: lambda x: x["v"][:, :1]),)
    filled = report(tmp_path / "r.json")
    case = replace(named("decay none"), peers=peers + shape)
    measure(filled, OpsPlan(budget=HURRY, memory_limit=0), case, TINY, CPU)
    notes = {row["contender"]: row["note"] for row in filled.rows if row["library"] == "nobody"}
    assert notes["missing"] == "ImportError: no module named nobody"
    assert notes["broken"] == "RuntimeError: not on Tuesdays"
    assert notes["misshapen"].startswith("error unknown")


def test_memory_grows_with_the_sequence():
    task = MemoryTask(
        "decay none",
        "blocked decay (torch)",
        Sizes(1, 1 << 14, 4, 32, 32),
        torch.float32,
        Phase.BOTH,
        1,
    )
    stream = 4 * (1 << 14) * 4 * 32
    found = peak_bytes(task, 60)
    assert found is not None
    assert 3 * stream < found < 40 * stream
    assert peak_bytes(replace(task, contender="nobody"), 60) is None


@pytest.mark.slow
@with_known_ceilings
def test_scaling(tmp_path):
    path = tmp_path / "s.json"
    run("ops", "--quick", "--scaling", "--only", "decay tied", "--out", path)
    assert [row["type"] for row in rows(path)] == ["SlopeRow"] * 2
    assert all(math.isfinite(row["slope"]) for row in rows(path))
    assert ops._log_slope((1, 2, 4), (3.0, 12.0, 48.0)) == pytest.approx(2)


@with_known_ceilings
def test_decode(tmp_path):
    path = tmp_path / "d.json"
    run("decode", "--quick", "--only", "delta s*", "--out", path)
    step = {row["contender"]: row for row in rows(path) if row["op"] == "delta scalar"}
    assert step["gated delta step"]["seconds"]
    assert step["SDPA with a cache"]["ratio"] > 0
    assert step["fastweights"]["over_floor"] > 1


@with_known_ceilings
def test_decode_steps_of_peers_run(tmp_path):
    path = tmp_path / "d.json"
    for name in ("decay scalar", "selective scan", "delta vector"):
        run("decode", "--quick", "--only", name, "--out", path)
    assert all(row["seconds"] for row in rows(path)), [
        row for row in rows(path) if not row["seconds"]
    ]


@pytest.mark.slow
def test_compiled_models_are_decoded(tmp_path):
    """In a process of its own: the compiler cannot trace the tests' type checker."""
    path = tmp_path / "d.json"
    asked = ["--quick", "--compile", "--only", "gla", "--out", str(path)]
    subprocess.run(
        [sys.executable, "-m", "fastweights.cli", "bench", "decode", *asked],
        check=True,
        timeout=600,
    )
    (row,) = (row for row in rows(path) if row["contender"] == "torch.compile")
    assert row["level"] == "model"
    assert row["seconds"], row["note"]


@pytest.mark.usefixtures("pictures", "known_ceilings")
def test_flatness_is_followed_and_drawn(tmp_path):
    path = tmp_path / "d.json"
    run("decode", "--quick", "--only", "metala", "--tokens", 12, "--out", path)
    found = {row["type"]: row for row in rows(path)}
    assert found["FlatnessRow"]["tokens"][-1] == 12
    assert len(set(found["FlatnessRow"]["state_bytes"])) == 1
    assert {row["level"] for row in rows(path) if row["type"] == "StepRow"} == {"mixer", "model"}
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_small_state_is_seen_beside_a_cache():
    """On an axis that begins at 0 its line would lie on the axis."""
    cache, state = [264_016, 10_560_016], [1_808, 1_808]
    kinds = {"tokens": [500, 20_000], "seconds": [1e-3, 1e-3]}
    rows = [{"mixer": n, "state_bytes": s, **kinds} for n, s in (("a", state), ("b", cache))]
    axes = plot_flatness(rows).axes[1]
    bottom, top = (axes.transAxes.inverted().transform((0, y))[1] for y in ends(axes))
    assert 0.05 < bottom < top < 0.95


def ends(axes):
    """The lowest and the highest point of its lines, as drawn."""
    points = [axes.transData.transform(line.get_xydata())[:, 1] for line in axes.lines]
    return min(p.min() for p in points), max(p.max() for p in points)


@with_known_ceilings
def test_train(tmp_path):
    path = tmp_path / "t.json"
    run("train", "--quick", "--eager", "--only", "gla", "--out", path)
    (row,) = rows(path)
    assert row["tokens_per_second"] > 0
    assert row["tokens"] == 128


@with_known_ceilings
def test_mesa_kernels(tmp_path):
    path = tmp_path / "mesa.json"
    run("mesa", "--quick", "--out", path)
    found = {row["contender"]: row for row in rows(path) if row["phase"] == "forward"}
    assert found["1 steps"]["steps"] == 1
    assert found["tol 1e-1"]["steps"] < found["tol 1e-5"]["steps"] <= found["30 steps"]["steps"]
    assert found["1 steps"]["error"] > found["5 steps"]["error"] > found["30 steps"]["error"]
    assert all(row["seconds"]["median"] > 0 for row in rows(path))


@pytest.mark.slow
def test_mesa_loss_by_position(tmp_path):
    folder, path = tmp_path / "model", tmp_path / "loss.json"
    config = FastWeightsConfig(
        vocab_size=256, hidden_size=16, num_hidden_layers=2, mixers=[{"name": "mesa"}]
    )
    save_model(FastWeightsForCausalLM(config), Bytes().build([]), folder)
    run("mesa", "--quick", "--checkpoint", folder, "--tokens", 200, "--length", 40, "--out", path)
    found = {row["contender"]: row for row in rows(path)}
    exact = found["30 steps"]
    assert exact["positions"] == [0, 16, 32, 39]
    assert len(exact["by_position"]) == 3
    assert len(exact["by_layer"]) == 2
    assert exact["over"] == 1
    assert abs(found["tol 1e-5"]["loss"] - exact["loss"]) < abs(
        found["1 steps"]["loss"] - exact["loss"]
    )


def test_models_to_train_have_equal_size():
    plan = TrainPlan.quick()
    with torch.device("meta"):
        models = [FastWeightsForCausalLM(equal_config(n, plan)) for n in plan.mixers()[::4]]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert max(sizes) < 1.05 * min(sizes)


def test_an_unknown_name_is_an_error(capsys, tmp_path):
    assert (
        main(["bench", "ops", "--quick", "--only", "quadratic", "--out", str(tmp_path / "o.json")])
        == 2
    )
    assert "no case matches 'quadratic'" in capsys.readouterr().err


def test_relative_error_of_zero():
    assert relative(torch.zeros(3), torch.zeros(3, dtype=torch.float64)) == 0
    assert relative(torch.ones(1), torch.zeros(1, dtype=torch.float64)) == 1
