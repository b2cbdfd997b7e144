"""The architectures of released checkpoints, as their configurations have them, with the number of
their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


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


def _mamba2(width: int, **fields: Any) -> dict[str, Any]:
    """Mamba-2 with heads of 64 channels of `width`, and states of 128."""
    return {"name": "mamba2", "heads": width // 64, "state": 128, **fields}


def _hybrid(
    pattern: list[int], mamba: dict[str, Any], softmax: dict[str, Any]
) -> list[dict[str, Any]]:
    """Softmax attention at these places of a pattern that is as long as the last of them says."""
    *places, length = pattern
    return [softmax if layer in places else mamba for layer in range(length)]


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


def _lfm2(d: int, heads: int, intermediate: int) -> Fields:
    softmax = {
        "name": "softmax",
        "heads": heads,
        "kv_heads": 8,
        "qk_norm": 1e-5,
        "rope": {"base": 1e6},
    }
    return {
        "vocab_size": 65_536,
        "hidden_size": d,
        "num_hidden_layers": 16,
        "mixers": _hybrid([2, 5, 8, 10, 12, 14, 16], {"name": "shortconv", "conv": 3}, softmax),
        "intermediate_size": intermediate,
        "embedding_scale": 1.0,
        "tie_word_embeddings": True,
    }


def _rwkv(d: int, mixers: list[dict[str, Any]]) -> Fields:
    """Layers of time and of channel mixing in turn."""
    return {
        **_stack(len(mixers), d, mixers, 65_536),
        "norm": "layer",
        "tie_word_embeddings": False,
    }


def _rwkv6(layers: int, d: int) -> Fields:
    time = {"name": "rwkv6", "heads": d // 64, "eps": 64e-5}
    return _rwkv(d, [time, {"name": "rwkv4_channel", "width": 7 * d // 2}] * layers)


def _rwkv7(layers: int, d: int, decay: int, gate: int) -> Fields:
    time = {
        "name": "rwkv7",
        "heads": d // 64,
        "decay_rank": decay,
        "rate_rank": decay,
        "gate_rank": gate,
        "value_rank": 64 if decay > 64 else 32,
    }
    channel = {"name": "rwkv7_channel"}
    later = [{**time, "residual": True}, channel]
    return _rwkv(d, [time, channel, *later * (layers - 1)])


_LN0 = "; the norm of the embeddings is in their table, as an import has it"


def _shared(layers: list[int], d: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A block of Zamba's without positions."""
    none = {"fraction": 0.0}
    return {"layers": layers, "width": 4 * d, "heads": heads, "rope": none, **fields}


_head = {"name": "mamba", "expand": 1, "rank": 232}


