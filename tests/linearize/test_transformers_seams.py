"""The parts of transformers that linearized models rely on and that it does not promise to keep: a
release that takes one away fails here, and says which.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama import modeling_llama

from families import teacher
from fastweights.linearize.convert import transformers_seams as seams
from fastweights.models.cache_names import CACHE


def has(owner: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"{owner} has no {', '.join(missing)} in this transformers"


def attention() -> Any:
    return teacher().model.layers[0].self_attn


def _configurations() -> None:
    has(attention(), "config")
    assert seams.configurations(teacher())


def _set_implementation() -> None:
    config = teacher().config
    has(config, "_attn_implementation_internal", "_attn_implementation")
    seams.set_implementation([config], "something")
    assert config._attn_implementation == "something"


def _use_implementation() -> None:
    model = teacher()
    before = model.config._attn_implementation
    with seams.use_implementation(model, "something"):
        assert model.config._attn_implementation == "something"
    assert model.config._attn_implementation == before


def _temporary_attention() -> None:
    has(AttentionInterface, "_global_mapping")
    has(AttentionMaskInterface, "_global_mapping")
    with seams.temporary_attention("something", print, print):
        assert "something" in AttentionInterface()
        assert "something" in AttentionMaskInterface()
    assert "something" not in AttentionInterface()
    assert "something" not in AttentionMaskInterface()


def _softmax_attention() -> None:
    has(modeling_llama, "eager_attention_forward")
    has(AttentionInterface, "get_interface")
    assert seams.softmax_attention("eager", attention()) is modeling_llama.eager_attention_forward
    assert seams.softmax_attention("sdpa", attention()) is AttentionInterface()["sdpa"]


def _attach_branch() -> None:
    assert not hasattr(attention(), "linear_branch")
    cache = set(inspect.signature(type(attention()).forward).parameters)
    assert CACHE in cache


def _skip_blocks() -> None:
    model, hidden = teacher(), torch.randn(1, 3, 32)
    with seams.skip_blocks(model.model.layers):
        assert torch.equal(model.model.layers[0](hidden, attention_mask=None), hidden)
    out = model.model.layers[0](hidden, position_embeddings=(torch.ones(1, 3, 8),) * 2)
    assert isinstance(out, torch.Tensor)


def _final_states() -> None:
    model, ids = teacher(), torch.arange(6)[None]
    assert seams.has_final_states(model)
    states = model.base_model(input_ids=ids).last_hidden_state
    assert torch.equal(seams.logits_of_states(model, states), model(input_ids=ids).logits)


def _execution_device() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    has(hooks.AlignDevicesHook(execution_device="cpu"), "execution_device")
    module = attention()
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="meta"))
    has(module, "_hf_hook")
    assert seams.execution_device(module) == torch.device("meta")


def _cache_layer() -> None:
    cache = DynamicCache()
    has(cache, "layers", "layer_class_to_replicate", "offloading")
    assert type(seams.cache_layer(cache, 2)) is DynamicLayer
    assert len(cache.layers) == 3
    has(cache.layers[0], "is_initialized", "keys", "values")


def _replace_cache_layer() -> None:
    cache = DynamicCache()
    layer = seams.cache_layer(cache, 0)
    seams.replace_cache_layer(cache, 0, "something")
    assert cache.layers == ["something"]
    has(layer, "lazy_initialization", "update", "get_seq_length", "get_mask_sizes", "crop", "reset")
    has(CacheLayerMixin, "offload", "reorder_cache")


def _make_class() -> None:
    made = seams.make_class("Something", (object,), {}, __name__)
    assert pickle.loads(pickle.dumps(made)) is made


def _register_configuration() -> None:
    class StandIn:
        @classmethod
        def from_dict(cls, fields: dict[str, Any], **_: Any) -> Any:
            return fields

    seams.register_configuration("something", StandIn)
    with pytest.raises(ValueError, match="something"):
        AutoConfig.for_model("something else")


def _configuration_class() -> None:
    assert seams.configuration_class("llama").__name__ == "LlamaConfig"


def _automatic_classes() -> None:
    found = seams.automatic_classes(seams.configuration_class("llama"))
    assert {automatic.__name__: model.__name__ for automatic, model in found.items()} == {
        "AutoModel": "LlamaModel",
        "AutoModelForCausalLM": "LlamaForCausalLM",
        "AutoModelForSequenceClassification": "LlamaForSequenceClassification",
        "AutoModelForTokenClassification": "LlamaForTokenClassification",
    }


def _position_ids_among() -> None:
    model, seen = teacher(), []

    def attend(_: Any, query: Any, *_others: Any, **options: Any) -> Any:
        seen.append(seams.position_ids_among(options))
        return query.transpose(1, 2), None

    with (
        seams.temporary_attention("something", attend, lambda **_: None),
        seams.use_implementation(model, "something"),
    ):
        model(torch.zeros(1, 3, dtype=torch.long))
    assert all(ids.tolist() == [[0, 1, 2]] for ids in seen)
    assert seen


SEAMS: dict[str, Callable[[], object]] = {
    "register_attention": lambda: (
        [has(interface, "register") for interface in (AttentionInterface, AttentionMaskInterface)]
        and None
    ),
    "temporary_attention": _temporary_attention,
    "softmax_mask": lambda: [seams.softmax_mask(name) for name in ("sdpa", "eager")],
    "softmax_attention": _softmax_attention,
    "configurations": _configurations,
    "implementation_of": lambda: has(teacher().config, "_attn_implementation"),
    "set_implementation": _set_implementation,
    "use_implementation": _use_implementation,
    "is_tracing": lambda: seams.is_tracing(torch.zeros(1)),
    "attach_branch": _attach_branch,
    "attentions_with_branch": lambda: has(attention(), "layer_idx"),
    "hide_positions": lambda: seams.hide_positions(attention()),
    "position_ids_among": _position_ids_among,
    "execution_device": _execution_device,
    "skip_blocks": _skip_blocks,
    "has_final_states": _final_states,
    "logits_of_states": _final_states,
    "decoder_layers": lambda: seams.decoder_layers(teacher()),
    "caches_among": lambda: has(seams.caches_among((), {"any": DynamicCache()})[0], "layers"),
    "cache_layer_names": lambda: has(teacher().config, "get_text_config"),
    "cache_layer": _cache_layer,
    "replace_cache_layer": _replace_cache_layer,
    "OwnInitialization": lambda: has(PreTrainedModel, "_init_weights"),
    "OwnCachePolicy": lambda: [
        has(PreTrainedModel, "_is_stateful"),
        has(GenerationMixin, "_prepare_cache_for_generation"),
    ],
    "change_class": lambda: seams.change_class(
        teacher().config, type("Other", (type(teacher().config),), {})
    ),
    "make_class": _make_class,
    "float32_children": lambda: has(PreTrainedModel, "_keep_in_fp32_modules_strict"),
    "convert_checkpoints_alike": lambda: seams.convert_checkpoints_alike("something", "mixtral"),
    "transformers_class": lambda: has(seams.transformers_class("LlamaForCausalLM"), "forward"),
    "language_model_types": lambda: has(seams.language_model_types(), "index"),
    "configuration_class": _configuration_class,
    "automatic_classes": _automatic_classes,
    "register_configuration": _register_configuration,
}
"""Every seam, and a question that fails by name where transformers no longer has what it needs."""


@pytest.mark.parametrize("seam", SEAMS)
def test_transformers_has_what_a_seam_relies_on(seam: str) -> None:
    SEAMS[seam]()


def test_every_seam_is_asked_for() -> None:
    """… and says what it relies on."""
    own = {
        name: member
        for name, member in vars(seams).items()
        if getattr(member, "__module__", None) == seams.__name__ and not name.startswith("_")
    }
    assert own.keys() == SEAMS.keys()
    for name, member in own.items():
        assert "elies on" in " ".join((member.__doc__ or "").split()), name


def test_no_other_file_touches_private_parts_of_others() -> None:
    package = Path(seams.__file__).parents[1]
    # a tensor's _version is documented in torch's notes on autograd
    private = re.compile(r"(?<!self)(?<!cls)(?<!super\(\))\._(?!version\b)[a-z]\w*|\.__class__\b")
    found = {
        f"{path.name}: {match}"
        for path in package.rglob("*.py")
        if path.name != "transformers_seams.py"
        for match in private.findall(path.read_text())
    }
    assert not found
