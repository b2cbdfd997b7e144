"""The papers' architectures by name, with their sources and numbers of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from fastweights.models.classify import (
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
)
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsForCausalLM
from fastweights.models.released import RELEASED, Fields
from fastweights.models.size import count_parameters


@dataclass(frozen=True)
class Preset:
    """A named architecture.

    Attributes:
        fields: of the configuration
        source: the paper, and what of it is not followed or not said
        published: the source's number of parameters, as rounded there; None if it gives none
        model: the class that the fields are for
    """

    fields: Fields
    source: str
    published: float | None = None
    model: type[PreTrainedModel] = FastWeightsForCausalLM

    def config(self, **overrides: Any) -> FastWeightsConfig:
        """Make the configuration, with other values for some fields.

        Raises:
            ValueError: The values do not fit, see `FastWeightsConfig`.
        """
        kind = cast(type[FastWeightsConfig], self.model.config_class)
        return kind(**{**self.fields, **overrides})

    def parameters(self) -> int:
        """Count the parameters of a model, without memory for them."""
        if self.model is FastWeightsForCausalLM:
            return count_parameters(self.config())
        with torch.device("meta"):
            return sum(p.numel() for p in self.model(self.config()).parameters())


def preset(name: str, **overrides: Any) -> FastWeightsConfig:
    """Make the configuration of a published architecture.

    Args:
        name: A key of `PRESETS`; ``fastweights list --presets`` prints them with their sources.
        **overrides: Fields of the configuration with other values, such as ``vocab_size=50257``.

    Raises:
        ValueError: The name is unknown, or the overrides do not fit.
    """
    return find_preset(name).config(**overrides)


def find_preset(name: str) -> Preset:
    """Find the preset of this name.

    Raises:
        ValueError: There is none; the message suggests names that come near.
    """
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ValueError(
            f"there is no preset {name!r}; did you mean {', '.join(near)}? All: fastweights list"
            " --presets"
        )
    return PRESETS[name]


# MesaNet: every layer on one backbone (appendices D and F) ----------------------------------------

KEY = 128
HAWK_WIDTH = {6: 906, 8: 1240, 12: 1920}
"""RG-LRU channels with which a Hawk layer has the 4 d² parameters of the others, by heads."""


def _mesanet(layers: int, heads: int, mixers: list[dict[str, Any]]) -> Fields:
    d = KEY * heads
    return {
        "vocab_size": 50_257,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "mixers": mixers,
        "intermediate_size": 3 * d,
        "tie_word_embeddings": True,
        "logit_cap": 30.0,
    }


def _mesanet_layers(heads: int) -> dict[str, list[dict[str, Any]]]:
    """Table 3, the sliding windows and the hybrid of section 5, by the end of their names."""
    mesa = {"name": "mesa", "heads": heads}
    hawk = {"name": "rglru", "heads": heads, "expand": HAWK_WIDTH[heads] / (KEY * heads)}
    rules = ("mamba2", "gla", "deltanet", "gated_deltanet", "mlstm")
    baselines = {
        f"-{rule.replace('_', '-')}": [{"name": "mesanet", "heads": heads, "rule": rule}]
        for rule in rules
    }
    windows = {
        f"-swa-{w}": [{"name": "swa", "heads": heads, "window": w}] for w in (4, 16, 64, 256, 1024)
    }
    transformer = {"-transformer": [{"name": "softmax", "heads": heads}]}
    return {
        "": [mesa],
        "-hawk": [hawk],
        "-hawk-mesa": [hawk, mesa],
        **baselines,
        **transformer,
        **windows,
    }


MESANET = {
    f"mesanet-{size}{end}": Preset(
        _mesanet(layers, heads, mixers), "MesaNet, appendices D, F", published
    )
    for size, layers, heads, published in (
        ("140m", 14, 6, 145e6),
        ("440m", 28, 8, 440e6),
        ("940m", 28, 12, 940e6),
    )
    for end, mixers in _mesanet_layers(heads).items()
}

# MetaLA: language models (Tables 4, 5, A9), Long Range Arena (Table A4), images (Table 6) ---------


def _metala(layers: int, d: int, glu: int, *, tied: bool = True, **mixer: Any) -> Fields:
    return {
        "vocab_size": 50_304,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "mixers": [{"name": "metala", "heads": d // 128, **mixer}],
        "intermediate_size": glu,
        "norm": "layer",
        "embedding_scale": 1.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
    }


SHAPES = "MetaLA, {}; shape not in the paper, chosen to have its size (GPT-NeoX vocabulary)"
ABLATIONS: dict[str, dict[str, Any]] = {
    "without-augmentation": {"augmented": False},
    "without-conv": {"conv": 1},
    "with-key": {"restore_key": True},
}
SCALED = {"380m": (24, 1024, 3072), "1b": (16, 2048, 6144), "3b": (32, 2560, 7680)}
"""Layers, width and GLU of Table A9's models."""

