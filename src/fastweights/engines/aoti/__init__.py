"""Our language models compiled ahead of time, which torch runs without Python and without us."""

from fastweights.engines.aoti.write import (
    export_programs,
    read_by,
    require_compiler,
    write_package,
)

__all__ = ["export_programs", "read_by", "require_compiler", "write_package"]
