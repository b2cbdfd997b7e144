"""What `patch_transformers` replaces in versions of transformers, as a table.

    PYTHONPATH=src python benchmarks/transformers_versions.py [FOLDER …]

Each FOLDER holds another version, as ``pip install --target FOLDER transformers==5.16.0``
makes it; without one it is the version that is installed. Every modelling file that has one of the
functions is imported, in a process for each version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from measuring import begin, options


def main() -> None:
    parser = options(__doc__, "transformers_versions")
    parser.add_argument("folders", nargs="*")
    chosen = parser.parse_args()
    rows = [of_folder(folder) for folder in (None, *chosen.folders)]
    rows.sort(key=lambda row: [int(part) for part in row["transformers"].split(".")])
    begin("transformers_versions", chosen).add("versions", rows)


def of_folder(folder: str | None) -> dict[str, Any]:
    """What a process finds that imports transformers from `folder`."""
    search = [*([folder] if folder else []), *sys.path[1:]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    code = "import transformers_versions as one; one.report()"
    place = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=place,
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def report() -> None:
    """Print what is replaced, and left, by family."""
    import transformers

    from fastweights import patch_transformers
    from fastweights.engines.transformers.patch import SUBSTITUTES

    names = {one.name.split(".")[0] for one in SUBSTITUTES}
    models = Path(transformers.__file__).parent / "models"
    with patch_transformers() as patch:
        for file in sorted(models.glob("*/modeling_*.py")):
            text = file.read_text(encoding="utf-8")
            if any(f"def {name}(" in text or f"class {name}(" in text for name in names):
                import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        replaced = defaultdict(list)
        for name in patch.replaced:
            family, function = name.split(".", 1)
            if family != "torch":
                replaced[family].append(function)
        found = {
            "transformers": transformers.__version__,
            "replaced": dict(replaced),
            "left": patch.left,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
