"""`patch_transformers`: put ours in the places where modelling files look their functions up."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from fastweights.engines.transformers.convolutions import CONVOLUTIONS
from fastweights.engines.transformers.delta import DELTA_RULES
from fastweights.engines.transformers.mamba import SCANS
from fastweights.engines.transformers.substitute import MARK, Substitute

MODELS = "transformers.models."
SUBSTITUTES = (*CONVOLUTIONS, *DELTA_RULES, *SCANS)


@dataclass(frozen=True)
class Place:
    """Where a function is looked up: a modelling file, or a class in it.

    Attributes:
        owner: the module or class
        attribute: the name there
        name: for people, ``family.function`` or ``family.Class.method``
    """

    owner: ModuleType | type
    attribute: str
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        """What is there now."""
        return vars(self.owner)[self.attribute]

    def put(self, function: Callable[..., Any]) -> None:
        setattr(self.owner, self.attribute, function)


class Patch:
    """What a `patch_transformers` has put where, until `undo`; a context manager, too.

    Attributes:
        left: what stays as transformers has it, ``family.function``, with the reason
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self._before: dict[Place, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._finder: _Finder | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        """What is computed by fastweights, ``family.function`` each, files that were imported later
        included.
        """
        return tuple(sorted(place.name for place in self._before))

    def undo(self) -> None:
        """Put back what was there. A second call does nothing."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for place, (theirs, ours) in self._before.items():
            if place.function is ours:
                place.put(theirs)
        self._before.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Patch(replaced={len(self._before)} functions, left={self.left})"

    def visit(self, module: ModuleType) -> None:
        """Put ours into one modelling file."""
        for substitute in SUBSTITUTES:
            place = _find_place(module, substitute.name)
            if place is not None and not hasattr(place.function, MARK):
                self._put(place, substitute)

    def follow_imports(self) -> None:
        """Visit every modelling file that is imported from now on."""
        self._finder = _Finder(self.visit)
        sys.meta_path.insert(0, self._finder)

    def _put(self, place: Place, substitute: Substitute) -> None:
        theirs = place.function
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            reason = substitute.disagreement(theirs)
        if reason is not None:
            self.left[place.name] = reason
            warnings.warn(
                f"{place.name} of this version of transformers stays as it is: {reason}",
                stacklevel=2,
            )
            return
        ours = substitute.put_before(theirs)
        place.put(ours)
        self._before[place] = theirs, ours


def patch_transformers(model: nn.Module | str | None = None) -> Patch:
    """Have transformers' own linear models computed by fastweights' kernels.

    The gated delta rule, Kimi's delta attention, the scans of Mamba and Mamba-2 and the short
    convolutions of 22 model families, which are reference code on a CPU, become ours, in files that
    are imported already and in those to come; packed documents, which the reference refuses, are
    kept apart. Before a function takes the place of another, both have to agree on examples;
    otherwise transformers' own stays, and a warning says so. A second call finds nothing left to
    do.

    Args:
        model: a model, or the name of a model type such as ``qwen3_next``: only the files that its
            code is in, of which other models of the family are made as well; None for all

    Returns:
        a `Patch` with ``.replaced``, ``.left`` and ``.undo()``, which also is a context manager

    Raises:
        ValueError: if transformers has no model type of that name
    """
    patch = Patch()
    if model is None:
        patch.follow_imports()
    for module in _modelling_files(model):
        patch.visit(module)
    return patch


def _modelling_files(model: nn.Module | str | None) -> Iterator[ModuleType]:
    """Those that are imported, or those that `model` is made of."""
    if isinstance(model, nn.Module):
        names = {type(part).__module__ for part in model.modules()}
    elif model is None:
        names = set(sys.modules)
    else:
        names = {_import_family(model)}
    for name in sorted(names):
        if name.startswith(MODELS) and ".modeling_" in name:
            yield sys.modules[name]


def _import_family(model_type: str) -> str:
    """The name of the modelling file of a model type, imported."""
    family = model_type_to_module_name(model_type)
    name = f"{MODELS}{family}.modeling_{family.split('.')[-1]}"
    try:
        import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"transformers {transformers.__version__} has no model type {model_type!r}; give a"
            " model, the model_type of its config.json, or nothing for all models"
        ) from None
    return name


def _find_place(module: ModuleType, name: str) -> Place | None:
    *classes, attribute = name.split(".")
    owner: Any = module
    for part in classes:
        owner = vars(owner).get(part)
    if owner is None or attribute not in vars(owner):
        return None
    family = module.__name__.removeprefix(MODELS).split(".")[0]
    return Place(owner, attribute, f"{family}.{name}")


class _Finder:
    """Finds modelling files as Python does, and has them visited once they have run."""

    def __init__(self, visit: Callable[[ModuleType], None]) -> None:
        self.visit = visit

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not (name.startswith(MODELS) and ".modeling_" in name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_visit(module: ModuleType) -> None:
            execute(module)
            self.visit(module)

        loader.exec_module = execute_and_visit
        return spec
