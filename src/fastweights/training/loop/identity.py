"""What makes two runs the same: a frozen value as JSON, compared field by field, and its key.

A record that was stored stays valid when the library changes around it: a field that it lacks has
its default. What the value says otherwise is a difference, and named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import numpy as np

VERSION = 1
"""Of records and keys."""


def to_record(value: object) -> dict[str, Any]:
    """Return the record of a run: `to_json_value` of what decides it, and the version."""
    return {"identity": VERSION, **to_json_value(value)}


def to_json_value(value: Any) -> Any:
    """Convert a frozen value to JSON values; dataclasses carry the names of their types.

    Raises:
        TypeError: If a part of the value has no JSON form.
    """
    if is_dataclass(value):
        content = {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **content}
    return _map(to_json_value, value)


def differences(stored: Any, value: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of a stored record from `value`, as phrases ``path was A, is B``.

    Args:
        stored: What `to_record` made of another value, read back from JSON; a field that it lacks
            has its default.
        value: The value to compare with.
        path: Where the two stand in a larger value.
    """
    if not path and isinstance(stored, dict):
        version = stored.get("identity", VERSION)
        stored = {name: part for name, part in stored.items() if name != "identity"}
        if version > VERSION:
            yield f"identity was of version {version}, is of {VERSION}"
    if is_dataclass(value) and isinstance(stored, dict):
        yield from _field_differences(stored, value, path)
    elif isinstance(value, Mapping) and isinstance(stored, dict):
        for key in {**stored, **{str(key): None for key in value}}:
            ours = {str(key): part for key, part in value.items()}
            yield from differences(stored.get(key), ours.get(key), _join(path, key))
    elif isinstance(stored, list) and isinstance(value, list | tuple) and len(stored) == len(value):
        for index, (theirs, ours) in enumerate(zip(stored, value, strict=True)):
            yield from differences(theirs, ours, _join(path, str(index)))
    elif stored != (ours := to_json_value(value)):
        yield f"{path} was {stored}, is {ours}"


def key_of(value: object) -> str:
    """Return a short name for all that `value` decides: 16 hexadecimal digits, for files and
    folders.

    Fields that have their default are left out, so that a field added later changes no key. Should
    a default change, two values have one key: compare what is stored by `differences`.
    """
    text = json.dumps([VERSION, _without_defaults(value)], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _field_differences(stored: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    name, theirs = type(value).__name__, stored.get("type")
    if theirs != name:
        yield f"{_join(path, 'type')} was {theirs}, is {name}"
    known = {field.name: field for field in fields(value)}
    for key, field in known.items():
        there = stored[key] if key in stored else to_json_value(_default(field))
        yield from differences(there, getattr(value, key), _join(path, key))
    for key in stored.keys() - known.keys() - {"type"}:
        yield f"{_join(path, key)} was {stored[key]}, is unknown"


def _without_defaults(value: Any) -> Any:
    """As `to_json_value`; equal numbers are written alike."""
    if is_dataclass(value):
        own = {field.name: (getattr(value, field.name), _default(field)) for field in fields(value)}
        content = {
            key: _without_defaults(x)
            for key, (x, default) in own.items()
            if isinstance(x, np.ndarray) or x != default
        }
        return {"type": type(value).__name__, **content}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _map(_without_defaults, value)


def _map(function: Any, value: Any) -> Any:
    """`function` of the parts of a mapping or list; a leaf as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): function(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [function(part) for part in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(
        f"a {type(value).__name__} ({value!r}) has no place in JSON; a run is decided by frozen"
        " dataclasses of texts, numbers, arrays, mappings and sequences"
    )


def _array(value: np.ndarray) -> dict[str, Any]:
    """What tells an array from others, in place of its numbers."""
    content = sha256(np.ascontiguousarray(value).data).hexdigest()
    return {
        "type": "array",
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "sha256": content,
    }


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
