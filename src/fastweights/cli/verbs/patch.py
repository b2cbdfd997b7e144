"""fastweights patch

Nothing is imported before the script imports it: what it sets in the environment for torch and
transformers counts.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from fastweights.engines.transformers import Patch

OURS = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames a script's traceback begins with, and ``python SCRIPT`` has not."""


def run_patched(chosen: Namespace, console: Console) -> None:
    """Run a script as Python would; its exit status is that of the command."""
    run = (_find_module if chosen.module else _find_script)(chosen.script)
    sys.argv = [chosen.script, *chosen.arguments]
    awaited = _PatchOnImport()
    sys.meta_path.insert(0, awaited)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        trace = _own(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        if "transformers" in sys.modules and not (chosen.quiet or console.quiet):
            sys.stderr.write(f"fastweights: {_account(awaited.patch)}\n")


def _find_script(name: str) -> Callable[[], None]:
    """What runs a file, as ``__main__`` of this process from then on."""
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"{name} is a folder; give a script, or -m and the name of a module")
    if not path.is_file():
        raise ValueError(f"there is no script {name}; give the path of a file, or -m and a module")

    def run() -> None:
        _put_first(os.path.dirname(os.path.realpath(name)))
        main, place = ModuleType("__main__"), os.path.join(os.getcwd(), name)
        vars(main).update(__file__=place, __builtins__=builtins)
        sys.modules["__main__"] = main
        with io.open_code(place) as file:
            exec(compile(file.read(), place, "exec", dont_inherit=True), vars(main))

    return run


def _find_module(name: str) -> Callable[[], None]:
    """What runs a module, or a package's ``__main__``."""
    _put_first(os.getcwd())
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    if spec is None:
        raise ValueError(f"there is no module {name} that can be run; leave out -m for a script")

    def run() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


def _put_first(folder: str) -> None:
    """Have modules looked for in `folder` instead of where this command was found."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the script's."""
    while trace is not None and trace.tb_frame.f_code.co_filename in OURS:
        trace = trace.tb_next
    return trace


def _account(patch: Patch | None) -> str:
    """What was replaced, and what was not, in one line."""
    if patch is None or not (patch.replaced or patch.left):
        return "no model was used whose functions it replaces"
    said = [f"computed {_by_family(patch.replaced)}"] if patch.replaced else []
    said += [f"left {name} to transformers ({why})" for name, why in sorted(patch.left.items())]
    return "; ".join(said)


def _by_family(names: Sequence[str]) -> str:
    """``bamba (causal_conv1d_fn, mamba2_chunk_scan), mamba (…)``."""
    pairs = [name.split(".", 1) for name in names]
    return ", ".join(
        f"{family} ({', '.join(function for _, function in functions)})"
        for family, functions in groupby(pairs, lambda pair: pair[0])
    )


class _PatchOnImport(MetaPathFinder):
    """Patches transformers just before the first of its modelling files is imported.

    Attributes:
        patch: what was put where; None before
    """

    def __init__(self) -> None:
        self.patch: Patch | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (fullname.startswith("transformers.models.") and ".modeling_" in fullname):
            return None
        sys.meta_path.remove(self)
        from fastweights.engines.transformers import patch_transformers

        self.patch = patch_transformers()
        return find_spec(fullname)
