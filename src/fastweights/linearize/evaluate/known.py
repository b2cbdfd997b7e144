"""What is known of a model on held-out text, so that no state of it reads the same text twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.modes import Mode, Teacher
from fastweights.linearize.evaluate.logits import (
    ReadOut,
    of_states,
    read_out,
    read_teacher,
    unwrap_adapters,
)

KEPT_BYTES = 1 << 28
"""Of final hidden states."""


class KnownText:
    """The final hidden states of a run's models on batches of text, and layers' distances from
    softmax, by the values of what is trained.

    Of branches and adapters the values count, and of other parameters that they are the same
    tensors, unchanged since. What is divided over processes is not kept.

    Args:
        most: How many bytes of states are kept, at most.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self.most = most
        self._states = dict[Hashable, Tensor]()
        self._distances = dict[Hashable, Tensor]()
        self._numbers = WeakKeyDictionary[nn.Module, int]()

    def student(self, model: Any, inputs: Mapping[str, Tensor]) -> ReadOut:
        """Return the `read_out` of a model as it is, in the mode of its linear attention."""
        return self._read(model, inputs, False, lambda: read_out(model, inputs))

    def softmax(
        self, model: Any, inputs: Mapping[str, Tensor], mode: Mode | None = None
    ) -> ReadOut:
        """Return the `read_teacher` of a model.

        Args:
            model: The linearized model.
            inputs: Its inputs.
            mode: A mode that passes the softmax output on, and must be called whatever is known.
        """
        read = lambda: read_teacher(model, inputs, mode or Teacher())  # noqa: E731
        return self._read(model, inputs, True, read, again=mode is not None)

    def distances(
        self, kind: Hashable, layers: Mapping[int, nn.Module], inputs: Mapping[str, Tensor]
    ) -> dict[int, Tensor] | None:
        """Return the layers' distances of a kind on a batch; None if one of them is not known."""
        keys = _keys(kind, layers, inputs)
        if keys is None or any(key not in self._distances for key in keys.values()):
            return None
        return {layer: self._distances[key] for layer, key in keys.items()}

    def keep_distances(
        self,
        kind: Hashable,
        layers: Mapping[int, nn.Module],
        inputs: Mapping[str, Tensor],
        found: Mapping[int, Tensor],
    ) -> None:
        """Keep the layers' distances of a kind on a batch."""
        keys = _keys(kind, layers, inputs)
        if keys is not None:
            self._distances.update({keys[layer]: found[layer] for layer in keys})

    def _read(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        is_softmax: bool,
        read: Callable[[], ReadOut],
        again: bool = False,
    ) -> ReadOut:
        inside = unwrap_adapters(model)
        own = self._digest(inside, is_softmax)
        key = None if own is None else (is_softmax, own, _digest(inputs.values()))
        if key in self._states and not again:
            return of_states(inside, self._states[key])
        found = read()
        # not logits in the place of states: they are large, and `of_states` does not take them
        if key is not None and found.states.shape[-1] < found.vocabulary:
            self._keep(key, found.states)
        return found

    def _keep(self, key: Hashable, states: Tensor) -> None:
        held = sum(kept.nbytes for kept in self._states.values())
        if held + states.nbytes <= self.most:
            self._states[key] = states.detach()

    def _digest(self, model: nn.Module, is_softmax: bool) -> Hashable | None:
        """What tells apart the model's states; None where that is not known."""
        if isinstance(model, FSDPModule):
            return None
        number = self._numbers.setdefault(model, len(self._numbers))
        named = dict(model.named_parameters())
        own = {n: p for n, p in named.items() if ".linear_branch." in n or ".lora_" in n}
        others = [(p.data_ptr(), p._version) for n, p in named.items() if n not in own]
        # softmax reads neither branches nor adapters
        if is_softmax:
            return number, *others
        trained = (p for branch in branches(model).values() for p in branch.parameters())
        values = _digest((*trained, *_adapters_that_add(own)))
        return None if values is None else (number, *others, values)


def _adapters_that_add(own: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The parameters of adapters, but for those that add zeros, as new ones do."""
    adding = {n.partition(".lora_")[0] for n, p in own.items() if ".lora_B" in n and p.any()}
    return (p for n, p in own.items() if ".lora_" in n and n.partition(".lora_")[0] in adding)


def _keys(
    kind: Hashable, layers: Mapping[int, nn.Module], inputs: Mapping[str, Tensor]
) -> dict[int, Hashable] | None:
    read = _digest(inputs.values())
    own = {layer: _digest(module.parameters()) for layer, module in layers.items()}
    if read is None or None in own.values():
        return None
    return {layer: (kind, layer, values, read) for layer, values in own.items()}


def _digest(tensors: Iterable[Tensor]) -> bytes | None:
    """A hash of some tensors' values, and of whether they are computed with in half precision; None
    where the values are elsewhere."""
    half = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    found = blake2b(str(half).encode())
    for tensor in tensors:
        if tensor.is_meta:
            return None
        whole = tensor.detach().cpu().contiguous()
        found.update(f"{whole.dtype} {list(whole.shape)}".encode())
        found.update(whole.flatten().view(torch.uint8).numpy().data)
    return found.digest()
