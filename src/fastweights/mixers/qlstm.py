"""qLSTM: quasi LSTM, whose gates see the input alone (Stanić et al., 2023), as DSF eq. 8, 20 and 23
have it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    TokenContext,
    project_each,
    upcast,
)
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded


class QLSTM(Mixer):
    """
    f_q  σ(x W_q + b_q)    f_α  σ(x W_f + b_f), or reversed σ(-(x W_f + b_f))^a, a = ReLU(learnt)
    f_k  σ(x W_i + b_i)    f_g  1
    f_v  x W_v             d_k = d_v = H = d

    W_q is the LSTM's output gate. The LSTM's two tanh's are left out, as in the DSF.

    Attributes:
        reversed: the transition of S6, which the DSF finds better (Figure 3); a starts at 1
    """

    def __init__(self, d: int, reversed: bool = False) -> None:
        super().__init__(d)
        self.W_f, self.W_i, self.W_q = (Linear(d, d) for _ in range(3))
        self.W_v, self.W_o = Linear(d, d, bias=False), Linear(d, d, bias=False)
        self.a = nn.Parameter(torch.empty(1)) if reversed else None
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.a is not None:
            nn.init.ones_(self.a)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        q, k, v, forget = project_each(x, self.W_q, self.W_i, self.W_v, self.W_f)
        forget = upcast(forget)
        log_alpha = (
            F.logsigmoid(forget) if self.a is None else F.relu(self.a) * F.logsigmoid(-forget)
        )
        q, k, v, log_alpha = (s[..., None] for s in (q.sigmoid(), k.sigmoid(), v, log_alpha))
        return Decay(q, k, v, log_alpha), None
