"""Linearized models: equal to their originals where they must be, and to themselves token
by token.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import (
    FAMILIES,
    LAYERS,
    SOME_FAMILIES,
    assert_generates_as_it_reads,
    assert_same,
    generate,
    generated,
    held_bytes,
    logits,
    padded,
    positions,
    reread,
    shaken,
    student,
    teacher,
)
from fastweights import WindowedLinear
from fastweights.linearize import (
    RULES,
    AttentionCall,
    LinearAttentionConfig,
    Mode,
    Teacher,
    branches,
    cache_bytes,
    find_attention_layers,
    linearize,
    place_landmarks,
    use_mode,
)
from tolerances import SAME, assert_close, error

pytestmark = pytest.mark.sampled

WINDOWS = (0, 1, 2, 4)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_window = pytest.mark.parametrize("window", WINDOWS)


# the original -------------------------------------------------------------------------------------


@every_family
def test_a_window_over_all_tokens_is_the_original(family: str) -> None:
    inputs = padded()
    want = logits(teacher(family), inputs)
    model = shaken(linearize(teacher(family), LinearAttentionConfig(window=64)))
    assert_same(logits(model, inputs), want, family)
    short = logits(student(family), inputs)
    assert error(short[1], want[1]) > 1e3 * SAME
    with use_mode(model, Teacher()):
        assert torch.equal(logits(model, inputs), want)


@every_family
def test_generation_is_the_full_forward(family: str) -> None:
    assert_generates_as_it_reads(student(family), padded())


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_generation_with_landmarks_is_the_full_forward(family: str) -> None:
    model, inputs = linearize(teacher(family), LinearAttentionConfig("landmarks", 8, 4)), padded()
    place_landmarks(model, [inputs])
    assert_generates_as_it_reads(model, inputs)


def test_sites_say_what_attention_sees() -> None:
    first, *_ = find_attention_layers(teacher("gemma2"))
    assert (first.layer, first.path, first.window, first.softcap) == (
        0,
        "model.layers.0.self_attn",
        4096,
        50.0,
    )
    latent = find_attention_layers(teacher("deepseek_v3"))[0]
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.value_dim) == (4, 4, 16, 12)
    assert [site.scaling for site in find_attention_layers(teacher("opt"))] == [1.0] * LAYERS
    assert "sliding window of 4096" in str(first.skip_reason)
    assert first.refusal_reason is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3"])
def test_sites_are_found_without_weights(family: str) -> None:
    model = teacher(family)
    with torch.device("meta"):
        empty = type(model)(model.config).to(torch.bfloat16)
    assert find_attention_layers(empty) == find_attention_layers(model)


def test_probing_leaves_no_trace() -> None:
    model = teacher().train()
    config, modules = model.config, list(model.modules())
    before = copy.deepcopy(config.to_dict()), config._attn_implementation
    find_attention_layers(model)
    assert (config.to_dict(), config._attn_implementation) == before
    assert list(model.modules()) == modules
    assert model.training
    assert model(**padded()).logits.isfinite().all()


# layers and analogs -------------------------------------------------------------------------------


def test_only_chosen_layers_are_converted() -> None:
    model = student(layers=[1])
    assert list(branches(model)) == [1]
    assert list(branches(student("gemma2"))) == [1, 2]
    assert list(branches(student("gemma2", layers=[0, 2]))) == [0, 2]
    assert_generates_as_it_reads(model, padded())


def test_a_sliding_layer_that_is_asked_for_is_the_original_within_its_window() -> None:
    inputs = padded()
    model = linearize(teacher("gemma2"), LinearAttentionConfig(window=64), [0, 1, 2])
    assert_same(logits(model, inputs), logits(teacher("gemma2"), inputs), "sliding")


ANALOGS = {
    **{f"window-{w}": LinearAttentionConfig(window=w) for w in WINDOWS},
    **{f"two-{w}": LinearAttentionConfig(window=w, shared=False) for w in (0, 1, 4)},
    **{
        features: LinearAttentionConfig(features=features, window=3)
        for features in ("exp", "elu", "relu", "exp-skip", "elu-skip", "relu-skip")
    },
    "features": LinearAttentionConfig(feature_dim=3, window=3),
    "landmarks": LinearAttentionConfig("landmarks", window=3),
    "heads": LinearAttentionConfig(per_query_head=True, window=3),
    **{rule: LinearAttentionConfig(rule=rule, window=0) for rule in RULES},
}
every_analog = pytest.mark.parametrize("analog", ANALOGS.values(), ids=ANALOGS)


@every_analog
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "granite"])
def test_every_analog_decodes_as_it_reads(analog: LinearAttentionConfig, family: str) -> None:
    assert_generates_as_it_reads(student(family, analog), padded())


def test_scores_are_scaled_as_the_model_scales_them() -> None:
    field, analog = {"attention_multiplier": 0.7}, LinearAttentionConfig(window=64)
    want = logits(teacher("granite", **field), padded())
    assert_same(logits(student("granite", analog, **field), padded()), want, "0.7")


@every_window
def test_the_layer_is_the_equation(window: int) -> None:
    """o of one layer against literal sums over heads, queries and keys in float64."""
    seen: list[AttentionCall] = []

    class Noting(Mode):
        def attend(self, call: AttentionCall) -> Tensor:
            seen.append(replace(call, linear=lambda o=call.linear(): o))
            return seen[-1].linear()

    model = student("llama", LinearAttentionConfig(window=window))
    with use_mode(model, Noting()), torch.no_grad():
        model(**padded(pad=0))
    call, branch = seen[0], branches(model)[0]
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    b, t, heads, width = q.shape
    gamma = branch.mix.double().sigmoid()
    phi = {"q": weights(branch.phi_q, heads), "k": weights(branch.phi_k, k.shape[2])}
    want = torch.zeros(b, t, heads, v.shape[3], dtype=torch.float64)
    for i, n, h in torch.cartesian_prod(*map(torch.arange, (b, t, heads))).tolist():
        g = h // (heads // k.shape[2])
        scores = {
            s: q[i, n, h] @ k[i, s, g] / width**0.5 for s in range(max(n - window + 1, 0), n + 1)
        }
        top = max(scores.values(), default=0)
        shares = {s: gamma[h] * (score - top).exp() for s, score in scores.items()}
        fq = features(q[i, n, h], phi["q"][h])
        shares |= {
            s: fq @ features(k[i, s, g], phi["k"][g]) for s in range(n + 1) if s not in shares
        }
        want[i, n, h] = sum(share * v[i, s, g] for s, share in shares.items()) / sum(
            shares.values()
        )
    assert_close(call.linear().detach(), want.detach(), "o")


def weights(phi: Any, heads: int) -> Tensor:
    return phi.W.double().squeeze(-1).unflatten(0, (heads, -1))


def features(x: Tensor, W: Tensor) -> Tensor:
    return torch.cat([(W @ x).softmax(0), (-W @ x).softmax(0)])


# modes --------------------------------------------------------------------------------------------


def test_a_mode_lasts_for_its_block() -> None:
    model, inputs = student(), padded()
    before = logits(model, inputs)
    with pytest.raises(KeyError), use_mode(model, Teacher()):
        raise KeyError
    assert torch.equal(logits(model, inputs), before)


def test_the_teacher_generates_as_the_original() -> None:
    model, inputs = student(), padded()
    want = generated(teacher(), inputs)
    with use_mode(model, Teacher()):
        got = generated(model, inputs)
    assert all(map(torch.equal, got, want))


def test_a_call_has_the_record_and_both_outputs() -> None:
    calls: list[AttentionCall] = []

    class Listening(Mode):
        def attend(self, call: AttentionCall) -> Tensor:
            calls.append(call)
            assert call.softmax().shape == call.linear().shape
            return call.softmax()

    model, inputs = student(), padded()
    with use_mode(model, Listening()), torch.no_grad():
        got = model(**inputs, use_cache=False).logits
        record = calls[0].record()
    assert torch.equal(got, teacher()(**inputs).logits)
    assert [call.layer for call in calls] == list(range(LAYERS))
    assert isinstance(record, WindowedLinear)
    assert (record.window, record.shape) == (4, (2, 15, 4))


# generation ---------------------------------------------------------------------------------------


def test_beams_are_reordered() -> None:
    model, inputs = student(), padded()
    beams = {"num_beams": 4, "num_return_sequences": 2, "output_scores": True}
    with_cache, without = (
        generate(model, inputs, use_cache=cached, **beams) for cached in (True, False)
    )
    assert torch.equal(with_cache.sequences, without.sequences)
    assert torch.allclose(with_cache.sequences_scores, without.sequences_scores)


def test_several_sequences_are_sampled_of_each_prompt() -> None:
    model, inputs = student(), padded()
    runs, several = [], {"do_sample": True, "num_return_sequences": 3}
    for cached in (True, False):
        torch.manual_seed(3)
        runs.append(generated(model, inputs, use_cache=cached, **several)[0])
    assert runs[0].shape[0] == 6
    assert torch.equal(*runs)


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_prompt_may_be_read_in_chunks(chunk: int) -> None:
    model, inputs = student(), padded()
    want, got = generated(model, inputs), generated(model, inputs, prefill_chunk_size=chunk)
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1], "chunks")


@every_window
def test_a_conversation_goes_on_from_its_cache(window: int) -> None:
    model, inputs = student(analog=LinearAttentionConfig(window=window)), padded()
    out = generate(model, inputs)
    turn = padded(pad=0, t=4)["input_ids"]
    ids = torch.cat([out.sequences, turn], 1)
    mask = torch.cat(
        [inputs["attention_mask"], torch.ones(2, ids.shape[1] - 15, dtype=torch.long)], 1
    )
    inputs = {"input_ids": ids, "attention_mask": mask}
    again = generated(model, inputs, past_key_values=out.past_key_values)
    scratch = generated(model, inputs)
    assert torch.equal(again[0], scratch[0])
    assert_same(again[1], scratch[1], "turn")


@every_window
def test_padding_on_the_left_changes_nothing(window: int) -> None:
    model, inputs = student(analog=LinearAttentionConfig(window=window)), padded()
    alone = generated(model, {name: x[:1, 5:] for name, x in inputs.items()})
    both = generated(model, inputs)
    assert torch.equal(both[0][:1, 5:], alone[0])
    assert_same(both[1][:1], alone[1])


@every_window
def test_the_cache_does_not_grow(window: int) -> None:
    model = student(analog=LinearAttentionConfig(window=window))
    sizes = []
    for t in (20, 70):
        cache = DynamicCache()
        with torch.no_grad():
            model(padded(pad=0, t=t)["input_ids"], past_key_values=cache)
        sizes.append(cache_bytes(cache))
        assert held_bytes(cache) == sizes[-1]
        assert cache.get_seq_length() == t
    kept, state, ages = max(window - 1, 0) * 2 * 16 * 4, 2 * 8 * 9 * 4, max(window - 1, 0) * 8
    assert sizes == [LAYERS * 2 * (kept + state + ages)] * 2


def test_a_cache_can_be_kept_selected_repeated_and_emptied() -> None:
    model, inputs = student(), padded()
    cache = generate(model, inputs).past_key_values
    kept = copy.deepcopy(cache)
    turn = torch.full((2, 1), 7)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        want = model(turn, attention_mask=mask, past_key_values=cache).logits
        kept.batch_repeat_interleave(3)
        kept.batch_select_indices(torch.tensor([0, 5]))
        got = model(turn, attention_mask=mask, past_key_values=kept).logits
        assert error(got, want) <= SAME
        cache.reset()
        assert cache.get_seq_length() == 0
        again = model(
            **inputs, position_ids=positions(inputs["attention_mask"]), past_key_values=cache
        ).logits
    assert torch.equal(again, logits(model, inputs))


# precision, training ------------------------------------------------------------------------------


def test_low_precision_keeps_states_in_float32() -> None:
    model = student().to(torch.bfloat16)
    cache = DynamicCache()
    with torch.no_grad():
        model(padded(t=40)["input_ids"], past_key_values=cache)
    keys, values, memory, _ = cache.layers[0].state
    assert (keys.dtype, values.dtype, memory.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    sequences, got = generated(model, padded())
    want = reread(model, padded(), sequences)
    assert_close(got.float(), want.float(), "logits", torch.bfloat16)


def test_autocast_does_not_round_the_state() -> None:
    model, cache = student(), DynamicCache()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(padded(t=40)["input_ids"], past_key_values=cache)
    memory = cache.layers[0].state[2]
    assert memory.dtype == torch.float32
    assert not torch.equal(memory, memory.bfloat16().float())


def test_checkpointed_gradients_are_the_same() -> None:
    grads = []
    for checkpointing in (False, True):
        model, inputs = student().train(), padded()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    assert any("linear_branch" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert grad is not None, name
        assert error(grads[1][name], grad) <= SAME, name


def test_copies_are_models_of_their_own() -> None:
    model, inputs = student(), padded()
    want = logits(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(logits(twin, inputs), want)
        branches(twin)[0].mix.data.zero_()
    assert torch.equal(logits(model, inputs), want)
