"""How much of what a window alone leaves open a conversion closes, with its uncertainty.

Published hybrids of a window with linear attention were found to bypass the linear side: taking it
away changes nothing (Benfeghoul et al., 2025, arXiv 2510.05901). The share says how much of a
conversion the linear side carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastweights.linearize.evaluate.comparison import LINEAR, SOFTMAX, WINDOW_ONLY, ModeComparison
from fastweights.training.language.perplexity import octaves

RESAMPLES = 2000
"""Of the bootstrap."""
CONFIDENCE = 95
"""Percent of the resamples that lie in the interval."""
STANDARD_ERRORS = 2
"""What the window loses is divided by if it is more than so many standard errors."""
ROUNDING = 1e-5
"""Nats per token; what the window loses is not divided by below, of however many tokens: losses are
float32."""


@dataclass(frozen=True)
class Share:
    """(window only - converted) / (window only - softmax), in nats per token.

    It is 0 where the linear side does nothing, and 1 where the model is as good as its softmax.

    Attributes:
        value: The share; None where it is undefined.
        interval: Its 95 % interval, by a bootstrap over sequences; an end that is None has no
            bound. None where the share is undefined, or there is one sequence alone.
        window_loses: What the window alone loses to softmax, in nats per token; None without a
            window.
        standard_error: Of `window_loses`, over sequences (tokens, if there is one sequence).
        undefined: Why there is no share; None where there is.
    """

    value: float | None = None
    interval: tuple[float | None, float | None] | None = None
    window_loses: float | None = None
    standard_error: float | None = None
    undefined: str | None = None

    def row(self) -> dict[str, object]:
        """Return the numbers for a JSON file."""
        interval = None if self.interval is None else list(self.interval)
        return {
            "share": self.value,
            "interval": interval,
            "window_loses": self.window_loses,
            "standard_error": self.standard_error,
            "undefined": self.undefined,
        }


NO_WINDOW = Share(undefined="the linear attention has no window beside it")


def share_of(found: Mapping[str, ModeComparison], beside: str = WINDOW_ONLY) -> Share:
    """Compute the share of a conversion.

    Args:
        found: The comparisons by mode, as `compare_with_softmax` returns them for `ablations`;
            those on more sequences than `beside` count on the same ones.
        beside: The mode whose loss is closed, in the place of the window only.
    """
    return _share_between(found, 0, None, beside)


def share_by_octave(found: Mapping[str, ModeComparison]) -> dict[tuple[int, int], Share]:
    """Compute the share by position.

    Args:
        found: As in `share_of`.

    Returns:
        The share of the tokens before which m to n tokens were read, by (m, n): one octave each.
    """
    edges = octaves(found[SOFTMAX].losses.shape[1], parts=1).tolist()
    return {
        (first, after - 1): _share_between(found, first - 1, after - 1)
        for first, after in pairwise(edges)
    }


def _share_between(
    found: Mapping[str, ModeComparison], first: int, after: int | None, beside: str = WINDOW_ONLY
) -> Share:
    if beside not in found:
        return NO_WINDOW
    count = len(found[beside].losses)
    softmax, linear, window = (
        found[name].losses[:count, first:after] for name in (SOFTMAX, LINEAR, beside)
    )
    name = "the window alone" if beside == WINDOW_ONLY else f"a {beside}"
    return _divide(window - linear, window - softmax, name)


def _divide(closed: np.ndarray, lost: np.ndarray, name: str) -> Share:
    """The share of what `closed` and `lost` ``[n t]`` are by token, of what `name` loses."""
    loses, error = float(lost.mean()), _standard_error(lost)
    enough = max(STANDARD_ERRORS * error, ROUNDING)
    if not loses > enough:
        why = (
            f"{name} loses {loses:.2g} nats per token to softmax, over {lost.shape[0]:,}"
            f" sequences of {lost.shape[1]:,} tokens with a standard error of {error:.2g}; a share"
            f" takes more than {enough:.2g}"
        )
        return Share(None, None, loses, error, why)
    value = float(closed.mean()) / loses
    return Share(value, _interval(closed.mean(1), lost.mean(1)), loses, error)


def _standard_error(values: np.ndarray) -> float:
    """Of the mean of ``[n t]``, over sequences, which are independent where their tokens are
    not."""
    units = values.mean(1) if len(values) > 1 else values[0]
    return float(units.std(ddof=1) / np.sqrt(len(units))) if len(units) > 1 else 0.0


def _interval(closed: np.ndarray, lost: np.ndarray) -> tuple[float | None, float | None] | None:
    """The bootstrap's, of the sequences' means ``[n]``."""
    if len(lost) < 2:
        return None
    count = len(lost)
    # how often each sequence is drawn: sums over a resample are one product
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    above, below = times @ closed, times @ lost
    shares = np.full(RESAMPLES, np.inf)
    np.divide(above, below, out=shares, where=below > 0)
    # where the window loses nothing, the share has no bound on the side of what is closed
    shares = np.where(below > 0, shares, np.copysign(np.inf, above))
    tail = (100 - CONFIDENCE) / 2
    # one of the values themselves: between infinities there is no number
    low, high = np.percentile(shares, [tail, 100 - tail], method="nearest")
    return _finite(low), _finite(high)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
