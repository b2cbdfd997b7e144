"""What cannot be linearized, and what to do about it."""

from __future__ import annotations


class CannotLinearize(ValueError):  # noqa: N818
    """A model, a layer or a call that cannot be linearized; the message says why, and what to do.

    Attributes:
        what: what was asked for.
        why: why it cannot be.
        fix: what to do instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[type[CannotLinearize], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.fix)
