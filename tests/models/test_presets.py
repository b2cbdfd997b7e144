"""The papers' architectures by name: their sizes, and that each is a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    BambaConfig,
    BambaForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
)
from transformers import RecurrentGemmaForCausalLM as RecurrentGemma

from fastweights import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, preset
from fastweights.importers import FAMILIES
from fastweights.importers.export import _facts
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.layers import GatedMLP
from fastweights.models import Preset

ROUNDING = 0.03
"""Sources round to two digits, or give shapes whose size is near the name; see DIFFERENCES for what
is further.
"""

DIFFERENCES = {
    "metala-3b": 0.05,
    "metala-3b-softmax": 0.05,
    "mamba2-1.3b": 0.04,
    "granite-4.0-h-micro": 0.07,
    "falcon-h1-0.5b": 0.05,
}
"""32 layers of width 2560, as Pythia has at this size, are 2.86 billion; the paper says 3. Releases
round to the digits of their names, to the last digit of which these are: 1.34, 3.19, 0.52 billion.
"""

PUBLISHED = {name: one for name, one in PRESETS.items() if one.published is not None}


def size(model: type[PreTrainedModel], config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(config).parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("name", PUBLISHED)
def test_size_is_the_published_one(name: str) -> None:
    published, found = PUBLISHED[name].published, PUBLISHED[name].parameters()
    assert published is not None
    assert found == pytest.approx(published, rel=DIFFERENCES.get(name, ROUNDING))
    if name.startswith(("lfm2-", "rwkv7-")):
        folded = 2 * PUBLISHED[name].fields["hidden_size"] if name.startswith("rwkv7-") else 0
        assert found + folded == published


def test_metala_images_to_the_last_published_digit() -> None:
    sizes = [PRESETS[f"metala-deit-{name}"].parameters() / 1e6 for name in ("tiny", "small")]
    assert [round(one, 1) for one in sizes] == [6.1, 23.7]


def test_pythia_is_that_of_transformers() -> None:
    sizes = {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    }
    theirs = size(GPTNeoXForCausalLM, GPTNeoXConfig(vocab_size=50_304, **sizes))
    assert PRESETS["pythia-70m"].parameters() == theirs == 70_426_624
    biases = 6 * 4 * 512
    assert PRESETS["pythia-70m-linear"].parameters() == theirs - biases
    assert PRESETS["pythia-70m-normalized"].parameters() == theirs - biases + 6 * 8 * 512


def test_recurrentgemma_is_that_of_transformers_but_for_one_bias() -> None:
    attention_layers, width = 8, 2560
    theirs = size(
        RecurrentGemma, RecurrentGemmaConfig(num_key_value_heads=1, intermediate_size=2 * 7680)
    )
    assert PRESETS["recurrentgemma-2b"].parameters() == theirs - attention_layers * width


def test_released_checkpoints_have_the_sizes_of_transformers_own() -> None:
    falcon = FalconMambaConfig(
        tie_word_embeddings=False, vocab_size=65_024, hidden_size=4096, num_hidden_layers=64
    )
    assert PRESETS["falcon-mamba-7b"].parameters() == size(FalconMambaForCausalLM, falcon)
    bamba = BambaConfig(vocab_size=128_256, mamba_d_state=128, attn_layer_indices=[9, 18, 27])
    assert PRESETS["bamba-9b"].parameters() == size(BambaForCausalLM, bamba)
    assert [PRESETS[name].parameters() for name in ("mamba-130m", "mamba2-130m")] == [
        129_135_360,
        128_989_632,
    ]


class Blank(CheckpointSource):
    """A release of which the settings alone are there."""

    names = frozenset()

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.settings = Settings({"model_type": kind, **CONFIG_MAPPING[kind](**fields).to_dict()})

    def read(self, name: str) -> Any:
        raise LookupError(name)


def lfm2(d: int, heads: int, width: int) -> dict[str, Any]:
    attention = {"num_attention_heads": heads, "num_key_value_heads": 8}
    attends = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    return {"hidden_size": d, "intermediate_size": width, **attention, **attends}


QWEN = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    }
}
SMALL_QWEN = {
    **QWEN,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
STARS = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
RELEASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-350m": ("lfm2", lfm2(1024, 16, 6656)),
    "lfm2-700m": ("lfm2", lfm2(1536, 24, 10_240)),
    "lfm2-1.2b": ("lfm2", lfm2(2048, 32, 12_288)),
    "nemotron-h-8b": ("nemotron_h", {"layers_block_type": [NEMOTRON[kind] for kind in STARS]}),
    "qwen3.5-0.8b": ("qwen3_5_text", SMALL_QWEN),
    "qwen3.5-9b": ("qwen3_5_text", QWEN),
    "jamba-v0.1": ("jamba", {}),
    "zamba-7b": ("zamba", {}),
    "zamba2-2.7b": ("zamba2", {"n_mamba_heads": 80, "num_mem_blocks": 2}),
}
"""Releases as transformers' configurations state them, whose defaults are one of each family."""
QUICK = ("lfm2-350m", "nemotron-h-8b", "qwen3.5-0.8b")


