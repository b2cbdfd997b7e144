"""`patch_transformers`: put ours in the places where modelling files look their functions up."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from itertools import product
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

from fastweights.auto import follow
from fastweights.engines.transformers.convolutions import CONVOLUTIONS
from fastweights.engines.transformers.delta import DELTA_RULES
from fastweights.engines.transformers.loops import LOOPS
from fastweights.engines.transformers.mamba import SCANS
from fastweights.engines.transformers.norms import NORMS
from fastweights.engines.transformers.packing import MASKS, keep_documents_apart, mask_documents
from fastweights.engines.transformers.places import (
    MODELS,
    FunctionPlace,
    family_of,
    find_place,
    is_modelling_file,
)
from fastweights.engines.transformers.products import cover_layers, multiply_covered, uncover_all
from fastweights.engines.transformers.substitute import MARK, Substitute, Switch
from fastweights.models.continuation import forget_continuations

BETWEEN = ("fastweights", "transformers", "importlib", "_frozen_importlib")
"""Packages that stand between a modelling file and whoever asks for it."""
SUBSTITUTES = (*CONVOLUTIONS, *DELTA_RULES, *SCANS, *LOOPS, *NORMS)


LINEAR = FunctionPlace(nn.Linear.__module__, nn.Linear, "forward", "torch.nn.Linear.forward")


class Patch:
    """What a `patch_transformers` has put where, until `undo`; a context manager, too.

    Attributes:
        left: what stays as transformers has it, ``family.function``, with the reason
    """

    def __init__(self, files: frozenset[str] | None) -> None:
        """Of the modelling files of these names; None for all."""
        self.left: dict[str, str] = {}
        self._files, self._switch = files, Switch()
        self._before: dict[FunctionPlace, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._finder = _Finder(self.visit)
        _active.append(self)

    @property
    def replaced(self) -> tuple[str, ...]:
        """What is computed by fastweights, ``family.function`` each, what keeps packed documents
        apart, masks and models, ``family.Class.forward``, and the forward of these models' linear
        layers; of files that were imported later, too.
        """
        return tuple(sorted(place.name for place in self._before))

    def undo(self) -> None:
        """Put back what was there, unless another patch is for it too. Again: do nothing."""
        if self not in _active:
            return
        _active.remove(self)
        self._switch.on = False
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        files = {place.file: None for place in self._before}
        for place, (theirs, ours) in self._before.items():
            if place.function is ours:
                place.put(theirs)
        self._before.clear()
        uncover_all()
        forget_continuations()
        for patch, file in product(_active, files):
            patch.visit(sys.modules[file])
        for patch in _active:
            patch._multiply()

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
        """Put ours into one modelling file, if this patch is for it."""
        if self._files is not None and module.__name__ not in self._files:
            return
        found = [(find_place(module, substitute.name), substitute) for substitute in SUBSTITUTES]
        agree = [
            (substitute, self._agrees(place, substitute))
            for place, substitute in found
            if place is not None and not hasattr(place.function, MARK)
        ]
        across_tokens = [agrees for substitute, agrees in agree if substitute not in NORMS]
        if across_tokens and all(across_tokens):
            self._enter_models(module)

    def follow_imports(self) -> None:
        """Visit every modelling file that is imported from now on."""
        sys.meta_path.insert(0, self._finder)

    def _agrees(self, place: FunctionPlace, substitute: Substitute) -> bool:
        """Whether ours gives what theirs gives, and was put in its place."""
        theirs = place.function
        with fresh_settings():
            reason = substitute.disagreement(theirs)
        if reason is None:
            self._put(place, substitute.put_before(theirs, self._switch))
            return True
        self.left[place.name] = reason
        _warn(f"{place.name} of this version of transformers stays as it is: {reason}")
        return False

    def _enter_models(self, module: ModuleType) -> None:
        """Have the models of a file keep packed documents apart, and their linear layers multiply
        as ours.
        """
        for place in _find_entries(module):
            apart = keep_documents_apart(place.function, family_of(module), self._switch)
            self._put(place, cover_layers(apart, self._switch))
        for place in (find_place(module, name) for name in MASKS):
            if place is not None:
                self._put(place, mask_documents(place.function, self._switch))
        self._multiply()

    def _multiply(self) -> None:
        """Have the linear layers of models of this patch multiply as ours, if it is for any."""
        if self._before and not hasattr(LINEAR.function, MARK):
            self._put(LINEAR, multiply_covered(LINEAR.function))

    def _put(self, place: FunctionPlace, ours: Callable[..., Any]) -> None:
        self._before[place] = place.function, ours
        place.put(ours)
        forget_continuations()


_active: list[Patch] = []
"""Those that are not undone."""


def patch_transformers(model: nn.Module | str | None = None) -> Patch:
    """Have transformers' own linear models computed by fastweights' kernels.

    The gated delta rule, Kimi's delta attention, the scans of Mamba and Mamba-2 and the short
    convolutions of 22 model families, which are reference code on a CPU, become ours, in files that
    are imported already and in those to come. Before a function takes the place of another, both
    have to agree on examples; otherwise transformers' own stays, and a warning says so. A second
    call finds nothing left to do.

    Packed documents, which the reference refuses or mixes, are kept apart in linear and in softmax
    layers, whether `seq_idx`, `cu_seq_lens_q` or, without a cache and without padding,
    `position_ids` tell of them. A packed row keeps no cache; where documents would be mixed all the
    same (padding, a cache that is asked for, families whose own layers read across) a ValueError
    says what to do.

    Args:
        model: a model, or the name of a model type such as ``qwen3_next``: only the files that its
            code is in, of which other models of the family are made as well; None for all

    Returns:
        a `Patch` with ``.replaced``, ``.left`` and ``.undo()``, which also is a context manager

    Raises:
        ValueError: if transformers has no model type of that name
        TypeError: if it is neither a model nor a name
    """
    files = None if model is None else _find_files(model)
    patch = Patch(files)
    if files is None:
        patch.follow_imports()
    for name in sorted(sys.modules if files is None else files):
        if is_modelling_file(name):
            patch.visit(sys.modules[name])
    return patch


def _find_files(model: nn.Module | str) -> frozenset[str]:
    """The names of the files that a model, or a family, is made of."""
    if isinstance(model, str):
        return frozenset([_import_family(model)])
    if not isinstance(model, nn.Module):
        raise TypeError(
            "patch_transformers takes a model, the name of a model type such as 'qwen3_next', or"
            f" nothing for all models, not {model!r}"
        )
    return frozenset(type(part).__module__ for part in model.modules())


def _warn(message: str) -> None:
    """Warn of the line by which the user came here, maybe through an import."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] in BETWEEN:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})
    line = frame.f_code.co_filename, frame.f_lineno, frame.f_globals["__name__"]
    warnings.warn_explicit(message, UserWarning, *line, registry=known)


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


def _find_entries(module: ModuleType) -> Iterator[FunctionPlace]:
    """The forwards of a modelling file that take a batch of texts."""
    for name, entry in list(vars(module).items()):
        is_model = isinstance(entry, type) and issubclass(entry, PreTrainedModel)
        if not is_model or entry.__module__ != module.__name__ or "forward" not in vars(entry):
            continue
        if "input_ids" in inspect.signature(entry.forward).parameters:
            place = f"{family_of(module)}.{name}.forward"
            yield FunctionPlace(module.__name__, entry, "forward", place)


class _Finder:
    """Finds modelling files as Python does, and has them visited once they have run."""

    def __init__(self, visit: Callable[[ModuleType], None]) -> None:
        self.visit = visit

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not is_modelling_file(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        follow(spec.loader, self.visit)
        return spec


@contextmanager
def fresh_settings() -> Iterator[None]:
    """CPU tensors of float32, no autocast, no gradients, and random numbers that are always the
    same and leave those of the process alone.

    Modelling files are imported wherever a model is first made: under autocast, on the meta device,
    with bfloat16 as the default.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)
