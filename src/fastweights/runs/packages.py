"""Packages that only some features need."""

from __future__ import annotations

from importlib.util import find_spec


def require_package(package: str, feature: str, alternative: str) -> None:
    """Make sure that an optional package is installed, before anything that needs it begins.

    Args:
        package: its name, for ``import`` and for ``pip install``.
        feature: what needs it, the subject of the message.
        alternative: what to do without it, which ends the message.

    Raises:
        ValueError: it is missing.
    """
    if find_spec(package) is None:
        raise ValueError(f"{feature} needs {package}: pip install {package}, {alternative}")
