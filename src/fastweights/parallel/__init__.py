"""Long sequences over processes: each holds a slice of time of the same sequences."""

from fastweights.models.methods import use_method
from fastweights.parallel.batches import divide, sum_gradients
from fastweights.parallel.exchange import Message, record_messages
from fastweights.parallel.methods import HeadSharded, HybridSharded, TimeSharded

__all__ = [
    "HeadSharded",
    "HybridSharded",
    "Message",
    "TimeSharded",
    "divide",
    "record_messages",
    "sum_gradients",
    "use_method",
]
