"""Every structure of the C headers is described in Python as it is there: names, order, kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import empty

from fastweights.kernels.native import abi, build

HEADERS = "\n".join(path.read_text() for path in sorted(Path(build.HERE).glob("*.h")))
CODE = re.sub(r"/\*.*?\*/", "", HEADERS, flags=re.DOTALL)
STRUCTURES = {
    name: body for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", CODE, re.DOTALL)
}
NUMBERS = {"int64_t": int, "double": float}


def fields(body: str) -> dict[str, object]:
    """Names and kinds of a structure's fields in C, in order."""
    found: dict[str, object] = {}
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = declaration.removeprefix("const ").split(None, 1)
        for name in names.split(","):
            pointer = name.strip().startswith("*")
            found[name.strip(" *")] = "pointer" if pointer else NUMBERS.get(kind, kind)
    return found


def described(structure: type) -> dict[str, object]:
    """The same of a structure in Python."""
    kinds = abi.field_kinds(structure)
    return {n: getattr(k, "__name__", k) if k not in (int, float) else k for n, k in kinds.items()}


def name_in_c(structure: type) -> str:
    return structure.__name__.removesuffix("Call")


@pytest.mark.parametrize("structure", [*abi.STRUCTURES, abi.Pages], ids=lambda s: s.__name__)
def test_a_structure_is_that_of_its_header(structure: type) -> None:
    assert list(described(structure).items()) == list(
        fields(STRUCTURES[name_in_c(structure)]).items()
    )


def test_every_structure_that_c_reads_is_described() -> None:
    dispatch = (Path(build.HERE) / "dispatch.c").read_text()
    read = set(re.findall(r"X\(fw_\w+, (\w+)\)", dispatch))
    assert set(map(name_in_c, abi.STRUCTURES)) == read


def test_a_view_is_an_address_and_strides() -> None:
    numbers = dict.fromkeys([*"bthw", "narrow"], int)
    assert fields(STRUCTURES["View"]) == {"at": "pointer", **numbers}
    x = empty(2, 3, 1, 5)
    assert abi.view(x) == (x.data_ptr(), 15, 5, 0, 1, False)
    assert abi.view(x := x.bfloat16()) == (x.data_ptr(), 15, 5, 0, 1, True)
    assert abi.view(None) == (0, 0, 0, 0, 0, 0)


def test_feature_maps_are_numbered_as_in_c() -> None:
    names = re.search(r"enum \{( GIVEN,.*?)\}", CODE)
    assert names is not None
    assert [m.name for m in abi.FeatureKind] == [n.strip() for n in names[1].split(",")]
    assert [m.value for m in abi.FeatureKind] == list(range(len(abi.FeatureKind)))


def test_a_structure_is_laid_out_field_by_field() -> None:
    x = empty(4)
    packed = abi.pack(abi.NormCall(2, 2, 1, 0, 0.5, x, None))
    numbers = [*memoryview(packed).cast("q")]
    assert numbers[:4] == [2, 2, 1, 0]
    assert memoryview(packed).cast("d")[4] == 0.5
    assert numbers[5:] == [x.data_ptr(), *[0] * 5]
