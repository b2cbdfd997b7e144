"""What cannot be linearized, and what to do about it."""

from __future__ import annotations


class CannotLinearize(ValueError):  # noqa: N818
    """A model, layer or call that has no linear counterpart here: what, why, and the way out."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[type[CannotLinearize], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.fix)
