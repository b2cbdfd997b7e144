"""Optional packages, which only some features need."""

from __future__ import annotations

from importlib.util import find_spec


def require_package(package: str, feature: str, alternative: str) -> None:
    """Check that an optional package is installed, before anything that needs it begins.

    Args:
        package: Its name, for ``import`` and for ``pip install``.
        feature: What needs it; the subject of the message.
        alternative: What to do without it; ends the message.

    Raises:
        ValueError: If the package is missing.
    """
    if find_spec(package) is None:
        raise ValueError(f"{feature} needs {package}: pip install {package}, {alternative}")
