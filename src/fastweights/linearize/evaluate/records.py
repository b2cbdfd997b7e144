"""What the converted layers of a linearized model evaluate on a text, for the analysis."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastweights.analysis.profile import CapturedRecords
from fastweights.linearize.convert.attention import aligned_layers, attend_all
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.modes import AttentionCall, Student
from fastweights.recurrence import Recurrence
from fastweights.shapes import Output


class _RecordingStudent(Student):
    """Notes the recurrence of every layer."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[str, Recurrence]] = {}

    def attend(self, call: AttentionCall) -> Output:
        self.found[call.layer] = _name(call.branch.config), call.record()
        return super().attend(call)


def _name(config: LinearAttentionConfig) -> str:
    """The rule that takes softmax's place, or the features of the windowed one."""
    return config.features if config.rule == "windowed" else config.rule


def branch_records(model: Any, ids: Tensor) -> CapturedRecords:
    """What every converted layer of a linearized model evaluates on a text ``[1 t]``."""
    noting = _RecordingStudent()
    attend_all(model, {"input_ids": ids}, noting)
    paths = aligned_layers(model, blocks=False)
    return {paths[layer]: found for layer, found in sorted(noting.found.items())}
