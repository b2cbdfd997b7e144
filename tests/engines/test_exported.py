"""Models as programs, as far as no other package is needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan_op
from torch.fx import GraphModule
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from fastweights import MIXERS
from fastweights.cli import main
from fastweights.engines.exported.chunks import LoopedChunks
from fastweights.engines.exported.pairs import InPairs, is_complex, unguarded
from fastweights.engines.exported.program import TOKENS, DecodingProgram
from fastweights.engines.exported.states import OwnStates, tensors_of
from fastweights.engines.exported.steps import Steps
from fastweights.engines.onnx import DOMAINS, ExportError, write_onnx
from fastweights.engines.onnx.turned import Turned
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.methods import Auto, Method, Recurrent, evaluate
from fastweights.models import FastWeightsCache
from fastweights.recurrence import DPLR, Decay, Mesa
from fastweights.recurrence.solvers import Chebyshev, ConjugateGradient, Solver
from kinds import one_of_each
from model_laws import read_in_parts
from pretrained import linear_llama
from tiny import tiny, tokens


def assert_zeros_are_the_empty_state(model: Any) -> None:
    program, ids = DecodingProgram(model), tokens(2, 5)
    found, _ = read_in_parts(program, ids, [3, 2], program.layout.empty(batch=2))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_zeros_are_the_empty_state(name: str) -> None:
    assert_zeros_are_the_empty_state(tiny(name, torch.float32, num_hidden_layers=1))


def test_shared_blocks_have_states_of_their_own() -> None:
    shared = [{"layers": [0, 2], "width": 12, "heads": 2}]
    fields = {"mlp": None, "num_hidden_layers": 3, "shared_blocks": shared}
    assert_zeros_are_the_empty_state(tiny("linear", torch.float32, **fields))


def test_states_are_said_by_what_they_are() -> None:
    layout = OwnStates(tiny("hybrid"))
    assert [state.meaning for state in layout.tensors] == [
        "position",
        "mixer 0, memory 0",
        "mixer 0, inputs of conv",
        "mixer 1, memory 0",
        "mixer 1, memory 1",
        "mixer 1, memory 2",
        "mixer 2, memory 0",
        *(f"mixer 2, inputs of conv_{stream}" for stream in "qkv"),
    ]
    growing = [state.growing for state in layout.tensors if "mixer 1" in state.meaning]
    assert growing == [None] * 3, "a full window stays as large as it is"
    assert [len(state) for state in layout.empty(3)] == [3] * len(layout.tensors)


def test_states_go_there_and_back() -> None:
    model, cache = tiny("hybrid"), FastWeightsCache()
    layout = OwnStates(model)
    model(input_ids=tokens(2, 5), past_key_values=cache, use_cache=True)
    there = tensors_of(cache.states)
    for one, other in zip(there, tensors_of(layout.states(there)), strict=True):
        assert torch.equal(one, other)


LINEAR = {
    "lolcats": {"window": 4},
    "landmarks": {"window": 4, "features": "landmarks", "feature_dim": 4, "sinks": 2},
    "windows of heads": {"features": "landmarks", "feature_dim": 4, "head_windows": ((4, 6),) * 2},
    "delta": {"window": 4, "rule": "gated_deltanet", "sinks": 1},
    "convolution": {"window": 0, "rule": "gla", "convolution": 3},
    "scaled softmax": {"window": 4, "positions": "linear", "log_scale": 10},
}


@pytest.mark.parametrize("layers", [None, [0]], ids=["linear", "one layer of two"])
@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_zeros_are_the_empty_state_of_linearized_models(name: str, layers: Any) -> None:
    model = linear_llama(LinearAttentionConfig(**LINEAR[name]), dtype=torch.float32, chosen=layers)
    program, ids = DecodingProgram(model), tokens(2, 23)
    wanted = model(input_ids=ids).logits
    for method in (Auto(), LoopedChunks(8)):
        with program.layout.use_method(method):
            found, states = read_in_parts(program, ids, [3, 20], program.layout.empty(batch=2))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(states[0], torch.tensor([23, 23]))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", LINEAR)
def test_graphs_of_linearized_models_read_any_number_of_tokens(name: str) -> None:
    """More and fewer than the window has, and one, also where a layer stays softmax."""
    model = linear_llama(LinearAttentionConfig(**LINEAR[name]), dtype=torch.float32, chosen=[0])
    program, ids = DecodingProgram(model), tokens(3, 23)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    graph = unguarded(program.trace(Steps(), TOKENS))
    for lengths in ([20, 2, 1], [2, 21]):
        found, _ = read_in_parts(graph, ids, lengths, program.layout.empty(batch=3))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_keep_more_than_graphs_hold_are_named() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(vocab_size=32, num_hidden_layers=2, layer_types=kinds, **sizes)
    model = linearize(Gemma3ForCausalLM(config), LinearAttentionConfig(window=4), [1]).eval()
    with pytest.raises(ExportError, match="layers that keep a DynamicSlidingWindowLayer is not"):
        DecodingProgram(model)


def test_what_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Linear is not exported; pass a FastWeightsForCausalLM"):
        DecodingProgram(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before"):
        DecodingProgram(tiny().train())
    if find_spec("onnxscript") is None:
        with pytest.raises(ValueError, match=r"pip install 'fastweights\[onnx\]'"):
            write_onnx(tiny(), tmp_path / "model.onnx", DOMAINS["com.microsoft"])


def test_what_no_graph_holds_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object) -> None:
        raise RuntimeError("while tracing") from ValueError("\n  the rule looks at numbers\nhere")

    monkeypatch.setattr("fastweights.engines.onnx.write.require_onnx", lambda: None)
    monkeypatch.setattr(DecodingProgram, "trace", trace)
    with pytest.raises(ExportError, match=r"not written as ONNX: the rule looks at numbers$"):
        write_onnx(tiny(), tmp_path / "model.onnx", DOMAINS["com.microsoft"])


def test_a_refused_graph_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object, out: Path, *__: object) -> None:
        out.write_bytes(b"a part")
        raise ExportError("no graph holds this")

    monkeypatch.setattr("fastweights.cli.verbs.export.require_onnx", lambda: None)
    monkeypatch.setattr("fastweights.cli.verbs.export.write_onnx", refuse)
    tiny().save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "new" / "a.onnx")]) != 0
    assert "no graph holds this" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Complex(torch.nn.Module):
    """A complex rule, from and to real numbers."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = x.unflatten(3, (4, -1, 2)).unbind(3)
        a, b, q, w = (torch.view_as_complex(part.contiguous()) for part in parts)
        decay = torch.complex(-x[..., :3].abs(), x[..., 3:6])
        rule = DPLR(q.conj(), w / (2 + b), x[..., :2], a[:, :1], b, decay, before=True)
        o, after = self.method.evaluate(rule, torch.view_as_complex(state))
        assert isinstance(after, torch.Tensor)
        return o.real, torch.view_as_real(after)


