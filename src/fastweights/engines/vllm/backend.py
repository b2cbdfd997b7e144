"""Our kind of layers among those of vLLM's that have states."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

NAME = "FASTWEIGHTS"
HOME = "fastweights.engines.vllm.states.StateBackend"


def state_backend() -> MambaAttentionBackendEnum:
    """The member of vLLM's enumeration, which is added to it.

    Every process needs it: those that run no model read it in what others tell them.
    """
    if NAME in MambaAttentionBackendEnum.__members__:
        return MambaAttentionBackendEnum[NAME]
    return MambaAttentionBackendEnum.register(NAME, HOME)