METALA = {
    "metala-360m": Preset(_metala(24, 1024, 2816), SHAPES.format("Table 5"), 0.36e9),
    **{
        f"metala-360m-{name}": Preset(_metala(24, 1024, 2816, **mixer), SHAPES.format("Table 8"))
        for name, mixer in ABLATIONS.items()
    },
    "metala-360m-gla": Preset(
        _metala(24, 1024, 2816, name="gla", heads=4), SHAPES.format("Table 5, GLA"), 0.36e9
    ),
    "metala-380m": Preset(_metala(*SCALED["380m"]), SHAPES.format("Table A9"), 0.38e9),
    "metala-1b": Preset(_metala(*SCALED["1b"]), SHAPES.format("Table A9"), 1e9),
    "metala-1.3b": Preset(_metala(24, 2048, 5632), SHAPES.format("Table 5, tied"), 1.3e9),
    "metala-1.4b": Preset(_metala(24, 2048, 5632, tied=False), SHAPES.format("Table 5"), 1.4e9),
    "metala-3b": Preset(_metala(*SCALED["3b"]), SHAPES.format("Table A9"), 3e9),
    "metala-380m-softmax": Preset(
        {**_metala(24, 1024, 3456, name="softmax"), "norm": "rms"},
        SHAPES.format("Table A9, LLaMA2"),
        0.41e9,
    ),
    **{
        f"metala-{size}-softmax": Preset(
            {**_metala(*SCALED[size], name="softmax"), "norm": "rms"},
            SHAPES.format("Table A9, LLaMA2"),
            published,
        )
        for size, published in (("1b", 1e9), ("3b", 3e9))
    },
    **{
        f"metala-{size}-hgrn2": Preset(
            _metala(*shape, name="hgrn2"), SHAPES.format("Table A8, HGRN2")
        )
        for size, shape in SCALED.items()
    },
}


