"""The processes that hold slices of the same sequences, in the order of time."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastweights.parallel.exchange import gather, tie
from fastweights.recurrence import ShapeError
from fastweights.recurrence.effects import Effect, Neighbours

S = TypeVar("S")


class Slices(Neighbours):
    """The processes of a group, each of which holds a slice of time of the same sequences.

    Attributes:
        group: in it, process 0 has the first tokens
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.index, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        if self.index < 0:
            raise ValueError(
                "this process is not in the group; pass the group that its own slices of time are"
                " divided over"
            )

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh) -> Slices:
        """The processes of a group, or of a mesh of one dimension.

        Raises:
            TypeError: `group` is neither
            ValueError: the mesh has several dimensions, or this process is not in the group
        """
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"a mesh of {group.ndim} dimensions {group.mesh_dim_names}; pass the one that"
                    ' sequences are divided over, such as mesh["time"]'
                )
            return cls(group.get_group())
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"group is a {type(group).__name__}; pass a ProcessGroup, such as"
                " torch.distributed.group.WORLD after init_process_group, or a DeviceMesh"
            )
        return cls(group)

    def carry(self, effect: Effect[S], state: S) -> tuple[S, S]:
        own = effect.tensors()
        gathered = gather(self.group, own)
        before = after = state
        for index in range(self.count):
            before = after if index == self.index else before
            after = _pick(effect, gathered, index).after(after)
        if not any(tensor.requires_grad for tensor in gathered):
            return before, after
        return _tie_state(before, gathered), after

    def require_equal_lengths(self, length: int, device: torch.device) -> None:
        """Refuse slices of different lengths, where looking at them does not make the host wait
        for an accelerator.

        Raises:
            ShapeError: naming the length that each process has
        """
        if device.type != "cpu":
            return
        (gathered,) = gather(self.group, [torch.tensor(length)])
        lengths = gathered.tolist()
        if len(set(lengths)) > 1:
            of_each = ", ".join(f"{n} of process {i}" for i, n in enumerate(lengths))
            raise ShapeError(
                f"slices of one sequence have the same length on every process, not {of_each}; cut"
                f" the sequences to a multiple of {self.count} tokens, or pad them to one (keep ="
                " False, attention_mask = 0)"
            )


def _pick(effect: Effect[S], gathered: list[Tensor], index: int) -> Effect[S]:
    """The effect of process `index`, of the form of `effect`."""
    parts = iter(gathered)
    return effect.map(lambda _: next(parts)[index])


def _tie_state(state: Any, gathered: list[Tensor]) -> Any:
    if not isinstance(state, tuple):
        return tie([state], gathered)[0]
    return tuple(tie(state, gathered))
