"""What the library's dataclasses say of their fields, read from their source.

Nothing of them is imported, so that the command's help needs no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fastweights import ranges

LIBRARY = Path(__file__).parents[1]


@dataclass(frozen=True)
class LibraryField:
    """A field of one of the library's dataclasses.

    Attributes:
        place: ``module:Class``, the module without the name of the package.
        name: Name of the field.
    """

    place: str
    name: str

    @cached_property
    def default(self) -> Any:
        """Its default; None where it has none."""
        fields = (node for node in self._class.body if isinstance(node, ast.AnnAssign))
        found = next(node for node in fields if ast.unparse(node.target) == self.name)
        return None if found.value is None else _value(found.value)

    @cached_property
    def range(self) -> ranges.Range | None:
        """The range that its class requires it to lie in; None where it says nothing."""
        for call in ast.walk(self._class):
            if isinstance(call, ast.Call) and self.name in [k.arg for k in call.keywords]:
                required = ast.unparse(call.func)
                if required.endswith(".require"):
                    return getattr(ranges, required.removesuffix(".require"))
        return None

    def __str__(self) -> str:
        return str(self.default)

    @property
    def _class(self) -> ast.ClassDef:
        module, _, name = self.place.partition(":")
        classes = (node for node in _parsed(module).body if isinstance(node, ast.ClassDef))
        return next(node for node in classes if node.name == name)


def fields_of(place: str) -> Callable[[str], Any]:
    """Return what makes a field of the class ``module:Class`` the default of an option."""
    return partial(LibraryField, place)


def names_in(place: str) -> tuple[str, ...]:
    """Return the keys of a table of the library, ``module:TABLE``."""
    module, _, name = place.partition(":")
    found = next(node for target, node in _assigned(module) if target == name)
    if not isinstance(found, ast.Dict):
        raise TypeError(f"{place} is not written as a table of names")
    return tuple(ast.literal_eval(key) for key in found.keys if key is not None)


def value_of(place: str) -> Any:
    """Return a constant of the library, ``module:CONSTANT``."""
    module, _, name = place.partition(":")
    return _value(next(node for target, node in _assigned(module) if target == name))


@cache
def _parsed(module: str) -> ast.Module:
    path = LIBRARY.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _assigned(module: str) -> Iterator[tuple[str, ast.expr]]:
    """The names that a module gives values to, with these."""
    for node in _parsed(module).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)


def _value(node: ast.expr) -> Any:
    """The value of an expression without names, such as ``1 << 17``."""
    return eval(compile(ast.Expression(node), "<default>", "eval"), {"__builtins__": {}})
