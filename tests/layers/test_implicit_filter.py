"""Filters made of positions: when one is made anew."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastweights.layers import ImplicitFilter


def filters() -> ImplicitFilter:
    torch.manual_seed(0)
    return ImplicitFilter(heads=3, length=11, width=5, bands=2, frequency=3.0)


def written_behind_autograd(made: ImplicitFilter) -> None:
    made.omega.data.mul_(2)


def replaced(made: ImplicitFilter) -> None:
    made.D.data = made.D.data + 1


def loaded(made: ImplicitFilter) -> None:
    made.load_state_dict({name: 0.5 * p for name, p in made.state_dict().items()})


def converted(made: ImplicitFilter) -> None:
    made.double()


def of_gradients(made: ImplicitFilter) -> Tensor:
    with torch.enable_grad():
        return made().detach()


@pytest.mark.parametrize("change", [written_behind_autograd, replaced, loaded, converted])
def test_a_filter_is_that_of_its_weights(change: Callable[[ImplicitFilter], None]) -> None:
    made = filters()
    with torch.inference_mode():
        first = made()
        assert made() is first
    change(made)
    with torch.no_grad():
        assert not torch.equal(made(), first.to(made().dtype)) or change is converted
        assert torch.equal(made(), of_gradients(made))
        assert torch.equal(copy.deepcopy(made)(), made())


def test_gradients_go_through_a_filter_that_was_kept() -> None:
    made = filters()
    with torch.inference_mode():
        made()
    made().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in made.parameters())


def test_autocast_does_not_leave_its_filter_behind() -> None:
    made = filters()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        narrow = made()
    with torch.no_grad():
        assert torch.equal(made(), of_gradients(made))
        assert not torch.equal(made(), narrow.float())
