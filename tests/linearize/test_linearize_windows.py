"""Gated rules beside a window: every rule × normalisers × sinks × gates × what a model can do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from families import (
    CONVOLVED,
    LAYERS,
    assert_generates_as_it_reads,
    assert_same,
    generated,
    held_bytes,
    logits,
    padded,
    reread,
    shaken,
    student,
    teacher,
)
from fastweights import Windowed, WindowedLinear
from fastweights.linearize import (
    RULES,
    LinearAttentionConfig,
    LinearOnly,
    WindowOnly,
    branches,
    cache_bytes,
    linearize,
    use_mode,
)
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.convert.config import GATED
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.transfer import KeepGraphs, LossOnly, only_branches
from fastweights.linearize.evaluate.comparison import ablations, difference_with_full_window
from tolerances import SAME, error

pytestmark = pytest.mark.sampled

BESIDE = {
    **{rule: LinearAttentionConfig(rule=rule, window=4) for rule in RULES if rule != "supra"},
    "gla-own": LinearAttentionConfig(rule="gla", window=3, shared=False),
    "sinks": LinearAttentionConfig(window=3, sinks=2),
    "gla-sinks": LinearAttentionConfig(rule="gla", window=3, sinks=2),
    "landmarks-sinks": LinearAttentionConfig("landmarks", window=3, sinks=2),
    "landmarks-by-head": LinearAttentionConfig(
        "landmarks", window=3, sinks=2, head_windows=((2, 4), (5, 1), (3, 3))
    ),
    "kda-sinks": LinearAttentionConfig(rule="kda", window=1, sinks=1),
    **{
        f"{rule}-pooled": LinearAttentionConfig(rule=rule, window=3, gates="pooled")
        for rule in GATED
    },
}
EVERY = BESIDE | CONVOLVED
every_rule = pytest.mark.parametrize("analog", BESIDE.values(), ids=BESIDE)
EACH_TIME = (
    "windowed",
    "gla",
    "mesa",
    "gla-own",
    "landmarks-sinks",
    "landmarks-by-head",
    "kda-sinks",
    "gated_deltanet-pooled",
    "gla, convolved",
    "mesa, convolved",
)
"""Every kind of record, normaliser, gate and window; the others are slow tests."""


def most_of(analogs: Mapping[str, LinearAttentionConfig]) -> pytest.MarkDecorator:
    most = [
        pytest.param(analog, id=name, marks=() if name in EACH_TIME else pytest.mark.slow)
        for name, analog in analogs.items()
    ]
    return pytest.mark.parametrize("analog", most)


SOME = (
    *("gla-sinks", "landmarks-sinks", "kda", "mesa"),
    *("windowed, convolved", "gated_deltanet, convolved"),
)
some_rules = pytest.mark.parametrize("analog", [EVERY[name] for name in SOME], ids=SOME)


@every_rule
def test_a_window_over_all_tokens_is_the_original(analog: LinearAttentionConfig) -> None:
    inputs = padded()
    model = shaken(linearize(teacher(), replace(analog, window=15, head_windows=())))
    assert_same(logits(model, inputs), logits(teacher(), inputs))
    assert difference_with_full_window(student(analog=analog), inputs) < SAME


@most_of(EVERY)
def test_generation_is_the_full_forward(analog: LinearAttentionConfig) -> None:
    """With padding, alone, and in chunks."""
    model, inputs = student(analog=analog), padded()
    sequences, found = generated(model, inputs)
    assert_same(found, reread(model, inputs, sequences))
    alone = {name: x[:1, 5:] for name, x in inputs.items()}
    assert_same(found[:1], generated(model, alone)[1])
    _, in_chunks = generated(model, inputs, prefill_chunk_size=4)
    assert_same(in_chunks, found)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "granite"])
def test_other_families_scale_cap_and_widen(family: str) -> None:
    inputs = padded()
    assert_generates_as_it_reads(student(family, BESIDE["gla-sinks"]), inputs)
    whole = linearize(teacher(family), replace(BESIDE["kda"], window=15))
    assert_same(logits(whole, inputs), logits(teacher(family), inputs))


@some_rules
def test_caches_are_reordered_and_go_back(analog: LinearAttentionConfig) -> None:
    model, inputs = student(analog=analog), padded()
    cached, without = (
        generated(model, inputs, num_beams=3, use_cache=use)[0] for use in (True, False)
    )
    assert torch.equal(cached, without)
    ids, cache = padded(pad=0)["input_ids"], DynamicCache()
    with torch.no_grad():
        want = model(ids).logits[:, -1]
        model(ids[:, :9], past_key_values=cache)
        for layer in cache.layers:
            layer.activate_past_recording()
        model(torch.cat([ids[:, 9:11], ids[:, :3]], 1), past_key_values=cache)
        cache.crop(-3)
        assert_same(model(ids[:, 11:], past_key_values=cache).logits[:, -1], want)


@most_of(EVERY)
def test_the_cache_does_not_grow_and_is_what_the_plan_says(analog: LinearAttentionConfig) -> None:
    model, sizes = student(analog=analog), []
    for t in (12, 31) if analog.has_window else (3, 31):
        cache = DynamicCache()
        with torch.no_grad():
            model(padded(pad=0, t=t)["input_ids"][:1], past_key_values=cache)
        sizes.append(cache_bytes(cache))
        assert held_bytes(cache) == sizes[-1]
    assert sizes == [plan(teacher(), LinearizationRecipe(analog, ())).state] * 2


def test_packed_documents_do_not_meet() -> None:
    ids = padded(pad=0, t=20)["input_ids"]
    places = torch.cat([torch.arange(8), torch.arange(12)])[None].expand(2, -1)
    some = ("gla-sinks", "landmarks-sinks", "kda", "mesa-pooled")
    convolved = ("windowed, convolved", "gla, convolved")
    others = (student(analog=EVERY[name]) for name in (*some, *convolved))
    for model in (student(), student("gpt2"), *others):
        with torch.no_grad():
            packed = model(ids, position_ids=places, use_cache=False).logits
            apart = [model(part, use_cache=False).logits for part in ids.split([8, 12], 1)]
        assert_same(packed, torch.cat(apart, 1))


@most_of(BESIDE)
def test_either_side_can_be_switched_off(analog: LinearAttentionConfig) -> None:
    model, inputs = student(analog=analog), padded()
    assert set(ablations(model)) == {"softmax", "linear", "window only", "linear only"}
    with use_mode(model, WindowOnly()):
        window = logits(model, inputs)
        assert_generates_as_it_reads(model, inputs)
    with use_mode(model, LinearOnly()):
        linear = logits(model, inputs)
        assert_generates_as_it_reads(model, inputs)
    assert error(window, logits(model, inputs)) > SAME < error(linear, window)
    own = {name: getattr(analog, name) for name in ("window", "sinks", "head_windows")}
    sliding = student(analog=LinearAttentionConfig(**own))
    with use_mode(sliding, WindowOnly()):
        assert_same(window, logits(sliding, inputs))
    if analog.features == "landmarks":  # beside which sinks are features of the rule
        return
    alone = student(analog=replace(analog, window=0, sinks=0, head_windows=()))
    alone.load_state_dict({n: x for n, x in model.state_dict().items() if n in alone.state_dict()})
    assert_same(linear, logits(alone, inputs))


@most_of(BESIDE)
def test_transfer_lowers_the_error(analog: LinearAttentionConfig) -> None:
    """All parameters of all branches have a gradient, and their steps help."""
    model, inputs = linearize(teacher(), analog), padded(t=24)
    parameters = [
        p for branch in branches(only_branches(model)).values() for p in branch.parameters()
    ]
    optimizer, losses = torch.optim.Adam(parameters, lr=0.03), list[float]()
    for _ in range(8):
        mode = KeepGraphs()
        attend_all(model, inputs, mode)
        loss = torch.stack([*mode.losses.values()]).sum()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
        optimizer.step()
        losses.append(float(loss.detach()))
    after = LossOnly()
    attend_all(model, inputs, after)
    assert float(sum(after.losses.values())) < losses[0]


def test_pooled_gates_have_no_parameters() -> None:
    for rule in GATED:
        pooled, learnt = (
            {
                name
                for name, _ in branches(
                    linearize(teacher(), LinearAttentionConfig(rule=rule, gates=gates))
                )[0].named_parameters()
            }
            for gates in ("pooled", "learnt")
        )
        assert pooled < learnt
        assert not any(name.startswith(("alpha", "beta")) for name in pooled)


def test_pooled_gates_are_averages_of_keys() -> None:
    branch = branches(linearize(teacher(), BESIDE["kda-pooled"]))[0]
    q, k, v = (torch.randn(2, 5, heads, branch.attention.head_dim) for heads in (4, 2, 2))
    record = branch.record(q, k, v)
    beta, log_decay = record.inner.beta, record.inner.log_decay
    assert_same(beta, k.mean(-1, keepdim=True).sigmoid().repeat_interleave(2, 2))
    assert_same(log_decay, k.sigmoid().log().repeat_interleave(2, 2) / 16)


def test_records_are_those_that_the_configuration_asks_for() -> None:
    for name, analog in BESIDE.items():
        branch = branches(linearize(teacher(), analog))[0]
        q, kv = (torch.randn(1, 5, heads, branch.attention.head_dim) for heads in (4, 2))
        record = branch.record(q, kv, kv)
        if name == "landmarks-by-head":
            assert [group.window for group in record.by_heads()] == [2, 4]
            continue
        if name in ("windowed", "landmarks-sinks"):
            assert isinstance(record, WindowedLinear)
            assert record.sinks == analog.sinks
            continue
        assert isinstance(record, Windowed)
        assert (record.window, record.sinks) == (analog.window, analog.sinks)
        own = analog.rule in ("gated_deltanet", "kda", "mesa") or not analog.shared
        assert record.shared is not own


def test_sinks_of_windowed_linear_change_no_parameter() -> None:
    model, inputs = student(), padded()
    other = student(analog=LinearAttentionConfig(window=4, sinks=1))
    other.load_state_dict(model.state_dict())
    assert error(logits(other, inputs), logits(model, inputs)) > SAME
    other = student(analog=LinearAttentionConfig(window=14, sinks=1))
    other.load_state_dict(model.state_dict())
    assert_same(logits(other, inputs), logits(teacher(), inputs))


@some_rules
def test_is_saved_and_computes_in_bfloat16(analog: LinearAttentionConfig, tmp_path: Path) -> None:
    model, inputs = student(analog=analog), padded()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, inputs), logits(model, inputs))
    narrow = model.to(torch.bfloat16)
    sequences, found = generated(narrow, inputs)
    assert error(found, reread(narrow, inputs, sequences).float()) < 0.1


def test_what_was_saved_without_a_window_has_none(tmp_path: Path) -> None:
    """Rules had no window before there were sinks, though the configuration named one."""
    model = student(analog=LinearAttentionConfig(rule="gla", window=0))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    analog = config["linearize"]["analog"]
    config["linearize"]["analog"] = {
        name: 64 if name == "window" else value
        for name, value in analog.items()
        if name not in ("sinks", "gates")
    }
    path.write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, padded()), logits(model, padded()))
    assert branches(again)[LAYERS - 1].config.window == 0


@pytest.mark.slow
def test_compiled_it_is_one_graph() -> None:
    """torch.compile cannot trace the tests' type checker, which another process is without."""
    script = Path(__file__).with_name("compiled_windows.py")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_more_features_than_channels_are_not_the_same_ones() -> None:
    """They begin behind the identity as unit vectors in directions of their own."""
    model = linearize(teacher(), LinearAttentionConfig(window=4, feature_dim=20))
    for branch in branches(model).values():
        W = branch.phi_q.W.detach().view(4, 20, 8)
        assert torch.equal(W[:, :8], torch.eye(8).expand(4, 8, 8))
        torch.testing.assert_close(W.norm(dim=-1), torch.ones(4, 20))
        products = W @ W.mT - torch.eye(20)
        assert float(products.abs().max()) < 0.999
