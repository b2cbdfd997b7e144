"""The papers' tables, from the code: docstrings' rows, computed dimensions, groups, conditions and
costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from inspect import cleandoc
from typing import NamedTuple

import torch

from fastweights.analysis import notes
from fastweights.analysis.conditions import Conditions, Groups, conditions, groups
from fastweights.analysis.cost import cost
from fastweights.layers import TokenContext
from fastweights.mixer import Mixer
from fastweights.mixers import MIXERS, make
from fastweights.recurrence import ConjugateGradient, Decay, Delta, Mesa, Recurrence, Softmax
from fastweights.render import markdown

DIMENSIONS = "dimensions"
SYMBOL = re.compile(r"f_\w+|o_t|[^\W\d](\(\w\))?")
DIMENSION = re.compile(r"d_\w( ?[=/]|,)")


def row(mixer: type[Mixer]) -> dict[str, str]:
    """Read a mixer's table row from its docstring: ``{"f_q": "x W_Q", …, "dimensions": "d_k = d/2,
    d_v = d"}``.

    In its first paragraph, two spaces or more separate ``f_q  x W_Q`` from ``f_α  …`` on the same
    line, and what begins with ``d_k =`` or the like states dimensions, to the end.

    Raises:
        ValueError: If the docstring does not begin with such a row.
    """
    found: dict[str, str] = {}
    key, named = "", False
    for token in _tokens(mixer):
        if not named and SYMBOL.fullmatch(token):
            key, named = token, True
        elif not named and DIMENSION.match(token) and key != DIMENSIONS:
            key, found[DIMENSIONS] = DIMENSIONS, token
        else:
            found[key], named = f"{found[key]} {token}" if key in found else token, False
    if not {"f_q", "f_k", "f_v", DIMENSIONS} <= found.keys():
        raise ValueError(
            f"the docstring of {mixer.__name__} does not begin with a table row (f_q, f_k, f_v,"
            " d_k, d_v)"
        )
    return found


def _tokens(mixer: type[Mixer]) -> list[str]:
    paragraph = cleandoc(mixer.__doc__ or "").split("\n\n")[0]
    return [token for line in paragraph.splitlines() for token in re.split(r"\s{2,}", line.strip())]


PROBE = 16
"""The model width at which groups and conditions are found; they do not depend on it."""


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
        title: Title of the table.
        columns: Names of the columns.
        rows: Cells as text.
        notes: Where a paper and its code, or a paper and this library, disagree.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        body = markdown.table(self.columns, self.rows)
        return "\n\n".join(filter(None, (f"## {self.title}", body, notes)))

    def records(self) -> dict[str, object]:
        """Return the table as JSON values."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


def page(tables: Iterable[Table]) -> str:
    """Return the tables as a page in Markdown."""
    head = (
        "# The papers' tables, from the code\n\n`make pages` writes this page; nothing on it is"
        " typed by hand."
    )
    return "\n\n".join([head, *(table.markdown() for table in tables)])


def functions(title: str, names: tuple[str, ...]) -> Table:
    """Return the parameter functions and dimensions of mixers, as their docstrings state them
    (MetaLA's Tables 1, A1-A3)."""
    columns = ("f_q", "f_k", "f_v", "f_α", "f_g", DIMENSIONS)
    rows = [(name, *(_row_of(name).get(column, "1") for column in columns)) for name in names]
    return Table(title, ("model", *columns), rows, _notes_on(notes.FUNCTIONS, names))


def _row_of(name: str) -> dict[str, str]:
    """The mixer's row; MesaNet's γ is the others' α."""
    said = row(MIXERS[name])
    return {"f_α": said["f_γ"], **said} if "f_γ" in said else said


def review() -> Table:
    """Return MetaLA's Table 2 for every mixer: parameter groups, and the conditions that follow."""
    found = [(name, group_of(name), conditions_of(name)) for name in (*MIXERS, *VARIANTS)]
    found.sort(key=lambda entry: (-len(entry[1]), group_names(entry[1])))
    rows = [(name, group_names(letters), *map(check_mark, met)) for name, letters, met in found]
    title, columns = (
        "MetaLA, Table 2: parameter groups and conditions",
        ("model", "groups", "C0", "C1", "C2", "C3"),
    )
    return Table(
        title, columns, rows, _notes_on(notes.GROUPS, ("all", *(name for name, *_ in found)))
    )


VARIANTS: Mapping[str, tuple[str, dict[str, object]]] = {"glru": ("hgrn", {"tied": False})}
"""Models of Table 2 that are mixers with arguments."""


@cache
def group_of(name: str) -> Groups:
    """Return the parameter groups of a mixer by its name."""
    return groups(_make_probe(name))


@cache
def conditions_of(name: str) -> Conditions:
    """Return MetaLA's conditions for a mixer by its name."""
    return conditions(_make_probe(name))


def _make_probe(name: str) -> Mixer:
    mixer, arguments = VARIANTS.get(name, (name, {}))
    return make(mixer, PROBE, **arguments)


def group_names(letters: Groups) -> str:
    """Return the names of parameter groups, separated by commas."""
    return ", ".join(letter for letter in ("Q", "K", "Λ", "Λ_t") if letter in letters)


def check_mark(met: bool | None) -> str:
    """Return ✓ for True, ✗ for False and – for None."""
    return "–" if met is None else "✓" if met else "✗"


BASELINES: Mapping[str, tuple[str, dict[str, object]]] = {
    **{
        rule: ("mesanet", {"rule": rule})
        for rule in ("mamba2", "gla", "deltanet", "gated_deltanet", "mlstm")
    },
    "mesa": ("mesa", {}),
}
"""The layers of MesaNet's Table 3."""


