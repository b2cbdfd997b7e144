"""When the numbers of a tensor may be looked at: on an accelerator the host would wait for them,
and fake tensors have none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastweights.recurrence.derivatives import transform_here


def cheap_to_look_at(x: Tensor) -> bool:
    """Whether values can be read without waiting for an accelerator, and outside of graphs and
    transforms.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or transform_here():
        return False
    return x.device.type == "cpu" and x.numel() > 0


def worth_waiting_for(x: Tensor) -> bool:
    """Whether what values decide (a faster path) is worth waiting for them: outside of training,
    whose steps follow each other on an accelerator without the host.
    """
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor) or transform_here():
        return False
    return cheap_to_look_at(x) or not torch.is_grad_enabled()
