"""One Hugging Face model for every mixer: saving, forward, loss, training."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from fastweights import (
    FastWeightsCache,
    FastWeightsConfig,
    FastWeightsForCausalLM,
    FastWeightsModel,
    evaluate,
)
from fastweights.layers import TokenContext
from fastweights.models.loss import (
    Term,
    cross_entropy,
    cross_entropy_and_log_z,
    next_token_loss,
    squared_log_z,
)
from kinds import form_of, one_of_each, slow_but
from model_laws import assert_checkpointed_gradients, assert_read_in_any_cut, moved
from tiny import LAYERS, VOCABULARY, tiny, tiny_config, tokens

pytestmark = pytest.mark.sampled

every_model = pytest.mark.parametrize("layers", LAYERS)
each_kind = pytest.mark.parametrize("layers", one_of_each(LAYERS))
each_form = pytest.mark.parametrize("layers", one_of_each(LAYERS, form_of))


# configuration ------------------------------------------------------------------------------------


def test_default_config_is_valid_and_small_ones_round_trip(tmp_path: Path) -> None:
    assert FastWeightsConfig().layer_mixers == [{"name": "metala"}] * 12
    config = tiny_config("hybrid", logit_cap=30, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is FastWeightsConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert FastWeightsConfig.from_json_file(tmp_path / "config.json").mixers == config.mixers


def test_mixers_repeat_over_the_depth() -> None:
    config = tiny_config("hybrid", num_hidden_layers=5)
    assert [m["name"] for m in config.layer_mixers] == [
        "metala",
        "softmax",
        "gated_deltanet",
        "metala",
        "softmax",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": []}, "name at least one"),
        ({"mixers": [{"name": "metalla"}]}, "unknown mixer 'metalla'; there are .*metala"),
        ({"mixers": [{"name": "metala", "head": 2}]}, "does not take head; it takes d, heads"),
        (
            {"mixers": [{"name": "metala", "heads": 3}]},
            "not divisible by heads = 3; use 1, 2, 4, 8",
        ),
        ({"mixers": [{"heads": 3}]}, 'lacks "name"'),
        ({"mixers": [{"name": "metala", "d": 16}]}, "hidden_size"),
        ({"mixers": [{"name": "metala"}] * 3}, "lists 3 layers, num_hidden_layers is 2"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"intermediate_size": 0}, "mlp_size = 0"),
        ({"logit_cap": 0}, "logit_cap = 0"),
        ({"norm_eps": 0.0}, "norm_eps = 0"),
        ({"norm_eps": float("nan")}, "norm_eps = nan; it is above 0, and finite"),
        ({"logit_cap": float("inf")}, "logit_cap = inf; it is above 0, or None, and finite"),
        ({"num_layers": 3}, "did you mean 'num_hidden_layers'"),
    ],
)
def test_config_errors_say_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


# initialisation -----------------------------------------------------------------------------------


def test_weights_start_as_stated() -> None:
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(
        tiny_config("mamba", hidden_size=64, num_hidden_layers=8, vocab_size=500)
    )
    block = model.model.layers[0]
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert block.mlp.W_1.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert block.mixer.W_o.weight.std().item() == pytest.approx((2 / 8 / 128) ** 0.5, rel=0.05)
    assert block.mlp.W_3.weight.std().item() == pytest.approx(
        (2 / 8 / block.mlp.W_3.in_features) ** 0.5, rel=0.05
    )
    step = F.softplus(block.mixer.W_Delta_2.bias)
    assert step.min() > 0.9e-3
    assert step.max() < 1.1e-1


# saving and loading -------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float32], [torch.bfloat16]))
def test_loads_bit_for_bit(layers: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(layers, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is FastWeightsForCausalLM
    saved = model.state_dict()
    assert all(
        torch.equal(saved.pop(name).to(value.dtype), value)
        for name, value in loaded.state_dict().items()
    )
    assert not saved
    logits = loaded(tokens(2, 5)).logits
    assert logits.dtype == dtype
    assert_close(logits, model.to(dtype)(tokens(2, 5)).logits, rtol=0, atol=0)


@each_form
def test_whatever_a_checkpoint_lacks_starts_properly_and_nothing_else_changes(
    layers: str, tmp_path: Path
) -> None:
    model = tiny(layers, torch.float32)
    usual = {name: 20 + 2 * value.abs().max() for name, value in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.add_(0.5)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    names = [name for name in saved if ".layers.0." in name]
    for lacking in (names[::2], names[1::2]):
        present = {name: value for name, value in saved.items() if name not in lacking}
        save_file(present, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks {len(lacking)} weights.*strict=False"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, strict=False).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in present.items())
        assert all(
            loaded[name].isfinite().all() and loaded[name].abs().max() < usual[name]
            for name in lacking
        )


def test_loads_in_shards_with_a_device_map(tmp_path: Path) -> None:
    model = tiny("hybrid", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert_close(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits, rtol=0, atol=0)


def test_the_vocabulary_can_grow() -> None:
    model, ids = tiny("metala", torch.float32), tokens(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 3)
    assert_close(model(ids).logits[..., :VOCABULARY], before)
    assert model.config.vocab_size == VOCABULARY + 3


@each_form
def test_half_precision_trains(layers: str) -> None:
    ids = tokens(2, 6)
    plain = tiny(layers, torch.float32).train()(ids, labels=ids).loss
    halved = tiny(layers, torch.bfloat16).train()(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tiny(layers, torch.float32).train()(ids, labels=ids).loss
    for loss in (halved, mixed):
        loss.backward()
        assert loss.dtype == torch.float32
        assert_close(loss, plain, rtol=2e-2, atol=0)


@every_model
def test_autocast_does_not_reach_into_the_recurrence(layers: str) -> None:
    mixer = tiny(layers, torch.float32).model.layers[0].mixer
    x = torch.randn(2, 70, 16)
    recurrence, _ = mixer.project(x, TokenContext.start(x))
    plain, state = evaluate(recurrence)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(evaluate(recurrence), (plain, state), rtol=0, atol=0)


def test_tied_embeddings_are_one_parameter_saved_once(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_the_trunk_loads_alone(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is FastWeightsModel
    assert torch.equal(
        trunk.norm(trunk(tokens(1, 4)).last_hidden_state),
        model.model.norm(model.model(tokens(1, 4))[0]),
    )
    trunk.save_pretrained(tmp_path / "trunk")
    with pytest.raises(ValueError, match="lm_head"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "trunk")


def test_foreign_and_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SafetensorError):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(RuntimeError, match="size"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama' model"):
        FastWeightsForCausalLM.from_pretrained(tmp_path)


# forward ------------------------------------------------------------------------------------------


@each_form
def test_cut_padded_and_packed_sequences(layers: str) -> None:
    assert_read_in_any_cut(tiny(layers))


def test_embeddings_may_be_given_instead_of_ids() -> None:
    model, ids = tiny(), tokens(2, 5)
    assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


def test_embeddings_enter_at_unit_scale() -> None:
    model, ids = tiny(hidden_size=64), tokens(1, 5)
    first = model(ids, output_hidden_states=True).hidden_states[0]
    assert_close(first, 8 * model.get_input_embeddings()(ids))


def test_outputs_asked_for() -> None:
    model, ids = tiny("hybrid", logit_cap=0.1), tokens(2, 5)
    output = model(ids, logits_to_keep=2, output_hidden_states=True, use_cache=False)
    assert output.logits.shape == (2, 2, VOCABULARY)
    assert output.logits.abs().max() <= 0.1
    assert len(output.hidden_states) == 4
    assert output.past_key_values is None
    assert_close(
        model(ids, logits_to_keep=torch.tensor([1, 3])).logits, model(ids).logits[:, [1, 3]]
    )
    logits, cache = model(ids, return_dict=False)
    assert logits.shape == (2, 5, VOCABULARY)
    assert isinstance(cache, FastWeightsCache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "no tokens"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"must be \[batch, time\]"),
        ({"input_ids": torch.full((1, 2), VOCABULARY)}, "vocabulary from 0 to 30"),
        ({"input_ids": tokens(1, 3), "attention_mask": torch.ones(1, 1, 3, 3)}, "4 axes"),
        ({"input_ids": tokens(1, 3), "attention_mask": torch.ones(1, 4)}, r"needs \[1, 3\]"),
        (
            {"input_ids": tokens(1, 3), "labels": tokens(1, 2)},
            r"must be \[batch, time\] = \[1, 3\]",
        ),
        ({"input_ids": tokens(1, 3), "output_attentions": True}, "attention_map"),
        (
            {"input_ids": tokens(1, 3), "labels": torch.full((1, 3), VOCABULARY)},
            "labels contain 31, the vocabulary reaches from 0 to 30, and -100",
        ),
        (
            {"input_ids": tokens(1, 3), "targets": torch.full((1, 3), -1)},
            "targets contain -1, the vocabulary",
        ),
        ({"inputs_embeds": torch.zeros(1, 3, 8)}, r"\[batch, time, hidden_size = 16\]"),
    ],
)
def test_inputs_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny()(**arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[1, 2]]}, "input_ids are a list; pass a tensor"),
        ({"input_ids": tokens(1, 3).numpy()}, "input_ids are a ndarray; pass a tensor"),
        ({"input_ids": tokens(1, 3).double()}, "input_ids are torch.float64.*ids.long()"),
        ({"input_ids": tokens(1, 3) > 3}, "input_ids are torch.bool"),
        ({"input_ids": tokens(1, 3).byte()}, "input_ids are torch.uint8"),
        (
            {"input_ids": tokens(1, 3), "labels": tokens(1, 3).float()},
            "labels are torch.float32; they are token ids or -100",
        ),
        (
            {"inputs_embeds": torch.zeros(1, 3, 16)},
            "inputs_embeds are torch.float32, the model torch.float64",
        ),
    ],
)
def test_inputs_of_other_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tiny()(**arguments)


def test_a_cache_of_another_model() -> None:
    wide, cache = tiny(hidden_size=32), FastWeightsCache()
    wide(tokens(1, 3), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="go on from a state of this mixer"):
        tiny()(tokens(1, 1), past_key_values=cache)


def test_caches_that_do_not_fit() -> None:
    model, cache = tiny(), FastWeightsCache()
    model(tokens(2, 3), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="holds 2 sequences, the input 3"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="model of 2 layers, this one has 3"):
        tiny("hybrid")(tokens(2, 1), past_key_values=cache)
    with pytest.raises(TypeError, match="FastWeightsCache"):
        model(tokens(2, 1), past_key_values=((),))
    with pytest.raises(NotImplementedError, match="deepcopy"):
        cache.crop(1)


def test_a_cache_can_be_copied_repeated_selected_and_reset() -> None:
    model, ids, cache = tiny("hybrid"), tokens(2, 6), FastWeightsCache()
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        kept = copy.deepcopy(cache)
        after = model(ids[:, 5:], past_key_values=cache, use_cache=True).logits
        kept.batch_repeat_interleave(2)
        kept.batch_select_indices(torch.tensor([2, 0]))
        assert kept.batch_size == 2
        assert_close(model(ids[[1, 0], 5:], past_key_values=kept).logits, after[[1, 0]])
    assert cache.nbytes == sum(state.nbytes for state in cache.states) > 0
    cache.reset()
    assert (len(cache), cache.get_seq_length(), cache.nbytes, cache.batch_size) == (0, 0, 0, -1)


# loss ---------------------------------------------------------------------------------------------


def plain_loss(
    logits: torch.Tensor, labels: torch.Tensor, items: int | None = None
) -> torch.Tensor:
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / ((labels[:, 1:] != -100).sum() if items is None else items)


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_loss_is_the_plain_one(items: int | None, chunk: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(9, (2, 6))
    labels[0, :3] = -100

    def logits(x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(x @ weight.mT / 2)

    chunked, plain = (
        next_token_loss(logits, x, labels, items=items, chunk=chunk),
        plain_loss(logits(x), labels, items),
    )
    assert_close(chunked, plain)
    assert_close(torch.autograd.grad(chunked, (x, weight)), torch.autograd.grad(plain, (x, weight)))
    assert torch.autograd.gradcheck(
        lambda x: next_token_loss(logits, x, labels, items=items, chunk=chunk), x
    )


def test_no_labels_no_loss() -> None:
    labels = torch.full((1, 3), -100)
    assert next_token_loss(lambda x: x, torch.randn(1, 3, 4), labels, chunk=8).item() == 0


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_squared_log_z_is_palms(items: int | None, chunk: int) -> None:
    """Mean of (log Σ_v exp z_v)² over the counted tokens, in float64, gradients included."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(9, (2, 6))
    labels[0, :3] = -100

    def losses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return next_token_loss(
            lambda x: x @ weight.mT,
            *(x, labels),
            items=items,
            chunk=chunk,
            term=cross_entropy_and_log_z,
        )

    total, count = 0.0, 0
    for row, targets in zip((x @ weight.mT).detach().numpy(), labels.numpy(), strict=True):
        for z, target in zip(row[:-1], targets[1:], strict=True):
            if target != -100:
                total += math.log(sum(math.exp(float(number)) for number in z)) ** 2
                count += 1
    loss, log_z = losses(x, weight)
    assert log_z.item() == pytest.approx(total / (items or count), rel=1e-13)
    assert_close(loss, plain_loss(x @ weight.mT, labels, items))
    assert torch.autograd.gradcheck(losses, (x, weight))