def recurrences() -> Table:
    """Return MesaNet's Table 3: each layer's rule, as the rules' docstrings state it, and its
    gates."""
    columns = ("layer", "recurrence", "read-out", "decay γ_t (α_t)", "write gate β_t")
    return Table(
        "MesaNet, Table 3: recurrent layers",
        columns,
        list(map(_rule_row, BASELINES)),
        (notes.RULES,),
    )


def _rule_row(layer: str) -> tuple[str, ...]:
    name, arguments = BASELINES[layer]
    mixer, said = make(name, PROBE, **arguments), row(MIXERS[name])
    parameters = {parameter.split(".")[0] for parameter, _ in mixer.named_parameters()}
    gates = {"W_gamma": said["f_γ"], "W_beta": said["f_β"]}
    return (
        layer,
        *_equations(_record(mixer)),
        *(text if W in parameters else "1" for W, text in gates.items()),
    )


def _equations(record: Recurrence) -> tuple[str, str]:
    """(what is written, what is read), as the docstrings of a rule and of its normaliser say."""
    rule, reader = record.innermost, record.reader
    *written, read = _equation(rule).split(" ;  ")
    return " ;  ".join(written), read if reader is rule else _equation(reader)


def _equation(record: Recurrence) -> str:
    """The first paragraph of the rule's docstring that states an equation, on one line."""
    paragraphs = cleandoc(type(record).__doc__ or "").split("\n\n")
    stated = next((p for p in paragraphs if " = " in p), "")
    return " ".join(line.strip() for line in stated.splitlines())


def inference(width: int = 128, context: int = 2048, steps: int = 30) -> Table:
    """Return MesaNet's Table 4: state and operations per head and token.

    Args:
        width: n_a, channels of keys and of values.
        context: Tokens in the context.
        steps: Steps of the Mesa layer's solver.
    """

    def shown(number: int) -> tuple[str, str]:
        return f"{number:,}", f"{number / width**2:.2f} n_a²"

    heads = heads_of(width, steps).items()
    rows = [
        (name, *shown(record.state_size(context)), *shown(record.step_operations(context)))
        for name, record in heads
    ]
    columns = ("layer", "state", "state in n_a²", "operations per token", "operations in n_a²")
    title = (
        f"MesaNet, Table 4: inference per head, n_a = {width}, context t = {context}, k = {steps}"
        " steps"
    )
    return Table(title, columns, rows, (notes.INFERENCE,))


def heads_of(width: int, steps: int = 30) -> dict[str, Recurrence]:
    """Return one token of one head of each of Table 4's layers."""
    x, scalar = torch.zeros(1, 1, 1, width), torch.zeros(1, 1, 1, 1)
    return {
        "MHA": Softmax(x, x, x),
        "GLMHA": Decay(x, x, x, scalar),
        "(gated) DeltaNet": Delta(x, x, x, scalar, scalar),
        "Mesa": Mesa(x, x, x, scalar, scalar, x + 1, ConjugateGradient(steps)),
    }


def costs(d: int = 512, context: int = 2048) -> Table:
    """Return a table of every mixer with its default arguments: dimensions, parameters, state,
    operations.

    Args:
        d: Hidden size.
        context: Tokens in the context.
    """
    columns = (
        "model",
        "H × d'_k × d'_v",
        "parameters",
        "in d²",
        "state",
        "decode, Mflop",
        "train, Mflop",
    )
    title = f"Costs of one layer per token, d = {d}, context {context}, default arguments"
    return Table(title, columns, [_cost_row(name, d, context) for name in MIXERS], (notes.COSTS,))


def _cost_row(name: str, d: int, context: int) -> tuple[str, ...]:
    mixer = make(name, d)
    found, record = cost(mixer, context), _record(mixer)
    shape = (record.shape[2], record.streams["q"].shape[-1], record.values)
    parameters = f"{found.parameters:,}", f"{found.parameters / d**2:.2f} d²"
    operations = (f"{flops / 1e6:.2f}" for flops in (found.decode, found.train))
    return name, " × ".join(map(str, shape)), *parameters, f"{found.state:,}", *operations


def _record(mixer: Mixer) -> Recurrence:
    """What the mixer makes of one token."""
    x = torch.zeros(1, 1, mixer.d)
    with torch.no_grad():
        return mixer.project(x, TokenContext.start(x))[0]


def _notes_on(about: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"**{name}**: {about[name]}" for name in names if name in about)


FUNCTIONS = {
    "metala-1": (
        "Table 1: from the general form to linear models",
        "gla transnormer hgrn rwkv4 mamba s5 metala",
    ),
    "metala-a1": ("Table A1: LinFormers", "linear retnet transnormer gla"),
    "metala-a2": ("Table A2: state space models", "dss s4d h3 mamba s5"),
    "metala-a3": ("Table A3: linear RNNs", "rwkv4 hgrn rglru lru"),
}


def others() -> Table:
    """Return the rows of all mixers that MetaLA's tables of functions do not have."""
    listed = {name for _, names in FUNCTIONS.values() for name in names.split()}
    return functions(
        "The other mixers in the form of MetaLA's tables",
        tuple(n for n in MIXERS if n not in listed),
    )


def _functions(name: str) -> Table:
    title, names = FUNCTIONS[name]
    return functions(f"MetaLA, {title}", tuple(names.split()))


TABLES: Mapping[str, Callable[[], Table]] = {
    "metala-1": partial(_functions, "metala-1"),
    "metala-2": review,
    "metala-a1": partial(_functions, "metala-a1"),
    "metala-a2": partial(_functions, "metala-a2"),
    "metala-a3": partial(_functions, "metala-a3"),
    "others": others,
    "mesanet-3": recurrences,
    "mesanet-4": inference,
    "costs": costs,
}
"""The tables by the names that the command takes."""
