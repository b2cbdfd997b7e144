"""The error for models that cannot be linearized."""

from __future__ import annotations


class CannotLinearize(ValueError):  # noqa: N818
    """A model, a layer or a call cannot be linearized; the message says why, and what to do.

    Attributes:
        what: What was asked for.
        why: Why it is not possible.
        fix: What to do instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[type[CannotLinearize], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.fix)
