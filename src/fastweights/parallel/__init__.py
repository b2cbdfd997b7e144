"""Long sequences over processes: methods of evaluation for slices of time."""

from fastweights.parallel.exchange import Message, record_messages
from fastweights.parallel.methods import HeadSharded, HybridSharded, TimeSharded

__all__ = ["HeadSharded", "HybridSharded", "Message", "TimeSharded", "record_messages"]