def facts(config: FastWeightsConfig) -> dict[str, Any]:
    with torch.device("meta"):
        return dict(_facts(FastWeightsForCausalLM(config)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RELEASES],
)
def test_presets_are_what_imports_of_the_releases_are(name: str) -> None:
    kind, fields = RELEASES[name]
    imported = FAMILIES[kind](Blank(kind, fields)).config
    assert facts(PRESETS[name].config()) == facts(imported)
    assert PRESETS[name].fields.keys() <= imported.to_dict().keys()


@pytest.mark.parametrize("scale", ["140m", "440m", "940m"])
def test_mesanet_layers_have_the_same_size(scale: str) -> None:
    mesa = PRESETS[f"mesanet-{scale}"].parameters()
    for name, one in PRESETS.items():
        if name.startswith(f"mesanet-{scale}"):
            assert one.parameters() == pytest.approx(mesa, rel=2e-3), name


def each_once(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]


def small_mixer(mixer: dict[str, Any]) -> dict[str, Any]:
    sizes = {"heads": 2, "kv_heads": 1, "expand": 1, "state": 4, "groups": 1, "value_heads": 4}
    sizes |= {"width": 8, "expand_k": 1.0, "expand_v": 1.0}
    sizes |= {f"{name}rank": 4 for name in ("", "decay_", "rate_", "gate_", "value_")}
    beside = [small_mixer(other) for other in mixer.get("beside", ())]
    shrunk = {name: size for name, size in sizes.items() if name in mixer}
    return {**mixer, **shrunk, **({"beside": beside} if beside else {})}


def small_mlp(mlp: dict[str, Any] | None) -> dict[str, Any] | None:
    sizes = {"width": 6, "routing": {"count": 4, "chosen": 2}, "shared": 8}
    return mlp and {**mlp, **{name: size for name, size in sizes.items() if name in mlp}}


def small_shared(one: Preset) -> dict[str, Any]:
    """Each of the blocks that layers share in a layer of its own."""
    blocks = one.fields.get("shared_blocks", [])
    fields = [
        {**block, "layers": [layer], "width": 6, "heads": 2} for layer, block in enumerate(blocks)
    ]
    return {"shared_blocks": fields, "num_hidden_layers": len(fields)} if fields else {}


def small(one: Preset) -> dict[str, Any]:
    """Overrides that keep each kind of layer and shrink all sizes."""
    mixers = [small_mixer(mixer) for mixer in each_once(one.fields["mixers"])]
    mlps = [small_mlp(mlp) for mlp in each_once(one.fields.get("mlps", []))] or None
    sizes = {
        "mlps": mlps,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": len(mixers),
        "mixers": mixers,
    }
    image = (
        {"image_size": 8, "patch_size": 4} if "class_token" in one.fields else {"vocab_size": 31}
    )
    return {**sizes, **image, **small_shared(one), "num_labels": 3}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [name for name in PRESETS if not name.startswith(("mesanet-4", "mesanet-9"))]
)
def test_every_preset_is_a_model_that_learns_something(name: str) -> None:
    torch.manual_seed(0)
    one = PRESETS[name]
    model = one.model(one.config(**small(one))).train()
    shape = (2, 2, 6) if "Pair" in one.model.__name__ else (2, 6)
    ids = torch.randint(31, shape)
    if one.model is FastWeightsForCausalLM:
        loss = model(ids, labels=ids).loss
    else:
        x = torch.randn(2, 3, 8, 8) if model.main_input_name == "pixel_values" else ids
        loss = model(x, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_fields_can_be_overridden() -> None:
    config = preset("mesanet-140m", vocab_size=300, num_hidden_layers=2)
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size, config.mlp_size) == (
        300,
        2,
        768,
        2304,
    )
    assert config.logit_cap == 30
    with torch.device("meta"):
        block = FastWeightsForCausalLM(preset("griffin")).model.layers[2]
    assert type(block.mixer).__name__ == "SlidingWindow"
    assert isinstance(block.mlp, GatedMLP)


def test_a_misspelt_name() -> None:
    with pytest.raises(ValueError, match="no preset 'mesanet-145m'; did you mean mesanet-140m"):
        preset("mesanet-145m")
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        preset("hawk", hiden_size=3)
