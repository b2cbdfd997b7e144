"""Where functions are looked up in modelling files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MODELS = "transformers.models."


@dataclass(frozen=True)
class FunctionPlace:
    """Where a function is looked up: a modelling file, or a class in it.

    Attributes:
        file: the name of the modelling file
        owner: the module or class
        attribute: the name there
        name: for people, ``family.function`` or ``family.Class.method``
    """

    file: str
    owner: ModuleType | type
    attribute: str
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        """What is there now."""
        return vars(self.owner)[self.attribute]

    def put(self, function: Callable[..., Any]) -> None:
        setattr(self.owner, self.attribute, function)


def is_modelling_file(name: str) -> bool:
    """Whether a module of this name is one of transformers' modelling files."""
    return name.startswith(MODELS) and ".modeling_" in name


def find_place(module: ModuleType, name: str) -> FunctionPlace | None:
    """The place of ``function`` or ``Class.method`` in a modelling file; None if it has none."""
    *classes, attribute = name.split(".")
    owner: Any = module
    for part in classes:
        owner = vars(owner).get(part)
    if owner is None or attribute not in vars(owner):
        return None
    return FunctionPlace(module.__name__, owner, attribute, f"{family_of(module)}.{name}")


def family_of(module: ModuleType) -> str:
    """The folder of a modelling file."""
    return module.__name__.removeprefix(MODELS).split(".")[0]
