"""Errors against float64 over long sequences, for every mixer, whatever its decays; prints a table,
writes JSON.

    python benchmarks/numerics.py [--tokens 100000] [--d 16] [--only rwkv4] --out numerics.json

A mixer projects noise. The record it drives keeps its own decays, or gets others (1e-6 to 1e4 nats
per token, the same everywhere or mixed), is evaluated in float32 and with bfloat16 streams, and
compared with float64 on the same numbers: streams are rounded to bfloat16 beforehand, decays and
gains are float32 in all three. `layer` is the whole mixer with its own decays, float32 and bfloat16
weights and input, likewise compared. Errors are ‖o - o64‖ / ‖o64‖.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastweights import MIXERS, kernels
from fastweights.layers import TokenContext
from fastweights.methods import Auto, Chunkwise, Method, evaluate
from fastweights.mixer import Mixer
from fastweights.recurrence import Amplified, Normalized, Recurrence, Softmax

EXACT = {"log_decay", "log_gain", "ridge", "floor"}
LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{level:g}": lambda x, level=level: torch.full_like(x, level)
        for level in (1e-6, 1e-3, 1.0, 1e4)
    },
    "mixed": lambda x: 10 ** (10 * torch.rand_like(x) - 6),
}
QUADRATIC = 4096
"""Tokens for softmax over all of them, at most."""


def mapped(record: Recurrence, f: Callable[[str, Tensor], Tensor]) -> Recurrence:
    """The record with every stream replaced."""
    outer = {}
    if isinstance(record, Amplified | Normalized):
        outer = {"inner": mapped(record.inner, f)}
    own = {
        name: f(name, s) for name, s in record.streams.items() if getattr(record, name, None) is s
    }
    return replace(record, **outer, **own)


def rounded(name: str, stream: Tensor) -> Tensor:
    return stream if name in EXACT or stream.is_complex() else stream.bfloat16().float()


def narrow(name: str, stream: Tensor) -> Tensor:
    return stream if name in EXACT or stream.is_complex() else stream.bfloat16()


def wide(_name: str, stream: Tensor) -> Tensor:
    return stream.to(torch.complex128 if stream.is_complex() else torch.float64)


def decaying(level: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Replaces decays; angles of complex ones stay."""

    def change(name: str, stream: Tensor) -> Tensor:
        if name != "log_decay":
            return stream
        return (
            torch.complex(-level(stream.real), stream.imag)
            if stream.is_complex()
            else -level(stream)
        )

    return change


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()


def output(record: Recurrence, method: Method = Auto()) -> Tensor:
    return evaluate(record, None, method)[0]


def record_row(record: Recurrence, decay: str) -> dict[str, object]:
    record = mapped(record, rounded)
    wanted = output(mapped(record, wide), Chunkwise(64))
    low = mapped(record, narrow)
    errors = {"float32": error(output(record), wanted), "bfloat16": error(output(low), wanted)}
    return {"decay": decay, "tokens": len(record), "kernel": kernels.select(record).name, **errors}


def layer_row(mixer: Mixer, x: Tensor) -> dict[str, object]:
    def compared(dtype: torch.dtype) -> float:
        found = mixer.to(dtype)(x.to(dtype))[0]
        return error(found, mixer.double()(x.to(dtype).double(), method=Chunkwise(64))[0])

    errors = {"float32": compared(torch.float32), "bfloat16": compared(torch.bfloat16)}
    return {"decay": "layer", "tokens": x.shape[1], "kernel": "", **errors}


@torch.no_grad()
def rows(name: str, d: int, tokens: int) -> list[dict[str, object]]:
    mixer = MIXERS[name](d=d)
    x = torch.randn(1, tokens, d).bfloat16().float()
    record, _ = mixer.project(x, TokenContext.start(x))
    if isinstance(record, Softmax) and record.window is None:
        x, record = x[:, :QUADRATIC], record[:QUADRATIC]
    found = [record_row(record, "own")]
    if "log_decay" in record.streams:
        found += [
            record_row(mapped(record, decaying(level)), decay) for decay, level in LEVELS.items()
        ]
    return [{"mixer": name, **row} for row in [*found, layer_row(mixer, x)]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--d", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=sorted(MIXERS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = {
        "torch": torch.__version__,
        "machine": platform.platform(),
        "tokens": options.tokens,
        "d": options.d,
    }
    found: list[dict[str, object]] = []
    print(f"{'mixer':<16}{'decay':<8}{'float32':>10}{'bfloat16':>10}  kernel")
    for name in options.only:
        torch.manual_seed(0)
        for row in rows(name, options.d, options.tokens):
            found.append(row)
            print(
                "{mixer:<16}{decay:<8}{float32:10.1e}{bfloat16:10.1e}  {kernel}".format(**row),
                flush=True,
            )
        options.out.write_text(json.dumps({**about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
