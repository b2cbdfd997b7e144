"""The tails of short convolutions belong to them by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastweights.layers import ShortConvolution, TokenContext
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from tolerances import assert_close


class Crossed(Mixer):
    """Two convolutions that are called in an order that the length decides."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.parts = nn.ModuleDict({"q": ShortConvolution(d, 4)})
        self.conv_k = ShortConvolution(d, 4)
        self.norm, self.W_o = nn.Identity(), nn.Identity()

    def project(self, x: Tensor, past: TokenContext) -> tuple[Decay, None]:
        convolutions = {"q": self.parts["q"], "k": self.conv_k}
        order = "kq" if x.shape[1] % 2 else "qk"
        found = {name: convolutions[name](x, past)[:, :, None] for name in order}
        return Decay(found["q"], found["k"], x[:, :, None], None), None


def test_convolutions_find_their_own_tails_in_any_order() -> None:
    torch.manual_seed(0)
    mixer, x = Crossed(3), torch.randn(2, 9, 3)
    want, _ = mixer(x)
    left, state = mixer(x[:, :4])
    assert {name: tail.shape for name, tail in state.tails.items()} == {
        "parts.q": (2, 3, 3),
        "conv_k": (2, 3, 3),
    }
    right, _ = mixer(x[:, 4:], state)
    assert_close(torch.cat([left, right], 1), want, "y in two parts")


def test_a_tail_that_is_missing_or_left_twice_is_an_error() -> None:
    mixer, x = Crossed(3), torch.randn(1, 4, 3)
    _, state = mixer(x)
    with pytest.raises(
        LookupError, match=r"no tail of a convolution 'conv_k', only of \['parts.q'\]"
    ):
        mixer(x, state._replace(tails={"parts.q": state.tails["parts.q"]}))
    past = TokenContext.start(x)
    mixer.conv_k(x, past)
    with pytest.raises(ValueError, match="two convolutions called 'conv_k' read one sequence"):
        mixer.conv_k(x, past)
