"""A pytest plugin for tests on a GPU: what spoils the CUDA context ends its process, and no other
test's result.

After an illegal address nothing works any more in that process, and a kernel that hangs never
comes back. The test that did it fails, and the process leaves; of several (`-n`), another one takes
its place and goes on with the next test.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

SECONDS = 120
"""That a test on a GPU may take, kernels' compilation included."""

SPOILT = pytest.StashKey[str]()


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports no other tests, which need packages that a GPU's machine may not have."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if "gpu" not in item.keywords:
        return (yield)
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report = yield
    if call.when == "call" and "gpu" in item.keywords and (error := context_error()):
        item.stash[SPOILT] = error
        report.outcome = "failed"
        report.longrepr = f"{report.longreprtext}\nthe CUDA context is lost: {error}".strip()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    done = yield
    if error := item.stash.get(SPOILT, None):
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        item.session.shouldfail = f"lost CUDA ({error}); with -n 1 the other tests go on"
    return done


def context_error() -> str:
    """What the device says that it can do nothing after; "" where it is well."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
