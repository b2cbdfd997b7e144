"""Derivatives of what processes exchange: refused in every way of asking for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from fastweights.parallel.exchange import exchange, gather


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("alone") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def by_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> object:
    return torch.autograd.grad(f(x), [x], create_graph=True)


def by_backward(f: Callable[[Tensor], Tensor], x: Tensor) -> object:
    return torch.autograd.backward(f(x), inputs=[x], create_graph=True)


def by_transform(f: Callable[[Tensor], Tensor], x: Tensor) -> object:
    return torch.func.grad(f)(x)


@pytest.mark.parametrize("send", [gather, exchange])
@pytest.mark.parametrize("way", [by_grad, by_backward, by_transform])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_further_derivatives_are_refused(alone: Any, send: Any, way: Any) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="processes exchange"):
        way(lambda x: send(alone, [x])[0].sin().sum(), x)
