"""What a training takes, computed before it begins: operations, memory, exchange, time, cost."""

from fastweights.budget.decoding import Decoding, decoding
from fastweights.budget.devices import ACCELERATORS, CPU, Accelerator, find_accelerator
from fastweights.budget.footprint import Footprint, Footprints, StepShape, UntraceableError, trace
from fastweights.budget.memory import DeviceMemory, Placing, device_memory
from fastweights.budget.operations import (
    Parameters,
    TokenOperations,
    count_by_part,
    count_operations,
)
from fastweights.budget.training import (
    NoRoomError,
    TrainingPlan,
    Workload,
    plan_fitting,
    plan_training,
)

__all__ = [
    "ACCELERATORS",
    "CPU",
    "Accelerator",
    "Decoding",
    "DeviceMemory",
    "Footprint",
    "Footprints",
    "NoRoomError",
    "Parameters",
    "Placing",
    "StepShape",
    "TokenOperations",
    "TrainingPlan",
    "UntraceableError",
    "Workload",
    "count_by_part",
    "count_operations",
    "decoding",
    "device_memory",
    "find_accelerator",
    "plan_fitting",
    "plan_training",
    "trace",
]
