"""RG-LRU, RWKV-4, mLSTM and lightning attention of transformers' models, computed by ours."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.recurrent_gemma import modeling_recurrent_gemma
from transformers.models.rwkv import modeling_rwkv
from transformers.models.xlstm import modeling_xlstm
from transformers.models.xlstm.configuration_xlstm import xLSTMConfig

from fastweights.engines.transformers import Patch, loops, patch_transformers
from fastweights.models.cache_names import name_of_cache

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**SMALL, **HEADS, "lru_width": 32, "attention_window_size": 16},
    "rwkv": SMALL,
    "xlstm": {**SMALL, "hidden_size": 128, "num_heads": 2, "chunk_size": 16},
    "minimax": {
        **SMALL,
        **HEADS,
        "block_size": 16,
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
REPLACED = {
    "recurrent_gemma": "RecurrentGemmaRglru._rnn_scan",
    "rwkv": "rwkv_linear_attention_cpu",
    "xlstm": "xLSTMBackend.forward",
    "minimax": "MiniMaxLightningAttention.forward",
}
TOKENS = 37
FLOAT32, FLOAT64 = 1e-5, 1e-10


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **MODELS[family]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert error < tolerance


def tensors(value: Any) -> Iterator[Tensor]:
    """Those of a cache."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def states(model: Any, output: Any, family: str) -> list[Tensor]:
    """What the model has read, as it keeps it for the next token."""
    if family == "recurrent_gemma":
        return [m.recurrent_states for m in model.modules() if hasattr(m, "recurrent_states")]
    return [s for s in tensors(output[name_of_cache(output)]) if s.is_floating_point()]


def run(model: Any, family: str) -> dict[str, list[Tensor]]:
    """Everything that a model gives."""
    ids = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    model.train().zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    model.eval()
    with torch.no_grad():
        first = model(input_ids=ids[:, :20], use_cache=True)
        name = name_of_cache(first)
        cache = {} if name is None else {name: first[name]}
        kept = [s.clone() for s in states(model, first, family)]
        following = model(input_ids=ids[:, 20:], use_cache=True, **cache) if cache else first
    padded = ids[:, :9].clone()
    mask = torch.ones_like(padded)
    mask[0, :4] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = [
            model.generate(
                padded, attention_mask=m, max_new_tokens=8, do_sample=False, pad_token_id=0
            )
            for m in (torch.ones_like(mask), mask)
        ]
    return {
        "output": [output.logits.detach(), output.loss.detach(), first.logits, following.logits],
        "states": kept,
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "tokens": tokens,
    }


@pytest.mark.parametrize("family", MODELS)
def test_patched_models_give_what_they_gave(family: str) -> None:
    model = make(family)
    expected = run(model, family)
    patch = patch_transformers(model)
    assert f"{family}.{REPLACED[family]}" in patch.replaced
    found = run(model, family)
    patch.undo()
    again = run(model, family)
    for part, values in expected.items():
        assert len(values) == len(found[part]) > 0
        for ours, theirs, after in zip(found[part], values, again[part], strict=True):
            assert torch.equal(after, theirs)
            if part == "tokens":
                assert torch.equal(ours, theirs)
            else:
                close(ours, theirs, 5 * FLOAT32 if part == "gradients" else FLOAT32)


