"""The laws of `fastweights check`, tried on flash-linear-attention's families without a GPU.

    pip install flash-linear-attention==0.6.0
    TRITON_INTERPRET=1 python benchmarks/check_fla.py [--out FILE] [--only gla,kda]

Small models with random weights, their kernels run by Triton's interpreter, which is so slow that
examples have 5 tokens at most. A family that cannot be built or read so is listed with what was
raised. Writes JSON, family by family.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
import warnings
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import triton_interpreter
from fastweights.lab.bench.machine import Machine, commit, versions
from fastweights.lab.check import check_model
from fastweights.training.loop.files import write_json

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_heads": 2, "head_dim": 32}
UNFUSED = {"fuse_cross_entropy": False, "fuse_norm": False, "fuse_swiglu": False}
LONGEST, SECONDS = 5, 240


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check_fla.json"))
    parser.add_argument("--only", help="families, by ,")
    chosen = parser.parse_args()
    triton_interpreter.install()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with_ = versions() | {"flash-linear-attention": version("flash-linear-attention")}
    machine = asdict(Machine.here(torch.device("cpu")))
    header = {"commit": commit(), "machine": machine, "versions": with_, "longest": LONGEST}
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGALRM, _stop)
    for family in chosen.only.split(",") if chosen.only else _families():
        rows.append({"family": family, "kind": "fla"} | _check(family))
        write_json(chosen.out, {"header": header, "rows": rows})
        print(family, rows[-1].get("reason") or "checked", flush=True)


def _families() -> list[str]:
    import fla.models  # pyright: ignore[reportMissingImports]

    return sorted(found.name for found in iter_modules(fla.models.__path__) if found.ispkg)


def _check(family: str) -> dict[str, Any]:
    """What it does, or why nothing was asked."""
    signal.alarm(SECONDS)
    try:
        model = _build(family)
        kernels = [module for name, module in sys.modules.items() if name.startswith("fla.ops.")]
        triton_interpreter.number_as_tensors(kernels)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 8)[None], use_cache=False)
        return {"findings": [one.record() for one in check_model(model, longest=LONGEST)]}
    except _TooSlow:
        return {"reason": f"not checked within {SECONDS} seconds"}
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    finally:
        signal.alarm(0)


def _build(family: str) -> Any:
    module = import_module(f"fla.models.{family}")
    config, model = (
        next(getattr(module, name) for name in module.__all__ if name.endswith(end))
        for end in ("Config", "ForCausalLM")
    )
    taken = inspect.signature(config.__init__).parameters
    torch.manual_seed(0)
    given = {name: value for name, value in (SIZES | HEADS | UNFUSED).items() if name in taken}
    return model(config(**given)).eval()


class _TooSlow(BaseException):
    """Not one of those that a law takes for the model's own."""


def _stop(*_: Any) -> None:
    raise _TooSlow


if __name__ == "__main__":
    main()
