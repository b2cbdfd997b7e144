"""Mamba as some benchmarks' code trains it, for the comparison with Mamba as it was meant."""

from __future__ import annotations

from torch import nn

from fastweights.mixers import Mamba


class Destroyed(Mamba):
    """
    f_q  x W_C             f_α  e^(Δ_t A),  Δ_t = softplus(x W¹_Δ W²_Δ + b_Δ)
    f_k  x W_B             f_g  SiLU(u W_z)
    f_v  Δ_t ⊙ x           d_v = H = expand·d,  d_k / H = N

    the weights of linear layers redrawn with a deviation of 0.02 and their biases zeroed, as GPT-2's initialisation
    does to every linear layer (dsf-mqar @ 7c5aff8, mad-lab before 756b19f): Δ starts at log 2 instead of 0.001 to 0.1.
    """

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.W_Delta_2.weight, std=0.02)
        nn.init.zeros_(self.W_Delta_2.bias)
