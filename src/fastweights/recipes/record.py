"""A plan as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastweights.budget import TrainingPlan
from fastweights.recipes.conversion import ConversionBudget

SHARED = ("total_operations", "hours", "device_hours", "cost")
TRAINING = ("model_operations", "executed_operations", "seconds_per_step")


def record_of(found: TrainingPlan | ConversionBudget) -> dict[str, Any]:
    """The numbers of a plan, with those that follow from them, in bytes, seconds and operations."""
    names = (*SHARED, *TRAINING) if isinstance(found, TrainingPlan) else (*SHARED, "memory")
    derived = {name: getattr(found, name) for name in names}
    return {**asdict(found), **derived, "steps": found.workload.steps}