def wide(module: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a modelling file, with float64 where it says float32."""
    source = inspect.getsource(function).replace("torch.float32", "torch.float64")
    names = dict(vars(module))
    exec(source.replace(".float()", ".double()"), names)
    return names[function.__name__]


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def agree(
    ours: Callable[..., Any], theirs: Callable[..., Any], streams: list[Tensor], tolerance: float
) -> None:
    """Outputs, states and all gradients."""
    results = []
    for function in (theirs, ours):
        inputs = [s.clone().requires_grad_() for s in streams]
        found = list(tensors(function(*inputs)))
        gen = torch.Generator().manual_seed(3)
        weights = torch.randn(found[0].shape, generator=gen, dtype=torch.float64)
        grads = torch.autograd.grad((found[0] * weights).sum(), inputs)
        results.append([*(f.detach() for f in found), *grads])
    expected, found = results
    assert len(found) == len(expected)
    for mine, their in zip(found, expected, strict=True):
        close(mine, their, tolerance)


@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("with_state", [False, True])
def test_rglru_scans_in_float64(tokens: int, with_state: bool) -> None:
    with double():
        x, log_gate = torch.randn(2, tokens, 5), -torch.rand(2, tokens, 5)
        # a decay that has become 0
        log_gate[0, 1] = -800
        reset = torch.rand(2, tokens, 1) < 0.2
        reset[1, 0] = True
        state = [torch.randn(2, 5)] if with_state else []

        def scan(function: Callable[..., Any]) -> Callable[..., Any]:
            def apply(x: Tensor, log_gate: Tensor, *state: Tensor) -> Any:
                start = state[0] if state else None
                return function(None, x, log_gate.exp(), reset, start, acc_dtype=torch.float64)

            return apply

        theirs = modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan
        agree(scan(loops.scan_gated), scan(theirs), [x, log_gate, *state], FLOAT64)


@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["usual keys", "large keys"])
def test_rwkv_attends_in_float64(tokens: int, with_state: bool, size: float) -> None:
    theirs = wide(modeling_rwkv, modeling_rwkv.rwkv_linear_attention_cpu)
    with double():
        # from no decay to one that leaves nothing
        decay, first = torch.linspace(-9, 4, 6), torch.randn(6)
        key, value = torch.randn(2, 2, tokens, 6)
        state = (torch.randn(2, 6), torch.rand(2, 6), size * torch.randn(2, 6))

        def attend(function: Callable[..., Any]) -> Callable[..., Any]:
            def apply(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Any:
                start = state if with_state else None
                return function(decay, first, size * key, value, start, True)

            return apply

        agree(attend(loops.attend_by_channel), attend(theirs), [decay, first, key, value], FLOAT64)


@pytest.mark.parametrize("tokens", [2, 16, 37])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("size", [1.0, 12.0], ids=["usual gates", "large gates"])
def test_mlstm_reads_in_float64(tokens: int, with_state: bool, size: float) -> None:
    config = xLSTMConfig(hidden_size=16, num_heads=2, chunk_size=16)
    with double():
        backend = modeling_xlstm.xLSTMBackend(config)
        rest = backend._inference_fn.keywords["mlstm_sequence_kernel"]
        rest.keywords["dtype_state"] = torch.float64
        shape = 2, 2, tokens
        q, k, v = torch.randn(*shape, 4), torch.randn(*shape, 4), torch.randn(*shape, 6)
        gates = [size * torch.randn(shape), size * torch.randn(shape)]
        state = [torch.randn(2, 2, 4, 6), torch.randn(2, 2, 4), torch.randn(2, 2, 1)]
        if not with_state:
            state = [torch.zeros_like(s) for s in state]

        def read(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *streams: function(backend, *streams, *state)

        theirs = modeling_xlstm.xLSTMBackend.forward
        agree(read(loops.read_cells), read(theirs), [q, k, v, *gates], FLOAT64)


def test_mlstm_leaves_what_theirs_refuses() -> None:
    q, v, gate = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5)
    for mode, last, refusal in (
        ("train", False, "not divisible"),
        ("train_with_padding", True, "not supported"),
    ):
        config = xLSTMConfig(hidden_size=4, num_heads=1, mode=mode, return_last_states=last)
        backend = modeling_xlstm.xLSTMBackend(config)
        with patch_transformers("xlstm"), pytest.raises(ValueError, match=refusal):
            backend(q, q, v, gate, gate)


@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("with_state", [False, True])
def test_lightning_attention_in_float64(tokens: int, with_state: bool) -> None:
    config = MiniMaxConfig(**MODELS["minimax"])
    with double():
        layer = modeling_minimax.MiniMaxLightningAttention(config, 0)
        x, mask = torch.randn(2, tokens, 32), torch.ones(2, tokens)
        mask[0, :1] = 0
        cache: Any = loops._State(torch.randn(2, 4, 8, 8)) if with_state else None
        theirs: Any = modeling_minimax.MiniMaxLightningAttention.forward
        agree(
            lambda x: loops.attend_with_decay(layer, x, None, mask, cache),
            lambda x: theirs(layer, x, None, mask, cache),
            [x],
            FLOAT64,
        )


def scaled(value: Any) -> Any:
    return value * 1.01 if isinstance(value, Tensor) else [scaled(part) for part in value]


@pytest.mark.parametrize("part", [0, 1], ids=["output", "state"])
@pytest.mark.parametrize("family", MODELS)
def test_another_formula_is_left_alone(
    family: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (substitute,) = (s for s in loops.LOOPS if s.name == REPLACED[family])
    import sys

    model = make(family)
    owner: Any = next(
        sys.modules[type(m).__module__] for m in model.modules() if family in type(m).__module__
    )
    *classes, attribute = substitute.name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    theirs = getattr(owner, attribute)

    def other(*arguments: Any, **named: Any) -> Any:
        found = list(theirs(*arguments, **named))
        found[part] = scaled(found[part])
        return tuple(found)

    other.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, attribute, other)
    with pytest.warns(UserWarning, match="stays as it is"):
        patch: Patch = patch_transformers(model)
    assert patch.left.keys() == {f"{family}.{substitute.name}"}
    patch.undo()