def _metala_lra(depth: int, d: int, glu: int, **fields: Any) -> Fields:
    return {
        "hidden_size": d,
        "num_hidden_layers": depth,
        "mixers": [{"name": "metala", "heads": d // 4}],
        "intermediate_size": glu,
        "norm": "layer",
        **fields,
    }


_text, _pair = FastWeightsForSequenceClassification, FastWeightsForSequencePairClassification
_A4 = "MetaLA, Table A4; heads of 4 channels"
_BOTH, _DROPPED = {"bidirectional": True}, {"residual_dropout": 0.1}

METALA_LRA = {
    f"metala-lra-{task}": Preset(_metala_lra(*shape, **fields), _A4, None, model)
    for task, shape, model, fields in (
        ("listops", (6, 32, 64), _text, {"vocab_size": 18, "num_labels": 10}),
        ("text", (4, 128, 256), _text, {"vocab_size": 135, **_DROPPED}),
        ("retrieval", (2, 256, 512), _pair, {"vocab_size": 98, **_DROPPED, **_BOTH}),
        ("image", (6, 512, 512), _text, {"vocab_size": 256, "num_labels": 10, **_BOTH}),
        ("pathfinder", (6, 128, 128), _text, {"vocab_size": 256, **_BOTH}),
        ("path-x", (6, 32, 32), _text, {"vocab_size": 256, **_BOTH}),
    )
}


def _metala_deit(heads: int) -> Fields:
    d = 64 * heads
    return {
        "hidden_size": d,
        "num_hidden_layers": 12,
        "mixers": [{"name": "metala", "heads": heads}],
        "intermediate_size": 3 * d,
        "norm": "layer",
        "norm_eps": 1e-6,
        "num_labels": 1000,
        "class_token": True,
        "pooling": "last",
    }


_T6 = (
    "MetaLA, Table 6: DeiT's shape; a GLU of 3 d and both directions of the same weights give the"
    " paper's size"
)

METALA_IMAGE = {
    "metala-deit-tiny": Preset(_metala_deit(3), _T6, 6.1e6, FastWeightsForImageClassification),
    "metala-deit-small": Preset(_metala_deit(6), _T6, 23.7e6, FastWeightsForImageClassification),
}

# DSF and Zoology ----------------------------------------------------------------------------------

_LIKE_GPT2: Fields = {"norm": "layer", "embedding_scale": 1.0, "initializer_range": 0.02}
_NO_ROPE = {"rope": {"fraction": 0.0}}


def _mqar(mixer: dict[str, Any], **fields: Any) -> Fields:
    """Two layers of width 128 (the benchmark sweeps it), learnt positions, tied embeddings, one
    head.
    """
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "mixers": [mixer],
        "learnt_positions": 512,
    }
    return {
        **_LIKE_GPT2,
        **sizes,
        "tie_word_embeddings": True,
        "embedding_dropout": 0.1,
        "mlp": "identity",
        **fields,
    }


_GPT2_MLP = {"mlp": "plain", "hidden_act": "gelu", "mlp_bias": True}
_softmax_1 = {"name": "softmax", "heads": 1, "bias": True, **_NO_ROPE}
_AS_CODE = "DSF, code of Figures 1-3 (no attention dropout)"

MQAR = {
    "mqar-softmax": Preset(
        _mqar(_softmax_1),
        "Zoology and DSF, code: the norm in the MLP's place (no attention dropout)",
    ),
    "mqar-softmax-mlp": Preset(
        _mqar(_softmax_1, **_GPT2_MLP), "DSF, text: GPT-2 style (no attention dropout)"
    ),
    "mqar-linear": Preset(_mqar({"name": "linear", "heads": 1}), _AS_CODE),
    "mqar-normalized": Preset(
        _mqar({"name": "normalized", "heads": 1}), "DSF, text: all but the attention equal"
    ),
    "mqar-normalized-mlp": Preset(_mqar({"name": "normalized", "heads": 1}, **_GPT2_MLP), _AS_CODE),
    "mqar-qlstm": Preset(_mqar({"name": "qlstm"}), f"{_AS_CODE}; qLSTM alone, as the text has it"),
    "mqar-qlstm-reversed": Preset(
        _mqar({"name": "qlstm", "reversed": True}), f"{_AS_CODE}; qLSTM alone"
    ),
    "mqar-metala": Preset(
        _mqar({"name": "metala", "heads": 2, "conv": 2}, mlp="gated", learnt_positions=None),
        "MetaLA, appendix A4; d_k = d / 2, where the paper has d_k = d",
    ),
}


def _pythia(mixer: dict[str, Any], d: int = 512, layers: int = 6) -> Fields:
    sizes = {"vocab_size": 50_304, "hidden_size": d, "num_hidden_layers": layers, "mixers": [mixer]}
    return {**_LIKE_GPT2, **sizes, **_GPT2_MLP, "parallel_residual": True}


_J3 = (
    "DSF, appendix J.3: Pythia with another attention, which here has no rotary positions and no"
    " biases"
)


def _quarter_rope(heads: int) -> dict[str, Any]:
    return {"name": "softmax", "heads": heads, "bias": True, "rope": {"fraction": 0.25}}


PYTHIA = {
    "pythia-70m": Preset(_pythia(_quarter_rope(8)), "Pythia", 70_426_624),
    "pythia-410m": Preset(_pythia(_quarter_rope(16), 1024, 24), "Pythia", 405_334_016),
    "pythia-70m-linear": Preset(_pythia({"name": "linear", "heads": 8}), _J3, 70_426_624),
    "pythia-70m-normalized": Preset(_pythia({"name": "normalized", "heads": 8}), _J3, 70_426_624),
}

# hybrids by listing names -------------------------------------------------------------------------

_GRIFFIN: Fields = {
    "hidden_act": "gelu_pytorch_tanh",
    "mlp_bias": True,
    "norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _griffin(mixers: list[dict[str, Any]]) -> Fields:
    sizes = {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "intermediate_size": 3 * 768,
    }
    return {**_GRIFFIN, **sizes, "mixers": mixers}


_recurrent = {"name": "rglru", "heads": 16, "expand": 4 / 3}
_local = {"name": "swa", "heads": 6, "kv_heads": 1, "window": 1024}
_gemma_attention = {
    "name": "softmax",
    "heads": 10,
    "kv_heads": 1,
    "window": 2048,
    "rope": {"fraction": 0.5},
}

HYBRIDS = {
    "hawk": Preset(_griffin([_recurrent]), "Hawk (De et al., 2024), its pattern at width 768"),
    "griffin": Preset(
        _griffin([_recurrent, _recurrent, _local]),
        "Griffin (De et al., 2024), its pattern at width 768",
    ),
    "recurrentgemma-2b": Preset(
        {
            **_GRIFFIN,
            "vocab_size": 256_000,
            "hidden_size": 2560,
            "num_hidden_layers": 26,
            "mixers": [{"name": "rglru", "heads": 10}] * 2 + [_gemma_attention],
            "intermediate_size": 7680,
            "logit_cap": 30.0,
        },
        "RecurrentGemma (Botev et al., 2024); without the attention's one bias",
        2.7e9,
    ),
    "samba-421m": Preset(
        {
            "vocab_size": 32_000,
            "hidden_size": 1536,
            "num_hidden_layers": 12,
            "mixers": [{"name": "mamba"}, {"name": "swa", "heads": 12, "window": 2048}],
            "intermediate_size": 4096,
            "tie_word_embeddings": True,
            "embedding_scale": 1.0,
            "initializer_range": 0.02,
        },
        "Samba (Ren et al., 2024)",
        421e6,
    ),
    "based": Preset(
        {
            "vocab_size": 50_257,
            "mixers": [{"name": "based", "heads": 12}, {"name": "swa", "heads": 12, "window": 64}],
            "tie_word_embeddings": True,
        },
        "Based (Arora et al., 2024), its pattern at width 768, without its layers of convolution"
        " alone",
    ),
}

PRESETS: dict[str, Preset] = {
    **MESANET,
    **METALA,
    **METALA_LRA,
    **METALA_IMAGE,
    **MQAR,
    **PYTHIA,
    **HYBRIDS,
    **{name: Preset(*one) for name, one in RELEASED.items()},
}
