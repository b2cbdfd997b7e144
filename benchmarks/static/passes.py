"""How often interpreted kernels pass through the statements that repeat or end them.

Triton's interpreter compiles the source of each kernel at its first call; here it puts a count at
the head of every loop's body and before every `return` without a value.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

from triton.runtime.interpreter import ASTTransformer

from fastweights.lab.bench.disassembly import EARLY

PASSED: Counter[str] = Counter()
"""Passes so far by the line of the loop, as in "decay.py:87", and ends by `EARLY`."""


def pass_loop() -> None:
    """Count a pass of the loop whose line calls."""
    caller = sys._getframe(1)
    PASSED[f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"] += 1


def end_early() -> None:
    """Count a program's end before its kernel's."""
    PASSED[EARLY] += 1


def _call(name: str, node: ast.stmt) -> ast.Expr:
    """A call of a function of this module, at the line of `node`."""
    text = f"__import__({__name__!r}, fromlist=['']).{name}()"
    (found,) = ast.parse(text).body
    ast.increment_lineno(found, node.lineno - 1)
    return found


def _loop(self: ASTTransformer, node: ast.For | ast.While) -> ast.AST:
    found = self.generic_visit(node)
    found.body.insert(0, _call(pass_loop.__name__, node))
    return found


def _return(_: ASTTransformer, node: ast.Return) -> ast.AST | list[ast.AST]:
    return node if node.value else [_call(end_early.__name__, node), node]


def install() -> None:
    """Count in every kernel that the interpreter has not called yet."""
    ASTTransformer.visit_For = ASTTransformer.visit_While = _loop
    ASTTransformer.visit_Return = _return


install()
