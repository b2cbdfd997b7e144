"""How docstrings become Markdown: equations and table rows keep their columns, names become links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

PACKAGE = Path(__file__).parents[2] / "src" / "fastweights" / "__init__.py"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Examples?|Note):")
EQUATION = re.compile(r"^[^\W\d]\w*_\w+ = ")
SOURCE = re.compile(r"\s{3,}(?P<source>\(.*)$")
ENTRY = re.compile(r"^(?P<name>\w[\w, ]*?)\s{2,}(?P<text>\S.*)$")
CODE = re.compile(r"(?<!`)`(\w+)`(?!`)")


def exported(package: Path) -> frozenset[str]:
    """The names of ``fastweights.__all__``."""
    for statement in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(statement.value))
    raise ValueError(f"{package} has no __all__")


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
    if SECTION.match(first) or first.startswith((" ", ">>>", "```")):
        return _linked(part)
    if first.startswith("f_q "):
        return f"```text\n{part}\n```"
    if EQUATION.match(first):
        return _equation(part)
    lines = part.split("\n")
    if sum(ENTRY.match(line) is not None for line in lines) > 1:
        return _linked(_list(lines))
    return _linked(part)


def _equation(part: str) -> str:
    """One equation per line, and where it is from below them."""
    one = " ".join(line.strip() if i else line for i, line in enumerate(part.split("\n")))
    source = SOURCE.search(one)
    equations = one[: source.start()] if source else one
    lines = "\n".join(equation.strip() for equation in re.split(r"\s;\s+", equations))
    return f"```text\n{lines}\n```" + (f"\n\n{source['source']}" if source else "")


def _list(lines: list[str]) -> str:
    """``q  [b t h k]`` line by line, as a list; what is no such line goes on with the one before."""
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
        return f"[`{name}`][fastweights.{name}]" if name in EXPORTED else found[0]

    return CODE.sub(link, part)
