"""The laws of `fastweights check`, tried on other libraries' families of models and on ours.

    python benchmarks/check_families.py [--only mamba2,metala]
    TRITON_INTERPRET=1 python benchmarks/check_families.py --fla    # flash-linear-attention==0.6.0

Small models with random weights: transformers' as they are and, where `patch_transformers` has
functions for them, patched; and one of every mixer of ours. With --fla those of
flash-linear-attention, without a GPU: Triton's interpreter runs their kernels, so slowly that
examples have 5 tokens at most; a family that cannot be built or read so is listed with what was
raised.
"""

from __future__ import annotations

import inspect
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fastweights.engines.transformers import patch_transformers
from fastweights.lab.check import check_model
from fastweights.mixers import MIXERS
from measuring import RESULTS, begin, options
from tiny import tiny
from transformers_families import build_family, present_families

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_heads": 2, "head_dim": 32}
UNFUSED = {"fuse_cross_entropy": False, "fuse_norm": False, "fuse_swiglu": False}
LONGEST, SECONDS = 5, 240
Row = dict[str, Any]


def main() -> None:
    parser = options(__doc__, "check")
    parser.add_argument("--only", help="families and mixers, by ,")
    parser.add_argument("--fla", action="store_true", help="flash-linear-attention's families")
    parser.set_defaults(out=None)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    name = "check_fla" if chosen.fla else "check"
    chosen.out = chosen.out or RESULTS / f"{name}.json"
    report = begin(name, chosen, **({"longest": LONGEST} if chosen.fla else {}))
    for (family, kind), check in (_fla_families() if chosen.fla else _families()).items():
        wanted = not chosen.only or family in chosen.only.split(",")
        if wanted and not report.has(group := f"{kind} {family}"):
            report.add(group, [{"family": family, "kind": kind, **one} for one in check()])


Checks = dict[tuple[str, str], Callable[[], Iterator[Row]]]


def _families() -> Checks:
    """By name and kind, what checks them: nothing where a patch changes nothing."""
    kinds = {"transformers": _as_it_is, "patched": _patched}
    found: Checks = {
        (family, kind): partial(check, family)
        for family in present_families()
        for kind, check in kinds.items()
    }
    return found | {(name, "ours"): partial(_ours, name) for name in MIXERS}


def _as_it_is(family: str) -> Iterator[Row]:
    yield _findings(build_family(family))


def _patched(family: str) -> Iterator[Row]:
    model = build_family(family)
    with patch_transformers(model) as patch:
        if patch.replaced:
            yield _findings(model)


def _ours(name: str) -> Iterator[Row]:
    yield _findings(tiny(name, torch.float32))


def _findings(model: Any, **settings: int) -> Row:
    return {"findings": [finding.record() for finding in check_model(model, **settings)]}


def _fla_families() -> Checks:
    import triton_interpreter

    triton_interpreter.install()
    import fla.models

    signal.signal(signal.SIGALRM, _stop)
    names = sorted(found.name for found in iter_modules(fla.models.__path__) if found.ispkg)
    return {(name, "fla"): partial(_check_fla, name) for name in names}


def _check_fla(family: str) -> Iterator[Row]:
    """What it does, or why nothing was asked."""
    signal.alarm(SECONDS)
    try:
        yield _interpreted(family)
    except _TooSlow:
        yield {"reason": f"not checked within {SECONDS} seconds"}
    except Exception as error:
        yield {"reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    finally:
        signal.alarm(0)


def _interpreted(family: str) -> Row:
    import triton_interpreter

    module = import_module(f"fla.models.{family}")
    config, model = (
        next(getattr(module, name) for name in module.__all__ if name.endswith(end))
        for end in ("Config", "ForCausalLM")
    )
    taken = inspect.signature(config.__init__).parameters
    torch.manual_seed(0)
    given = {name: value for name, value in (SIZES | HEADS | UNFUSED).items() if name in taken}
    built = model(config(**given)).eval()
    kernels = [found for name, found in sys.modules.items() if name.startswith("fla.ops.")]
    triton_interpreter.number_as_tensors(kernels)
    with torch.no_grad():
        built(input_ids=torch.arange(3, 8)[None], use_cache=False)
    return _findings(built, longest=LONGEST)


class _TooSlow(BaseException):
    """Not one of those that a law takes for the model's own."""


def _stop(*_: Any) -> None:
    raise _TooSlow


if __name__ == "__main__":
    main()