def test_squared_log_z_of_no_labels_is_zero() -> None:
    labels, x = torch.full((1, 3), -100), torch.full((1, 3, 4), torch.inf, requires_grad=True)
    assert next_token_loss(lambda x: x, x, labels, chunk=8, term=squared_log_z).item() == 0


def test_the_model_says_its_squared_log_z_beside_an_unchanged_loss() -> None:
    model, ids = tiny(), tokens(2, 9)
    plain, both = model(ids, labels=ids), model(ids, labels=ids, squared_log_z=True)
    assert plain.squared_log_z is None
    assert torch.equal(both.loss, plain.loss)
    log_z = torch.logsumexp(plain.logits[:, :-1].double(), -1)
    assert_close(both.squared_log_z, log_z.square().mean())
    assert model(ids, squared_log_z=True).squared_log_z is None
    assert torch.equal(
        model(ids, targets=ids, squared_log_z=True).loss, model(ids, targets=ids).loss
    )


class Largest(TorchDispatchMode):
    """The most elements of any tensor computed inside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("term", [cross_entropy, cross_entropy_and_log_z])
def test_chunked_loss_never_holds_all_logits(term: Term) -> None:
    x, weight = torch.randn(2, 33, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    labels = torch.randint(50, (2, 33))
    largest, saved = [], []
    for chunk in (8, 64):
        kept: list[int] = []
        with (
            Largest() as seen,
            saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x),
        ):
            next_token_loss(
                lambda x: x @ weight.mT, x, labels, chunk=chunk, term=term
            ).sum().backward()
        largest.append(seen.elements)
        saved.append(max(kept))
    assert largest == [8 * 50, 64 * 50]
    assert saved[0] <= 64 * 4 < saved[1] == 64 * 50


@pytest.mark.parametrize("fields", [{}, {"logit_cap": 0.5}, {"tie_word_embeddings": True}])
def test_model_loss(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(**fields), tokens(2, 9)
    labels = ids.masked_fill(ids == 5, -100)
    monkeypatch.setattr("fastweights.models.hf.LOGITS_AT_ONCE", 4 * VOCABULARY)
    evaluated = model(ids, labels=labels)
    assert_close(evaluated.loss, plain_loss(evaluated.logits, labels))
    trained = model.train()(ids, labels=labels)
    assert trained.logits is None
    assert trained.past_key_values is None
    assert_close(trained.loss, evaluated.loss)
    assert model(ids, labels=labels, skip_logits=False).logits is not None
    assert_close(
        model(ids, labels=labels, num_items_in_batch=4).loss,
        plain_loss(evaluated.logits, labels, 4),
    )


def test_aligned_labels_get_logits_of_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(2, 9)
    labels = ids.masked_fill(ids % 4 != 0, -100)
    computed: list[int] = []
    plain = model.logits
    monkeypatch.setattr(model, "logits", lambda x: computed.append(len(x)) or plain(x))
    loss = model(ids, targets=labels, skip_logits=True).loss
    assert computed == [int((labels != -100).sum())]
    assert_close(loss, F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten()))
    with pytest.raises(ValueError, match="either labels or targets"):
        model(ids, labels=labels, targets=labels)


# training -----------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(layers: str, reentrant: bool) -> None:
    assert_checkpointed_gradients(moved(tiny(layers)), reentrant=reentrant)


def trainer(model: torch.nn.Module, path: Path, steps: int, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 8, seed=3)]
    settings = TrainingArguments(
        output_dir=str(path),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    return Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:4])


@pytest.mark.long
def test_trainer_learns_evaluates_and_resumes(tmp_path: Path) -> None:
    whole = trainer(tiny(dtype=torch.float32), tmp_path / "whole", 6)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before
    assert whole.predict(whole.eval_dataset).predictions.shape == (4, 8, VOCABULARY)
    resumed = trainer(tiny(dtype=torch.float32), tmp_path / "resumed", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_close(list(resumed.model.parameters()), list(whole.model.parameters()))


def test_gradient_accumulation_divides_by_all_labels(tmp_path: Path) -> None:
    together = trainer(tiny(dtype=torch.float32), tmp_path, 1, seed=1)
    halves: list[float] = []

    together.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: halves.append(float(kwargs["num_items_in_batch"])),
        with_kwargs=True,
    )
    together.train()
    assert halves == [2 * 2 * 7] * 2


@pytest.mark.parametrize("layers", ["metala", "hybrid"])
def test_lora_trains_and_reloads(layers: str, tmp_path: Path) -> None:
    model, ids = tiny(layers, torch.float32), tokens(2, 6)
    base = copy.deepcopy(model)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["W_q", "W_v"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    adapted.eval().save_pretrained(tmp_path)
    logits = adapted(input_ids=ids).logits
    assert not torch.allclose(logits, base(ids).logits)
    assert_close(
        PeftModel.from_pretrained(base, tmp_path)(input_ids=ids).logits, logits, rtol=0, atol=0
    )
    assert_close(adapted.merge_and_unload()(ids).logits, logits)
