"""The architectures of released checkpoints, as their configurations have them, with the number of
their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Fields = Mapping[str, Any]


class Released(NamedTuple):
    """A released model.

    Attributes:
        fields: Of the configuration.
        source: The release.
        parameters: As rounded there.
    """

    fields: Fields
    source: str
    parameters: float


def _stack(layers: int, d: int, mixers: list[dict[str, Any]], vocabulary: int) -> Fields:
    """Mixers alone, with tied embeddings."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "mixers": mixers,
        "mlp": None,
        "embedding_scale": 1.0,
        "tie_word_embeddings": True,
    }


MAMBA = {
    f"mamba-{size}": Released(
        _stack(layers, d, [{"name": "mamba"}], 50_280), "Mamba (Gu & Dao, 2023), released", n
    )
    for size, layers, d, n in (
        ("130m", 24, 768, 130e6),
        ("370m", 48, 1024, 370e6),
        ("790m", 48, 1536, 790e6),
        ("1.4b", 48, 2048, 1.4e9),
        ("2.8b", 64, 2560, 2.8e9),
    )
}


def _mamba2(width: int, **fields: Any) -> dict[str, Any]:
    """Mamba-2 with heads of 64 channels of `width`, and states of 128."""
    return {"name": "mamba2", "heads": width // 64, "state": 128, **fields}


MAMBA2 = {
    f"mamba2-{size}": Released(
        _stack(layers, d, [_mamba2(2 * d)], 50_288), "Mamba-2 (Dao & Gu, 2024), released", n
    )
    for size, layers, d, n in (
        ("130m", 24, 768, 130e6),
        ("370m", 48, 1024, 370e6),
        ("780m", 48, 1536, 780e6),
        ("1.3b", 48, 2048, 1.3e9),
        ("2.7b", 64, 2560, 2.7e9),
    )
}

FALCON_MAMBA = {
    "falcon-mamba-7b": Released(
        {
            **_stack(64, 4096, [{"name": "mamba", "norm_eps": 1e-6}], 65_024),
            "tie_word_embeddings": False,
        },
        "Falcon-Mamba (Zuo et al., 2024), released",
        7.27e9,
    )
}


def _hybrid(
    pattern: list[int], mamba: dict[str, Any], softmax: dict[str, Any]
) -> list[dict[str, Any]]:
    """Softmax attention at these places of a pattern that is as long as the last of them says."""
    *places, length = pattern
    return [softmax if layer in places else mamba for layer in range(length)]


BAMBA = {
    "bamba-9b": Released(
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "mixers": _hybrid(
                [9, 18, 27, 32],
                _mamba2(8192),
                {"name": "softmax", "heads": 32, "kv_heads": 8, "rope": {"fraction": 0.5}},
            ),
            "intermediate_size": 14_336,
            "embedding_scale": 1.0,
        },
        "Bamba-9B (IBM, Princeton and others, 2024), released",
        9.8e9,
    )
}


def _granite(
    d: int, mixers: list[dict[str, Any]], layers: int, intermediate: int, **fields: Any
) -> Fields:
    """Multipliers are in the weights, as an import has them."""
    return {
        "vocab_size": 100_352,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "mixers": mixers,
        "intermediate_size": intermediate,
        "embedding_scale": 12.0,
        "tie_word_embeddings": True,
        **fields,
    }


def _nope(heads: int, kv_heads: int) -> dict[str, Any]:
    return {"name": "softmax", "heads": heads, "kv_heads": kv_heads, "rope": {"fraction": 0.0}}


_EXPERTS = {
    "name": "experts",
    "width": 512,
    "routing": {"count": 64, "chosen": 6},
    "shared": 1024,
}
_GRANITE = "Granite 4.0 (IBM, 2025), released; {}"

GRANITE = {
    "granite-4.0-h-1b": Released(
        _granite(1536, _hybrid([5, 10], _mamba2(3072), _nope(12, 4)), 40, 4096),
        _GRANITE.format("an MLP in every layer"),
        1.5e9,
    ),
    "granite-4.0-h-micro": Released(
        _granite(2048, _hybrid([5, 10], _mamba2(4096), _nope(32, 8)), 40, 8192),
        _GRANITE.format("an MLP in every layer"),
        3e9,
    ),
    "granite-4.0-h-tiny": Released(
        _granite(1536, _hybrid([5, 10], _mamba2(3072), _nope(12, 4)), 40, 1024, mlps=[_EXPERTS]),
        _GRANITE.format("6 of 64 experts and a shared one in every layer"),
        7e9,
    ),
}

FALCON_H1 = {
    "falcon-h1-0.5b": Released(
        {
            "vocab_size": 32_784,
            "hidden_size": 1024,
            "num_hidden_layers": 36,
            "mixers": [
                _mamba2(
                    1536,
                    expand=1.5,
                    eps=None,
                    beside=[
                        {
                            "name": "softmax",
                            "heads": 8,
                            "kv_heads": 2,
                            "width": 64,
                            "rope": {"base": 1e11},
                        }
                    ],
                )
            ],
            "intermediate_size": 2048,
            "embedding_scale": 1.0,
        },
        "Falcon-H1 (Zuo et al., 2025), released; its multipliers are in the weights",
        0.5e9,
    )
}

RELEASED = {**MAMBA, **MAMBA2, **FALCON_MAMBA, **BAMBA, **GRANITE, **FALCON_H1}