_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""Mamba-2, attention and MLPs, as NVIDIA states them."""


def _nemotron() -> Fields:
    kinds = {"M": _mamba2(8192, groups=8), "*": {**_nope(32, 8), "width": 128}}
    ends = [*_NEMOTRON[1:], ""]
    pairs = [pair for pair in zip(_NEMOTRON, ends, strict=True) if pair[0] != "-"]
    mlp = {"name": "plain", "width": 21_504}
    return {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "num_hidden_layers": len(pairs),
        "mixers": [kinds[kind] for kind, _ in pairs],
        "mlps": [mlp if behind == "-" else None for _, behind in pairs],
        "hidden_act": "relu2",
        "embedding_scale": 1.0,
    }


def _qwen(d: int, layers: int, intermediate: int, heads: int, served: int, **fields: Any) -> Fields:
    """Three layers of gated DeltaNet, with 16 heads of 128 keys that serve so many of values each,
    in front of one of attention, with so many heads of 256 channels.
    """
    delta = {
        "name": "gated_deltanet",
        "heads": 16,
        "value_heads": 16 * served,
        "expand_k": 2048 / d,
        "expand_v": served * 2048 / d,
        "eps": 1e-6,
        "floor": 1e-6,
    }
    softmax = {
        "name": "softmax",
        "heads": heads,
        "kv_heads": heads // 4,
        "width": 256,
        "qk_norm": 1e-6,
        "gated": True,
        "rope": {"base": 1e7, "fraction": 0.25},
    }
    return {
        "vocab_size": 248_320,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "mixers": [delta, delta, delta, softmax],
        "intermediate_size": intermediate,
        "norm_eps": 1e-6,
        "embedding_scale": 1.0,
        **fields,
    }


_EYES = "Qwen3.5 (Qwen, 2026), released; its model of text"

RELEASED: dict[str, tuple[Fields, str, float]] = {
    **{
        f"mamba-{size}": (
            _stack(layers, d, [{"name": "mamba"}], 50_280),
            "Mamba (Gu & Dao, 2023), released",
            n,
        )
        for size, layers, d, n in (
            ("130m", 24, 768, 130e6),
            ("370m", 48, 1024, 370e6),
            ("790m", 48, 1536, 790e6),
            ("1.4b", 48, 2048, 1.4e9),
            ("2.8b", 64, 2560, 2.8e9),
        )
    },
    **{
        f"mamba2-{size}": (
            _stack(layers, d, [_mamba2(2 * d)], 50_288),
            "Mamba-2 (Dao & Gu, 2024), released",
            n,
        )
        for size, layers, d, n in (
            ("130m", 24, 768, 130e6),
            ("370m", 48, 1024, 370e6),
            ("780m", 48, 1536, 780e6),
            ("1.3b", 48, 2048, 1.3e9),
            ("2.7b", 64, 2560, 2.7e9),
        )
    },
    "falcon-mamba-7b": (
        {
            **_stack(64, 4096, [{"name": "mamba", "norm_eps": 1e-6}], 65_024),
            "tie_word_embeddings": False,
        },
        "Falcon-Mamba (Zuo et al., 2024), released",
        7.27e9,
    ),
    "bamba-9b": (
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
    ),
    "granite-4.0-h-1b": (
        _granite(1536, _hybrid([5, 10], _mamba2(3072), _nope(12, 4)), 40, 4096),
        _GRANITE.format("an MLP in every layer"),
        1.5e9,
    ),
    "granite-4.0-h-micro": (
        _granite(2048, _hybrid([5, 10], _mamba2(4096), _nope(32, 8)), 40, 8192),
        _GRANITE.format("an MLP in every layer"),
        3e9,
    ),
    "granite-4.0-h-tiny": (
        _granite(1536, _hybrid([5, 10], _mamba2(3072), _nope(12, 4)), 40, 1024, mlps=[_EXPERTS]),
        _GRANITE.format("6 of 64 experts and a shared one in every layer"),
        7e9,
    ),
    "falcon-h1-0.5b": (
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
    ),
    **{
        f"lfm2-{size}": (_lfm2(d, heads, width), "LFM2 (Liquid AI, 2025), released", n)
        for size, d, heads, width, n in (
            ("350m", 1024, 16, 4608, 354_483_968),
            ("700m", 1536, 24, 6912, 742_489_344),
            ("1.2b", 2048, 32, 8192, 1_170_340_608),
        )
    },
    **{
        f"rwkv6-{size}": (_rwkv6(layers, d), f"RWKV-6 Finch (Peng et al., 2024), released{_LN0}", n)
        for size, layers, d, n in (("1.6b", 24, 2048, 1.6e9), ("3b", 32, 2560, 3.1e9))
    },
    **{
        f"rwkv7-{size}": (
            _rwkv7(layers, d, decay, gate),
            f"RWKV-7 Goose (Peng et al., 2025), released{_LN0}",
            n,
        )
        for size, layers, d, decay, gate, n in (
            ("0.1b", 12, 768, 64, 128, 191_034_624),
            ("0.4b", 24, 1024, 64, 128, 450_767_872),
            ("1.5b", 24, 2048, 96, 256, 1_527_404_544),
            ("2.9b", 32, 2560, 96, 320, 2_947_735_040),
        )
    },
    "zamba-7b": (
        {
            **_stack(76, 3712, [{**_head, "beside": [_head]}], 32_000),
            "hidden_act": "gelu",
            "shared_blocks": [_shared([2, *range(7, 76, 6)], 3712, 16)],
        },
        "Zamba-7B-v1 (Glorioso et al., 2024), released",
        7.23e9,
    ),
    "zamba2-2.7b": (
        {
            **_stack(54, 2560, [_mamba2(5120, state=64)], 32_000),
            "hidden_act": "gelu",
            "shared_blocks": [
                _shared([6, 18, 30, 42, 51], 2560, 32, rank=128),
                _shared([12, 24, 36, 47], 2560, 32, rank=128),
            ],
        },
        "Zamba2-2.7B (Zyphra, 2024), released",
        2.7e9,
    ),
    "nemotron-h-8b": (_nemotron(), "Nemotron-H-8B (NVIDIA, 2025), released", 8.1e9),
    "jamba-v0.1": (
        {
            "vocab_size": 65_536,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "mixers": _hybrid(
                [4, 8], {"name": "mamba", "norm_eps": 1e-6, "affine": True}, _nope(32, 8)
            ),
            "mlps": [
                {"name": "gated", "width": 14_336},
                {
                    "name": "experts",
                    "width": 14_336,
                    "routing": {"count": 16, "chosen": 2, "normalized": False},
                },
            ],
            "norm_eps": 1e-6,
            "embedding_scale": 1.0,
        },
        "Jamba (Lieber et al., 2024), released; 2 of 16 experts in every other layer",
        52e9,
    ),
    "qwen3.5-0.8b": (_qwen(1024, 24, 3584, 8, 1, tie_word_embeddings=True), _EYES, 0.75e9),
    "qwen3.5-9b": (_qwen(4096, 32, 12_288, 16, 2), _EYES, 9e9),
}
"""Released models: the fields of the configuration, the release, and its number of parameters."""
