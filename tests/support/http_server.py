"""vLLM's server as a process of its own, and requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PATIENCE = 300.0
"""Seconds in which a server has to be there."""


@contextmanager
def http_server(folder: Path, *arguments: str) -> Iterator[str]:
    """The address of a server of the model in `folder`, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    options = ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, *options], env={**os.environ, **SETTINGS}, stdout=log, stderr=log
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, server, folder / "server.log")
            yield address
        finally:
            server.terminate()
            server.wait(60)


def _wait(address: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            urlopen(f"{address}/health", timeout=5).close()
        except (URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")


def _post(address: str, path: str, body: dict[str, Any]) -> Request:
    data = json.dumps({"model": "m", "temperature": 0, **body}).encode()
    return Request(f"{address}/v1/{path}", data, {"Content-Type": "application/json"})


def ask(address: str, path: str, **body: Any) -> dict[str, Any]:
    """The first choice of an answer."""
    with urlopen(_post(address, path, body), timeout=PATIENCE) as answer:
        return json.load(answer)["choices"][0]


def ask_stream(address: str, path: str, most: int | None = None, **body: Any) -> list[dict]:
    """The first choices of the parts of a streamed answer; the connection ends after `most`."""
    parts = []
    with urlopen(_post(address, path, {**body, "stream": True}), timeout=PATIENCE) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            parts += json.loads(line.removeprefix(b"data: "))["choices"][:1]
            if len(parts) == most:
                break
    return parts
