"""Servers of models as processes of their own, and requests to them."""

from __future__ import annotations

import json
import os
import signal
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

PATIENCE = 300.0
"""Seconds in which a server has to be there."""


@contextmanager
def http_server(
    command: list[str], log: Path, ending: signal.Signals = signal.SIGTERM, **settings: str
) -> Iterator[str]:
    """The address of the server that a module of Python is, which ends with the block.

    Args:
        command: The module and its arguments but for the port.
        log: The file that takes what it says.
        ending: The signal that it is ended by.
        settings: Of its environment.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}
    with log.open("w") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port)],
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1"},
            stdout=said,
            stderr=said,
        )
        try:
            address = f"http://localhost:{port}"
            _wait(address, server, log)
            yield address
        finally:
            server.send_signal(ending)
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
    given = {"model": "m", "temperature": 0, **body}
    data = json.dumps({name: value for name, value in given.items() if value is not None})
    return Request(f"{address}/v1/{path}", data.encode(), {"Content-Type": "application/json"})


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
