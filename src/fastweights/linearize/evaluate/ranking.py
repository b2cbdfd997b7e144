"""The ranking of a model's layers: a value, and a file that other runs can use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastweights.errors import CheckpointError, reason_of


@dataclass(frozen=True)
class Ranking:
    """The layers of a softmax model in the order in which they should stay softmax.

    Attributes:
        criterion: What they were compared by: a name of `criteria.CRITERIA`, or a class's.
        measure: What was measured, and its unit.
        damage: By layer, what its linear attention costs.
        order: The layers, those first that are needed most as softmax.
        model: The `training.language.existing.fingerprint` of the softmax model.
        text: What it was measured on, in words.

    Raises:
        ValueError: If a damage is no finite number, or the order is not one of its layers.
    """

    criterion: str
    measure: str
    damage: Mapping[int, float]
    order: tuple[int, ...]
    model: str
    text: str

    def __post_init__(self) -> None:
        if not self.order or sorted(self.order) != sorted(self.damage):
            raise ValueError(
                f"a ranking with the order {list(self.order)} of the layers"
                f" {sorted(self.damage)}; it must have each of them once, and one at least"
            )
        if not all(math.isfinite(number) for number in self.damage.values()):
            raise ValueError(f"a ranking with the damage {dict(self.damage)}, which is not finite")

    def record(self) -> dict[str, Any]:
        """Return it as JSON values, as `read_ranking` reads them."""
        return asdict(self)

    def require(self, model: str, layers: Sequence[int]) -> None:
        """Check that this ranking is of a model, and has its layers.

        Args:
            model: The model's `fingerprint`.
            layers: The numbers of the layers that are to be linear.

        Raises:
            ValueError: If it is of another model, or a layer is missing.
        """
        if model != self.model:
            raise ValueError(
                f"this ranking is of another model: of the weights {self.model}, and the"
                f" model to convert has {model}; leave it out, and its own layers are ranked"
            )
        missing = sorted(set(layers) - set(self.order))
        if missing:
            raise ValueError(
                f"this ranking has no layers {missing}, which are to be converted; leave them out,"
                " or leave the ranking out, and all layers are ranked"
            )


def read_ranking(path: Path) -> Ranking:
    """Read the ``ranking.json`` of a run.

    Raises:
        CheckpointError: If it is not there, damaged, or of a version whose rankings could not be
            used again.
    """
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"cannot use {path} as a ranking ({reason_of(error)}); give the ranking.json that"
            " `fastweights linearize` of this version has written"
        ) from error


def _parse(found: Any) -> Ranking:
    damage = {int(layer): float(number) for layer, number in found["damage"].items()}
    texts = {name: str(found[name]) for name in ("criterion", "measure", "model", "text")}
    return Ranking(damage=damage, order=tuple(map(int, found["order"])), **texts)
