"""How docstrings become Markdown: columns stay columns, and public names become links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

PACKAGE = Path(__file__).parents[2] / "src" / "fastweights"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Examples?|Note):")
EQUATION = re.compile(r"^[^\W\d]\w*_\w+ = ")
SOURCE = re.compile(r"\s{3,}(?P<source>\(.*)$")
SEVERAL = re.compile(
    r"^(?P<indent> {4})(?P<names>\w+(, \w+)+): (?P<text>.*(\n {5,}.*)*)", re.MULTILINE
)
ENTRY = re.compile(r"^(?P<name>\w[\w, ]*?)\s{2,}(?P<text>\S.*)$")
CODE = re.compile(r"(?<!`)`(\w+)`(?!`)")


def exported(package: Path) -> frozenset[str]:
    """The public names of a package: what its stub, or else its code, imports at the top."""
    stub = package / "__init__.pyi"
    file = stub if stub.exists() else package / "__init__.py"
    return frozenset(
        alias.name
        for statement in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        and statement.module is not None
        and statement.module.startswith(f"{package.name}.")
        for alias in statement.names
    )


EXPORTED = exported(PACKAGE)


class Readable(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        for module in (pkg, *_modules(pkg)):
            for owner in module.classes.values():
                if not owner.is_alias:
                    _read_properties(owner)


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    for module in package.modules.values():
        if not module.is_alias:
            yield module
            yield from _modules(module)


def _read_properties(owner: griffe.Class) -> None:
    """What ``@Once`` computes at the first reading is read without parentheses."""
    for name, method in list(owner.functions.items()):
        if any(str(decorator.value) == "Once" for decorator in method.decorators):
            owner.members[name] = griffe.Attribute(
                name,
                annotation=method.returns,
                docstring=method.docstring,
                lineno=method.lineno,
                parent=owner,
            )
            owner.members[name].labels.add("property")


def markdown(docstring: str) -> str:
    """The docstring with columns as code or lists, and the package's names as links."""
    if docstring.lstrip().startswith("f_q "):  # a mixer's attributes are its arguments
        docstring = docstring.replace("\nAttributes:\n", "\nArgs:\n")
    return "\n\n".join(_paragraph(part) for part in docstring.split("\n\n"))


def _paragraph(part: str) -> str:
    first = part.lstrip("\n").split("\n", 1)[0]
    if SECTION.match(first):
        return _linked(SEVERAL.sub(_apart, part))
    if first.startswith((" ", ">>>", "```")):
        return _linked(part)
    if first.startswith("f_q "):
        return f"```text\n{part}\n```"
    if EQUATION.match(first):
        return _equation(part)
    lines = part.split("\n")
    if sum(ENTRY.match(line) is not None for line in lines) > 1:
        return _linked(_list(lines))
    return _linked(part)


def _apart(found: re.Match[str]) -> str:
    """``q, k: text`` as an entry for each."""
    names = found["names"].split(", ")
    return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in names)


def _equation(part: str) -> str:
    """One equation per line, and where it is from below them."""
    one = " ".join(line.strip() if i else line for i, line in enumerate(part.split("\n")))
    source = SOURCE.search(one)
    equations = one[: source.start()] if source else one
    lines = "\n".join(equation.strip() for equation in re.split(r"\s;\s+", equations))
    return f"```text\n{lines}\n```" + (f"\n\n{source['source']}" if source else "")


def _list(lines: list[str]) -> str:
    """Lines such as ``q  [b t h k]`` as a list; any other goes on with the one before it."""
    items: list[str] = []
    for line in lines:
        entry = ENTRY.match(line)
        if entry:
            items.append(f"- **{entry['name']}**: {entry['text']}")
        elif items and (line.startswith(" ") or not line[:1].isupper()):
            items[-1] += f" {line.strip()}"
        else:
            items.append(f"\n{line}")
    return "\n".join(items)


def _linked(part: str) -> str:
    def link(found: re.Match[str]) -> str:
        name = found[1]
        if name not in EXPORTED:
            return found[0]
        return f'<autoref identifier="fastweights.{name}" optional><code>{name}</code></autoref>'

    return CODE.sub(link, part)
