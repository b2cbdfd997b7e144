"""When the numbers of a tensor may be looked at: on an accelerator the host would wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


def cheap_to_look_at(x: Tensor) -> bool:
    """Whether values can be read without waiting for an accelerator, and outside of a graph."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()


def worth_waiting_for(x: Tensor) -> bool:
    """Whether what values decide (a faster path) is worth waiting for them: outside of training,
    whose steps follow each other on an accelerator without the host.
    """
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return cheap_to_look_at(x) or not torch.is_grad_enabled()
