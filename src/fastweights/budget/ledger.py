"""Bytes that tensors take while functions run, counted as their memory is made and given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import finalize

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLedger(TorchDispatchMode):
    """Counts the memory of what torch's operations make inside the block, tensors without numbers
    included.

    Attributes:
        live: Bytes that are in use now.
        peak: The most bytes that were in use at once, since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = set[int]()

    def know(self, *tensors: Tensor) -> None:
        """Leave the memory of these out: it was there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage()._cdata)

    def restart(self) -> int:
        """Begin a new peak, and return what is in use now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._enter(leaf.untyped_storage())
        return made

    def _enter(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
