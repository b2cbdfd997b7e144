"""Recipes in files, TOML or JSON, with the fields and types that a run's ``run.json`` records."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fastweights.errors import reason_of
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.distill.adapt import TeacherSource, TokenLoss
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.fit import AdamWByPart, Fit
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.trained import (
    Adapters,
    AllButMLPs,
    AllWeights,
    Attentions,
    Branches,
)
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.training.data.files import read_whole
from fastweights.training.language.adapters import LoRA
from fastweights.training.loop.optimizers import AdamW, Muon
from fastweights.training.loop.schedules import (
    Constant,
    Cosine,
    CosineAnnealing,
    CosineDecay,
    Linear,
    LinearDecay,
    SquareRootDecay,
    WarmupStableDecay,
)
from fastweights.training.loop.stage import Every

TYPES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(LinearizationRecipe, LinearAttentionConfig),
        *(TransferConfig, AlignmentConfig, AdaptationConfig),
        *(TransferLoss, HiddenLoss, TokenLoss, TeacherSource),
        *(Branches, Attentions, AllWeights, AllButMLPs, Adapters, LoRA),
        *(Fit, Every, AdamW, AdamWByPart, Muon),
        *(Cosine, CosineAnnealing, Constant, Linear, WarmupStableDecay),
        *(LinearDecay, SquareRootDecay, CosineDecay),
    )
}
"""What a file can hold, by its name."""
_READERS = {".toml": tomllib.loads, ".json": json.loads}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read_recipe(path: Path) -> LinearizationRecipe:
    """Read a recipe from a TOML or JSON file.

    Raises:
        ValueError: If the file cannot be read or is no recipe; the message says what is wrong, and
            where.
    """
    if path.suffix.lower() not in _READERS:
        raise ValueError(f"{path} is no file of a recipe: its name must end in .toml or .json")
    try:
        content = _READERS[path.suffix.lower()](read_whole(path))
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        return _value(LinearizationRecipe, content, "the recipe")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {reason_of(error)}") from error


def _value(kind: Any, content: Any, place: str) -> Any:
    """`content` as a value of `kind`, a type or what annotates one."""
    if get_origin(kind) in (Union, UnionType):
        if content is None and NoneType in get_args(kind):
            return None
        return _value(next(k for k in get_args(kind) if k is not NoneType), content, place)
    if get_origin(kind) is tuple:
        return _values(get_args(kind), content, place)
    if kind in _WORDS:
        return _leaf(kind, content, place)
    return _record(kind, content, place)


def _values(kinds: tuple[Any, ...], content: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise ValueError(f"{place} is {content!r}; it must be a list")
    each = [kinds[0]] * len(content) if kinds[-1] is Ellipsis else list(kinds)
    if len(each) != len(content):
        raise ValueError(f"{place} is {content!r}; it must have {len(each)} entries")
    return tuple(
        _value(kind, part, f"{place}[{number}]")
        for number, (kind, part) in enumerate(zip(each, content, strict=True))
    )


def _leaf(kind: type, content: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(content, allowed) or (isinstance(content, bool) and kind is not bool):
        raise ValueError(f"{place} is {content!r}; it must be {_WORDS[kind]}")
    return content


def _record(kind: type, content: Any, place: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError(f"{place} is {content!r}; it must be a table with the fields of its type")
    chosen = _chosen(kind, content.get("type"), place)
    known = {field.name for field in fields(chosen)}
    if unknown := sorted(content.keys() - known - {"type"}):
        raise ValueError(
            f"{place} has no field {', '.join(unknown)}; a {chosen.__name__} has"
            f" {', '.join(sorted(known)) or 'none'}"
        )
    hints = get_type_hints(chosen)
    return chosen(
        **{
            name: _value(hints[name], part, f"{place}, {name}")
            for name, part in content.items()
            if name != "type"
        }
    )


def _chosen(kind: type, name: Any, place: str) -> Any:
    """The class that a table is of: the one that it names, or the only one that it can be."""
    possible = {key: found for key, found in TYPES.items() if issubclass(found, kind)}
    if name is None and is_dataclass(kind):
        return kind
    if name not in possible:
        said = "has no type" if name is None else f"has the type {name!r}"
        raise ValueError(f"{place} {said}; it must be one of {', '.join(possible)}")
    return possible[name]
