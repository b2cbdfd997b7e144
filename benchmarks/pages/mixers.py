"""docs/mixers.md: what each mixer can do, found by running it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode

from fastweights import MIXERS, kernels
from fastweights.importers import FAMILIES
from fastweights.kernels import table
from fastweights.layers import TokenContext
from fastweights.mixer import Mixer
from fastweights.mixers import make
from fastweights.recurrence import NoFiniteFormError, Recurrence, Signed
from fastweights.render import markdown
from pages.page import DOCS, Page

PROBE, TOKENS = 64, 48
"""Where a mixer is run."""
COLUMNS = (
    *("mixer", "record", "decay", "λ < 0", "CPU", "GPU"),
    "imported from",
)
SAME = {"delta_net": "deltanet", "mesa_net": "mesa"}
"""Model types "of the same names" as mixers, but for a stroke."""


def matrix() -> str:
    """A line per mixer."""
    return markdown.table(COLUMNS, [_line(name) for name in MIXERS])


def _line(name: str) -> tuple[str, ...]:
    record = _record(_probe(name), TOKENS)
    sources = ", ".join(f"`{kind}`" for kind in importable()[name])
    runs = (_runs(name, device) for device in ("cpu", "cuda"))
    found = (_composition(record), _decay(name), _negative(name, record))
    return (f"`{name}`", *found, *runs, sources)


def _probe(name: str) -> Mixer:
    """The mixer with random weights, of which none is at a start that hides what it does."""
    mixer, g = make(name, PROBE), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            start = parameter.mean() if parameter.dim() == 1 else 0
            parameter.copy_(start + 0.2 * torch.randn(parameter.shape, generator=g))
    return mixer


def _record(mixer: Mixer, tokens: int, seed: int = 0) -> Recurrence:
    """What the mixer makes of random tokens."""
    x = torch.randn(1, tokens, mixer.d, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return mixer.project(x, TokenContext.start(x))[0]


def _composition(record: Recurrence) -> str:
    """The rules around each other, the outermost first."""
    inner = getattr(record, "inner", None)
    name = f"`{type(record).__name__}`"
    return f"{name} of {_composition(inner)}" if isinstance(inner, Recurrence) else name


def _decay(name: str) -> str:
    """How often there is another decay, and what it is made of."""
    mixer = _probe(name)
    found = [_record(mixer, 1, seed).streams for seed in range(2)]
    first, second = (streams.get("log_decay") for streams in found)
    if first is None or second is None:
        return "–"
    # Mamba's is a product with the rate of a channel
    widest = max(s.shape[-1] for n, s in found[0].items() if n in ("log_decay", "rate"))
    kind = "complex " if first.is_complex() else ""
    made = "fixed " if torch.equal(first, second) else ""
    return f"{kind}{made}per {'head' if widest == 1 else 'channel'}"


def _negative(name: str, record: Recurrence) -> str:
    """Whether the state of a mixer with random weights has eigenvalues below 0."""
    try:
        values = record.ltv().eigenvalues()
    except NoFiniteFormError:
        return "–"
    if values.is_complex() and bool((values.imag.abs() > 1e-3).any()):
        return "complex"
    if isinstance(record, Signed) or bool((values.real < -1e-6).any()):
        return "yes"
    return "option" if "negative" in inspect.signature(MIXERS[name]).parameters else "no"


def _runs(name: str, device: str) -> str:
    """What evaluates float32 records on this device: many tokens with gradients, and one."""
    many, one = (_languages(name, device, tokens) for tokens in (70, 1))
    return many if many == one else f"{many}; one token {one}"


LANGUAGES = {"compiled": "C", "Triton": "Triton", "torch": "torch"}


def _languages(name: str, device: str, tokens: int) -> str:
    found = {re.findall(r"\((\w+)\)", kernel)[-1] for kernel in kernels_of(name, device, tokens)}
    return " and ".join(LANGUAGES[language] for language in LANGUAGES if language in found)


def kernels_of(name: str, device: str, tokens: int) -> list[str]:
    """The kernels that evaluate a mixer's record, those of records made of others left out."""
    found, first = dict[str, None](), table._first

    def note(record: object, wanted: str | None) -> kernels.Kernel:
        kernel = first(record, wanted)
        if isinstance(record, Recurrence) and ":" not in kernel.name:
            found[kernel.name] = None
        return kernel

    with patch.object(table, "_first", note), kernels.rehearse(device), FakeTensorMode():
        mixer = make(name, PROBE)
        with torch.set_grad_enabled(tokens > 1):
            mixer(torch.randn(1, tokens, PROBE))
    return list(found)


def importable() -> dict[str, list[str]]:
    """The model types that become models of each mixer, as docs/importing.md says.

    Raises:
        ValueError: if it leaves one out
    """
    found: dict[str, list[str]] = {name: [] for name in MIXERS}
    for kind, mixer in _imported():
        found[mixer].append(kind)
    told = {kind for kinds in found.values() for kind in kinds}
    if told != FAMILIES.keys():
        lacking = ", ".join(sorted(told ^ FAMILIES.keys()))
        raise ValueError(f"the table of docs/importing.md and FAMILIES differ in {lacking}")
    return found


def _imported() -> Iterator[tuple[str, str]]:
    """(model type, mixer) of every row of the page's first table."""
    page = (DOCS / "importing.md").read_text(encoding="utf-8")
    for kinds, mixers in re.findall(r"^\| (`[^|]*`) \| [^|]* \| ([^|]*) \|", page, re.MULTILINE):
        for kind in re.findall(r"`(\w+)`", kinds):
            same, named = SAME.get(kind, kind), re.findall(r"`(\w+)`", mixers)
            yield from ((kind, mixer) for mixer in ([same] if "same names" in mixers else named))


PAGE = Page("mixers", (matrix,))
