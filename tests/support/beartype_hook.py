"""The run-time type checker of the tests: beartype, with the sizes that jaxtyping's names have in
one call.

jaxtyping's own import hook binds the arguments of every function and checks them twice; of a suite
whose tensors have a dozen elements, that is the larger part. Here a function whose annotations name
no shapes is beartype's alone, and one whose annotations do is checked once.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, get_args

from beartype import BeartypeConf, BeartypeStrategy, beartype
from jaxtyping import AbstractArray, TypeCheckError, config, jaxtyped

FIRST, EVERY = 256, 16
"""Of a function's calls in a process, so many are all checked, and of the others one in so many."""

_beartyped = beartype(
    conf=BeartypeConf(
        strategy=BeartypeStrategy.O1, is_pep484_tower=True, violation_type=TypeCheckError
    )
)


def install(packages: Sequence[str]) -> None:
    """Check every function and dataclass of these packages that is imported from now on."""
    sys.meta_path.insert(0, _Finder(packages))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments and result checked, as far as their annotations do not say
    `Self`, which beartype rejects on a method decorated without its class.
    """
    hints = function.__annotations__.items()
    known = {name: _find(hint, function) for name, hint in hints if "Self" not in str(hint)}
    function.__annotations__ = known
    if not known:
        return function
    checked = _beartyped(function)
    if any(map(_has_sizes, known.values())):
        checked = _in_a_scope(checked)

    calls = itertools.count()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        passed = config.jaxtyping_disable or (number > FIRST and number % EVERY)
        return (function if passed else checked)(*args, **kwargs)

    return call


def _in_a_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with names of sizes that hold for one call."""
    scope = jaxtyped("context")

    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def check_class(kind: type) -> type:
    """A dataclass whose generated constructor is checked; any other class as it is."""
    if is_dataclass(kind) and "__dataclass_fields__" in vars(kind) and "__init__" in vars(kind):
        kind.__init__ = check(kind.__init__)
    return kind


def _find(hint: Any, function: Any) -> Any:
    """What an annotation says; its text, if a name in it is not known yet."""
    try:
        return eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except (NameError, AttributeError):
        return hint


def _has_sizes(hint: Any) -> bool:
    """Whether sizes are, or may be, in an annotation."""
    array = isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, AbstractArray))
    return array or any(map(_has_sizes, get_args(hint)))


class _Decorator(ast.NodeTransformer):
    """Puts the checks nearest to functions and farthest from classes, as other decorators make
    something else of a function, and a dataclass of a class."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(_call(check.__name__, node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, _call(check_class.__name__, node))
        return self.generic_visit(node)


def _call(name: str, node: ast.AST) -> ast.expr:
    """The expression for a function of this module."""
    hook = f"__import__({__name__!r}).{name}"
    found = ast.parse(hook, mode="eval").body
    for part in ast.walk(found):
        ast.copy_location(part, node)
    return found


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """From the source always: what Python keeps of it has no checks."""
        path = self.get_filename(fullname)
        tree = _Decorator().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{package}.") for package in self._packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