def test_complex_numbers_become_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(2, 5, 1, 24, generator=generator) for _ in range(2))
    state = torch.randn(2, 1, 3, 2, 2, generator=generator)
    with torch.no_grad():
        traced = torch.export.export(Complex(Steps()), (x, state), strict=False)
        real = torch.export.export(InPairs(traced), (x, state), strict=False)
        assert is_complex(traced)
        assert not is_complex(real)
        wanted = Complex(Recurrent())(other, state)
        for got, one in zip(real.module()(other, state), wanted, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", [ConjugateGradient(7), Chebyshev(9)])
def test_solvers_repeat_in_loops(solver: Solver) -> None:
    def rule(x: torch.Tensor) -> Mesa:
        q, k, v = x[..., :12].chunk(3, -1)
        return Mesa(q, k, v, x[..., 12:].sigmoid(), None, torch.ones(1, 4), solver)

    class Solving(torch.nn.Module):
        def forward(self, x: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
            o, after = Steps().evaluate(rule(x), state)
            return o, *after

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 1, 13, generator=generator)
    state = torch.eye(4).expand(2, 1, 4, 4), torch.randn(2, 1, 4, 4, generator=generator)
    with torch.no_grad():
        graph = torch.export.export(Solving(), (x, *state), strict=False)
        inside = [m for m in graph.graph_module.modules() if isinstance(m, GraphModule)]
        calls = [node.target for module in inside for node in module.graph.nodes]
        assert calls.count(scan_op) == 2
        o, after = evaluate(rule(x), state, Recurrent())
        for got, wanted in zip(graph.module()(x, *state), (o, *after), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_an_operator_without_a_form_in_pairs_is_named() -> None:
    class Cosine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.complex(x, x).cos().real

    x = torch.ones(2)
    traced = torch.export.export(Cosine(), (x,), strict=False)
    with pytest.raises(TypeError, match=r"aten\.cos\.default of complex numbers has no form"):
        InPairs(traced)(x)


def test_a_long_turn_keeps_its_digits() -> None:
    """The angles of 2000 tokens are a million; those of a loop are as far as float32 is."""
    t, generator = 2000, torch.Generator().manual_seed(0)
    decay = torch.complex(torch.full((2,), -0.01), torch.tensor([500.0, -0.1]))[None, None, None]
    q, k = (torch.randn(1, t, 1, 2, dtype=torch.complex64, generator=generator) for _ in "qk")
    v = torch.randn(1, t, 1, 3, generator=generator)
    start = torch.randn(1, 1, 2, 3, dtype=torch.complex64, generator=generator)
    wide_q, wide_k, angles, before = (s.to(torch.complex128) for s in (q, k, decay, start))
    wanted, after = evaluate(Decay(wide_q, wide_k, v.double(), angles), before, Recurrent())

    turned = Turned.of(Decay(q, k, v, decay))
    queries, keys, values, decays, _ = turned.streams
    plain = Decay(queries, *(s.expand(-1, t, 2, -1) for s in (keys, values, decays)))
    real = turned.enter(start).expand(1, 2, 4, 3)
    found, last = evaluate(plain, real)
    assert isinstance(last, torch.Tensor)
    o, state = turned.leave(found, last)
    assert isinstance(after, torch.Tensor)
    torch.testing.assert_close(o, wanted.to(o.dtype), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[:, :1], after.to(o.dtype), rtol=1e-4, atol=1e-4)


def test_the_command_says_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny().save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model")]
    assert main([*command, str(tmp_path / "a.onnx"), "--family", "llama"]) != 0
    assert "leave one of them out" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "theirs"), "--domain", "ai.onnx"]) != 0
    assert "--domain is of ONNX graphs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    assert main([*command, str(tmp_path / "a.onnx")]) != 0
    assert "tokenizer.json is not the tokenizer of" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer.json"]
