"""Parameters that half precision is too coarse for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


class WideParameters(nn.Module):
    """A module whose parameters are of float32, or wider, in a model of half precision as well.

    Frequencies are multiplied by as many tokens as there are: 2⁻⁹ of one is a whole radian behind a
    thousand of them.

    Attributes:
        wide: Which of the module's own parameters; None for all.
    """

    wide: ClassVar[tuple[str, ...] | None] = None

    def _is_wide(self, name: str) -> bool:
        return self.wide is None or name in self.wide

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and self._is_wide(name) and _is_half(param.dtype):
            param = nn.Parameter(param.detach().float(), param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        chosen = [p for n, p in self._parameters.items() if p is not None and self._is_wide(n)]
        kept = {id(s) for p in chosen for s in (p, p.grad)}

        def apply(s: Any) -> Tensor:
            changed = fn(s)
            if id(s) in kept and _is_half(changed.dtype):
                return s.to(changed.device, torch.float32)
            return changed

        return super()._apply(apply, recurse)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)
