"""The best state of what a stage trains, by held-out text: that before the stage is one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.training.loop.files import atomic_file
from fastweights.training.loop.metrics import Row

BEST = "best.safetensors"


@dataclass(frozen=True)
class BestLoss:
    """The lowest loss of a part so far, and after how many updates it was."""

    step: int
    loss: float


@dataclass(frozen=True, eq=False)
class BestState:
    """The best state of each part of a model that has a loss of its own.

    Attributes:
        losses: By the name of the loss.
        tensors: What is trained, by name, but for what only the end of the training has whole.
    """

    losses: Mapping[str, BestLoss]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, out: Path) -> BestState | None:
        """Read what `write` wrote; None if there is nothing."""
        if not (out / BEST).exists():
            return None
        with safe_open(out / BEST, "pt") as file:
            losses = json.loads(file.metadata()["losses"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls({name: BestLoss(**loss) for name, loss in losses.items()}, tensors)

    def write(self, out: Path) -> None:
        """Write to a file of the stage's folder, whole or not at all."""
        losses = json.dumps({name: asdict(loss) for name, loss in self.losses.items()})
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        with atomic_file(out / BEST) as new:
            save_file(tensors, new, metadata={"losses": losses})

    def beside(
        self, row: Row, parts: Mapping[str, list[str]], now: Mapping[str, Tensor]
    ) -> BestState | None:
        """Return the best of this and a later state; None if that is better in no part.

        Args:
            row: The losses of the later state, with its step.
            parts: The names of the tensors by the name of the loss.
            now: The tensors of the later state; of those that are missing the end's are meant.
        """
        better = [n for n, best in self.losses.items() if n in row and row[n] < best.loss]
        if not better:
            return None
        # parts may be of different steps, each of its own best one
        changed = {tensor for name in better for tensor in parts[name]}
        later = {name: BestLoss(int(row["step"]), row[name]) for name in better}
        kept = {name: x for name, x in self.tensors.items() if name not in changed}
        return BestState(
            {**self.losses, **later}, {**kept, **{n: x for n, x in now.items() if n in changed}}
        )

    def in_words(self, name: str, steps: int) -> str | None:
        """Say what a stage of so many steps did not gain; None if its end is its best."""
        unchanged = sum(best.step == 0 for best in self.losses.values())
        earlier = sum(0 < best.step < steps for best in self.losses.values())
        if unchanged == len(self.losses):
            return f"{name} gained nothing on held-out text: the model is as it was before."
        said = [
            f"{count} of its {len(self.losses)} losses on held-out text were lowest {when}"
            for count, when in ((unchanged, "before it"), (earlier, "at an earlier step"))
            if count
        ]
        return f"{name}: {' and '.join(said)}; that state is kept." if said else None
