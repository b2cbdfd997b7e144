"""Linear-time sequence models, each defined once.

The public names are those of ``__init__.pyi``. Each is imported from its file when it is first
used (as in Scientific Python's SPEC 1), so that ``import fastweights`` costs nothing and
``Decay`` needs torch alone. The checkpoints of our model types are known to transformers' Auto
classes from the import on.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data

from fastweights import auto

_STUB = ast.parse(get_data(__name__, "__init__.pyi") or b"")
_HOMES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.module != __name__
    for alias in node.names
}
"""The module that defines each public name."""

__all__ = sorted([*_HOMES, "linearize"])

__version__ = "0.1.0"

auto.register_when_needed()


def __getattr__(name: str) -> object:
    """A public name or a submodule, imported when it is first used."""
    submodule = f"{__name__}.{name}"
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif not name.startswith("_") and find_spec(submodule) is not None:
        value = import_module(submodule)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
