"""Compiles the optional extension into the package. Where there is no C compiler the package is
installed without it; a compiler that is named, by CC, has to work.
"""

from __future__ import annotations

import os
import platform
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/fastweights/kernels/native")


class NativeBuildHook(BuildHookInterface):
    """For wheels, editable ones included. Having no Python API, a wheel serves every Python of its
    platform.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        script = runpy.run_path(str(Path(self.root) / NATIVE / "build.py"))
        try:
            library = script["build"]()
        except script["BuildError"] as error:
            if os.environ.get("CC"):
                raise
            self.app.display_warning(f"fastweights goes on without its compiled kernels: {error}")
            return
        build_data["artifacts"].append(f"/{(NATIVE / library.name).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """This platform's; one compiler run makes code for one processor, also where Python has two."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
