"""Softmax attention as transformers names it, for the families that use it in all or some
layers."""

from __future__ import annotations

from typing import Any

from fastweights.importers.plan import ConstantTensor, Table, linear
from fastweights.importers.source import Settings

STRETCHES = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "context": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
}
"""Types of RoPE scaling → fields of `Rope` and what transformers calls them."""

HEAD_NORMS: Table = {f"mixer.norm_{name}.weight": f"self_attn.{name}_norm.weight" for name in "qk"}


def attention(
    settings: Settings, window: int | None = None, *, rotary: bool = True
) -> dict[str, Any]:
    """Return the entry of `mixers` for the attention that these settings describe.

    Args:
        settings: The checkpoint's.
        window: How many tokens a query sees; None for all.
        rotary: Whether there are rotary positions.
    """
    return {
        "name": "softmax",
        "heads": settings["num_attention_heads"],
        "kv_heads": settings["num_key_value_heads"],
        "width": (
            settings.get("head_dim", None)
            or settings["hidden_size"] // settings["num_attention_heads"]
        ),
        "window": window,
        "rope": rope(settings) if rotary else {"fraction": 0.0},
    }


def rope(settings: Settings, layers: str | None = None) -> dict[str, float]:
    """Return the fields of `Rope`, the rotary positions, that these settings describe.

    Args:
        settings: The checkpoint's.
        layers: The kind of layers whose they are; None where all have the same.

    Raises:
        ValueError: If the type of rotary positions is not supported.
    """
    given = settings["rope_parameters"]
    given = given if layers is None else given[layers]
    kind = given["rope_type"]
    if kind not in STRETCHES:
        raise ValueError(
            f"a {settings.kind} checkpoint with rope_type = {kind!r} cannot be imported, only with "
            f"{' or '.join(map(repr, STRETCHES))}"
        )
    stretch = {field: given[name] for field, name in STRETCHES[kind].items()}
    return {
        "base": given["rope_theta"],
        "fraction": given.get("partial_rotary_factor", 1.0),
        **stretch,
    }


def projections(biased: str, theirs: str = "self_attn") -> Table:
    """Map the four matrices of attention and their biases.

    Args:
        biased: The projections that have a bias, such as "qkv"; if any has, the others' are zero.
        theirs: Name of their attention module.
    """
    table: Table = {}
    for name in "qkvo":
        table |= linear(f"mixer.W_{name}", f"{theirs}.{name}_proj", bias=name in biased)
        if biased and name not in biased:
            table[f"mixer.W_{name}.bias"] = ConstantTensor(0.0)
    return table
