"""The source in figures: `make house`. tests/docs/test_house.py has ceilings for some."""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
PACKAGE = "fastweights"
SHORT = 50
"""A file of fewer lines is short."""
RULES = {"Decay", "Delta", "DPLR", "Mesa", "Softmax", "Bonus", "Normalized", "Amplified", "Signed"}
RULES |= {"WindowedLinear"}
"""Recurrences whose type nobody should ask for."""
Graph: TypeAlias = Mapping[str, set[str]]


@dataclass(frozen=True)
class House:
    """The source below a folder.

    Attributes:
        folder: of the package
    """

    folder: Path = ROOT / "src" / PACKAGE

    @cached_property
    def texts(self) -> dict[str, str]:
        """The Python files, by the names of their modules."""
        return {self._module(path): path.read_text() for path in sorted(self.folder.rglob("*.py"))}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        return ".".join(parts)

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """The syntax trees of the same."""
        return {name: ast.parse(text) for name, text in self.texts.items()}

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """Every node of every module."""
        return ((name, node) for name, tree in self.trees.items() for node in ast.walk(tree))

    @cached_property
    def lines(self) -> Counter[str]:
        """Lines by package, of Python and C."""
        found: Counter[str] = Counter()
        for path in self.folder.rglob("*"):
            if path.suffix in (".py", ".c", ".h"):
                found[path.relative_to(self.folder).parts[0]] += len(path.read_text().splitlines())
        return found

    @cached_property
    def functions(self) -> list[tuple[int, str]]:
        """Functions by length, the longest first."""
        return sorted(
            (
                (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
                for name, node in self.nodes()
                if isinstance(node, ast.FunctionDef) and node.end_lineno
            ),
            reverse=True,
        )

    @cached_property
    def twins(self) -> dict[str, list[str]]:
        """Names of classes that are defined more than once, and where."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name, node in self.nodes():
            if isinstance(node, ast.ClassDef):
                found[node.name.strip("_")].append(name)
        return {name: places for name, places in found.items() if len(places) > 1}

    @cached_property
    def type_tests(self) -> list[str]:
        """Where the type of a recurrence decides."""
        return [f"{name}:{node.lineno}" for name, node in self.nodes() if _asks_for_a_rule(node)]

    @cached_property
    def short_files(self) -> list[str]:
        """Modules of few lines; packages are what they hold."""
        return [
            name
            for name, text in self.texts.items()
            if len(text.splitlines()) < SHORT and not name.endswith("__init__")
        ]

    @cached_property
    def comments(self) -> float:
        """The share of lines that hold a comment."""
        lines = [line for text in self.texts.values() for line in text.splitlines()]
        return sum(line.lstrip().startswith("#") or "  # " in line for line in lines) / len(lines)

    @cached_property
    def circles(self) -> list[list[str]]:
        """Modules that import each other, directly or not."""
        reach = {name: _reach(name, self._imports) for name in self._imports}
        rings = {frozenset(m for m in reach[n] if n in reach[m]) for n in reach if n in reach[n]}
        return sorted(map(sorted, rings))

    @cached_property
    def _imports(self) -> Graph:
        """What each module imports of ours; packages, which gather names, count for nothing."""
        return {
            name: {m for m in _imported(tree, self.trees) if m != name}
            for name, tree in self.trees.items()
        }


def _asks_for_a_rule(node: ast.AST) -> bool:
    if isinstance(node, ast.MatchClass):
        return getattr(node.cls, "id", "") in RULES
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"):
        return False
    return any(isinstance(x, ast.Name) and x.id in RULES for x in ast.walk(node.args[-1]))


def _imported(tree: ast.Module, known: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            yield from names & known.keys()


def _reach(start: str, graph: Graph) -> set[str]:
    """What is imported from `start` on."""
    found: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def report(house: House) -> str:
    """The figures, a line each."""
    lengths = [length for length, _ in house.functions]
    longest = ", ".join(f"{name} ({length})" for length, name in house.functions[:5])
    packages = ", ".join(f"{name} {count:,}" for name, count in house.lines.most_common())
    python = sum(len(text.splitlines()) for text in house.texts.values())
    return "\n".join(
        [
            f"Python: {python:,} lines in {len(house.texts)} files; lines by package: {packages}",
            f"functions: median {statistics.median(lengths):.0f}, p90"
            f" {statistics.quantiles(lengths, n=10)[-1]:.0f}; longest {longest}",
            f"comment lines: {house.comments:.1%}",
            f"type tests on rules: {len(house.type_tests)}: {', '.join(house.type_tests)}",
            f"names of several classes: {len(house.twins)}: {', '.join(sorted(house.twins))}",
            f"files under {SHORT} lines: {len(house.short_files)}",
            f"import circles: {house.circles or 'none'}",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(report(House()) + "\n")
