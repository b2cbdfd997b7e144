"""Long convolutions beside plain FFTs and softmax attention.

    python benchmarks/long_convolution.py

`LongConvolution` by the kernel that `Auto` takes, beside the FFT convolution of public Hyena code
in plain torch (a transform of twice the length; heads of several channels hold every product of a
key with a value, as multi-head Hyena does in MAD's code), and beside torch's SDPA of as many
channels in heads of 64. One sequence of 128 channels on one thread: milliseconds forward, and
forward with backward, theirs as multiples of ours, in turns, medians; for several lengths, filters
as long as the sequence. Then one decoded token at the end of a sequence: our
`step` on its cache; SDPA with keys and values appended to theirs; the FFT of all tokens once more,
which is how code without a cache has it. Last, the layer `hyena` for one token, with the filter
that is kept and with one that is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import evaluate
from fastweights.mixer import MixerState
from fastweights.mixers import make
from fastweights.recurrence import LongConvolution
from measuring import Act, begin, milliseconds, options

CHANNELS, SOFTMAX_WIDTH = 128, 64
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
WIDTHS = {1: LENGTHS[-1], 16: 4096}
"""Channels of a head, Hyena's own and those of multi-head Hyena in MAD, and up to which length:
every product of a key with a value is a convolution of its own."""


def public_convolution(q: Tensor, k: Tensor, v: Tensor, taps: Tensor) -> Tensor:
    """q_t (h * kᵀv)_t of ``[b t h ·]`` as public code has it: all products of channels, each by a
    transform of twice the length.
    """
    length = q.shape[1]
    q, k, v = (s.permute(0, 2, 3, 1) for s in (q, k, v))
    written = k[:, :, :, None] * v[:, :, None]
    spectrum = torch.fft.rfft(written, n=2 * length) / (2 * length)
    filters = torch.fft.rfft(taps, n=2 * length)[:, None, None]
    read = torch.fft.irfft(spectrum * filters, n=2 * length, norm="forward")[..., :length]
    return (q[:, :, :, None] * read).sum(2).permute(0, 3, 1, 2)


def convolution(q: Tensor, k: Tensor, v: Tensor, taps: Tensor) -> Tensor:
    return evaluate(LongConvolution(q, k, v, taps))[0]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in heads of 64, whatever the heads were."""
    q, k, v = (s.flatten(2).unflatten(2, (-1, SOFTMAX_WIDTH)).transpose(1, 2) for s in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def streams(length: int, width: int) -> tuple[Tensor, ...]:
    """q, k and v, and a filter that fades as Hyena's do."""
    heads = CHANNELS // width
    q, k, v = (torch.randn(1, length, heads, width) for _ in range(3))
    fading = torch.exp(-5 * torch.arange(length) / length)
    return q, k, v, torch.randn(heads, length) * fading / length**0.5


def learning(run: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Act:
    """Forward and backward."""
    leaves = [s.detach().requires_grad_() for s in given]
    return lambda: torch.autograd.grad(run(*leaves).sum(), leaves)


def sequences(rounds: int) -> Iterator[dict[str, object]]:
    for width, longest in WIDTHS.items():
        for length in (n for n in LENGTHS if n <= longest):
            given = streams(length, width)
            apart = convolution(*given) - public_convolution(*given)
            for learns in (False, True):
                of = learning if learns else (lambda run, given: lambda: run(*given))
                runs = {
                    "ours": of(convolution, given),
                    "plain FFT": of(public_convolution, given),
                    "SDPA": of(softmax, given[:3]),
                }
                row = {"tokens": length, "width": width, "backward": learns}
                yield {**row, **in_turns(runs, rounds), "apart": apart.abs().max().item()}


@torch.inference_mode()
def tokens(rounds: int) -> Iterator[dict[str, object]]:
    """One token, `length` - 1 of them behind it."""
    for length in LENGTHS:
        given = streams(length, 1)
        whole = LongConvolution(*given)
        last, cache = whole[-1:], evaluate(whole[:-1])[1]
        kept = [s[:, :-1].flatten(2).unflatten(2, (-1, SOFTMAX_WIDTH)) for s in given[:3]]
        k, v = (s.transpose(1, 2).contiguous() for s in kept[1:])
        new = [s[:, -1:].reshape(1, 1, -1, SOFTMAX_WIDTH).transpose(1, 2) for s in given[:3]]

        def attend(k: Tensor = k, v: Tensor = v, new: list[Tensor] = new) -> Tensor:
            seen = torch.cat([k, new[1]], 2), torch.cat([v, new[2]], 2)
            return F.scaled_dot_product_attention(new[0], *seen)

        runs: dict[str, Act] = {
            "ours": lambda last=last, cache=cache: evaluate(last, cache),
            "plain FFT": lambda given=given: public_convolution(*given),
            "SDPA": attend,
        }
        apart = evaluate(last, cache)[0] - public_convolution(*given)[:, -1:]
        row = {"tokens": length, **in_turns(runs, 2 * rounds)}
        yield {**row, "apart": apart.abs().max().item()}


@torch.inference_mode()
def layers(rounds: int) -> Iterator[dict[str, object]]:
    """One token of a layer, in a full cache."""
    for length in (1024, 4096):
        layer = make("hyena", CHANNELS, heads=CHANNELS, length=length).eval()
        x = torch.randn(1, length, CHANNELS)
        _, state = layer(x)
        token = x[:, :1]

        def anew(layer: Any = layer, token: Tensor = token, state: MixerState = state) -> None:
            layer.filter.D.neg_()
            layer(token, state)

        runs: dict[str, Act] = {
            "ours": lambda layer=layer, token=token, state=state: layer(token, state),
            "filter made anew": anew,
        }
        yield {"tokens": length, **in_turns(runs, 2 * rounds)}


def in_turns(runs: Mapping[str, Act], rounds: int) -> dict[str, float]:
    """Our milliseconds, and the others' as multiples of them."""
    found = milliseconds(runs, rounds)
    ratios = {n: round(ms / found["ours"], 2) for n, ms in found.items() if n != "ours"}
    return {"ours_ms": round(found["ours"], 3), **ratios}


def main() -> None:
    chosen = options(__doc__, "long_convolution", rounds=5).parse_args()
    report = begin("long_convolution", chosen)
    torch.manual_seed(0)
    for measure in (sequences, tokens, layers):
        if not report.has(name := measure.__name__):
            report.add(name, list(measure(chosen.rounds)))


if __name__ == "__main__":
    main()
