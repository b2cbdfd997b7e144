"""On a CUDA device: every recurrence against float64 on the CPU, models, decoding, resumed
training.

Selected by ``pytest -m gpu`` only; where torch sees no GPU the tests then fail, and say so.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastweights import MIXERS, FastWeightsCache, stream
from fastweights.generate import Decoder, likeliest
from fastweights.kernels.pages import load, store
from fastweights.lab.bench.cases import CASES, RecurrenceCase
from fastweights.lab.bench.contenders import Case, Inputs, Sizes, gradients
from fastweights.lab.bench.gpu import check_kernels, host_waits
from fastweights.lab.bench.ops import errors_on, relative
from fastweights.linearize import LinearAttentionConfig
from fastweights.methods import advance, evaluate
from fastweights.recurrence.base import NoFiniteFormError
from fastweights.recurrence.streams import pack_state, state_parts
from fastweights.train import train
from killable_runs import tiny as tiny_run
from poison import poisoned_memory
from pretrained import linear_llama
from timed import HEADS, TIMED, short_sizes, timed_sizes
from tiny import tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 imports what it deprecates where it first multiplies in bfloat16
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
RECURRENCES = [case for case in CASES if isinstance(case, RecurrenceCase)]

GROWING = ("softmax", "olmo2", "mla", "fox", "swa", "hyena")
"""Mixers whose caches have not stopped growing after a hundred tokens, so that no graph is made."""


def by_name(case: Case) -> str:
    return case.name


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail(
            "tests marked gpu need a CUDA device, and torch sees none; leave out -m gpu",
            pytrace=False,
        )
    return torch.device("cuda")


def sizes(case: Case) -> Sizes:
    """More than two chunks, and no multiple of one."""
    if not case.channels:
        return (
            Sizes(2, 150, 3, 32, 16) if case.name.startswith("decay") else Sizes(2, 150, 3, 32, 32)
        )
    return Sizes(2, 150, 40, case.state, 1)


def leaves(inputs: Inputs) -> Inputs:
    return {name: x.detach().requires_grad_() for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_every_kernel_agrees_with_float64(cuda, case, dtype):
    """Output and all gradients; the state of half-precision streams stays float32."""
    solved = 10 * case.accuracy if isinstance(case, RecurrenceCase) else 0.0
    for row in check_kernels(case, sizes(case), dtype, cuda):
        # with the CPU in the GPU's place, C's kernels are there, of which one only reads
        forward_only = cuda.type == "cpu" and row.note == "it computes no gradients"
        assert row.note == "" or forward_only, row
        assert row.error is not None
        assert forward_only or row.gradient_error is not None
        errors = (row.error, row.gradient_error or 0.0)
        assert max(errors) < max(TOLERANCE[dtype], solved), row
        assert row.state != "bfloat16" or case.name.startswith("softmax"), row


@pytest.mark.parametrize("cut", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", TIMED, ids=by_name)
def test_what_is_timed_agrees_with_float64(cuda, case, dtype, cut):
    """At the widths that are timed, whose products take other instructions and more warps than
    narrow ones; in time of one piece and in segments, whose states others compute.
    """
    inputs = case.inputs(short_sizes(case, cut, cuda), dtype, cuda)
    chosen = case.implementations(inputs)[0]
    assert cuda.type == "cpu" or "Triton" in chosen.name
    errors = errors_on(case, chosen.load(), inputs)
    limit = max(TOLERANCE[dtype], 10 * getattr(case, "accuracy", 0.0))
    assert max(errors.output, errors.gradients) < limit, errors


@pytest.mark.parametrize("case", TIMED, ids=by_name)
def test_what_is_timed_repeats_bit_by_bit(cuda, case):
    """Twenty times at the whole size, in memory where what nobody has written yet is NaN."""
    inputs = leaves(case.inputs(timed_sizes(case, cuda), torch.bfloat16, cuda))
    run = case.implementations(inputs)[0].load()
    with poisoned_memory():
        o, wanted = gradients(run, inputs)
        assert all(x.isfinite().all() for x in (o, *wanted.values()))
        for _ in range(20):
            again, found = gradients(run, inputs)
            assert torch.equal(again, o)
            assert all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", RECURRENCES, ids=by_name)
def test_one_token(cuda, case, dtype):
    """Its output and the state after it, against float64 on the CPU."""
    inputs = case.inputs(sizes(case)._replace(t=9), dtype, cuda)
    record, exact = case.record(inputs), case.record({n: _wide(x.cpu()) for n, x in inputs.items()})
    with torch.no_grad():
        _, before = evaluate(record[:8])
        o, state = evaluate(record[8:], before)
        numbers = [
            s.cpu() if s.dtype == torch.long else _wide(s.cpu()) for s in state_parts(before)
        ]
        exactly = pack_state(numbers)
        want, expected = evaluate(exact[8:], exactly)
    limit = max(TOLERANCE[dtype], 10 * case.accuracy)
    assert relative(o, want) < limit
    for got, end in zip(state_parts(state), state_parts(expected), strict=True):
        assert relative(got, _wide(end)) < limit


@pytest.mark.parametrize("case", RECURRENCES, ids=by_name)
def test_state_and_cut(cuda, case):
    """A sequence evaluated in two parts on the GPU ends where the CPU ends."""
    inputs = case.inputs(sizes(case), torch.float64, cuda)
    record = case.record(inputs)
    o, state = evaluate(record[:70])
    rest, state = evaluate(record[70:], state)
    want, expected = evaluate(case.record({n: x.cpu() for n, x in inputs.items()}))
    assert relative(torch.cat([o, rest], 1), want) < TOLERANCE[torch.float64]
    for got, end in zip(state_parts(state), state_parts(expected), strict=True):
        assert relative(got, _wide(end)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("case", RECURRENCES, ids=by_name)
@torch.no_grad()
def test_states_are_advanced_in_pages(cuda, case):
    """By numbers of pages that are on the device."""
    record = case.record(case.inputs(sizes(case), torch.float32, cuda))
    begin, rest, numbers = record[:70], record[70:], torch.tensor([3, 1], device=cuda)
    try:
        before = begin.settle(evaluate(begin)[1])
    except NoFiniteFormError:
        pytest.skip("its state grows for ever")
    paged = [part.new_zeros(5, *part.shape[1:]) for part in state_parts(before)]
    store(paged, numbers, state_parts(before))
    o = advance(rest, pack_state(paged), numbers)
    want, after = evaluate(rest, before)
    assert relative(o, _wide(want)) < TOLERANCE[torch.float32]
    expected = state_parts(rest.settle(after))
    for got, end in zip(load(paged, numbers), expected, strict=True):
        assert relative(got, _wide(end)) < TOLERANCE[torch.float32]


def _wide(x: Tensor) -> Tensor:
    return x if x.is_complex() else x.double()


@pytest.mark.parametrize("case", RECURRENCES, ids=by_name)
def test_the_host_does_not_wait(cuda, case):
    """No synchronisation in forward and backward."""
    inputs = leaves(case.inputs(sizes(case), torch.float32, cuda))
    run = case.implementations(inputs)[0].load()
    assert host_waits(lambda: run(inputs).abs().sum().backward(), cuda) == 0


def test_gradients_repeat_bit_by_bit(cuda):
    """But for softmax's, which are PyTorch's."""
    for case in RECURRENCES:
        if case.name.startswith("softmax"):
            continue
        inputs = leaves(case.inputs(sizes(case), torch.float32, cuda))
        run = case.implementations(inputs)[0].load()
        first, second = gradients(run, inputs), gradients(run, inputs)
        assert torch.equal(first[0], second[0]), case.name
        assert all(torch.equal(first[1][n], second[1][n]) for n in inputs), case.name


@pytest.mark.parametrize("name", [*MIXERS, "hybrid"])
def test_models_agree_with_the_cpu(cuda, name):
    ids = tokens(2, 40)
    model = tiny(name, torch.float64)
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    on_gpu = tiny(name, torch.float64).to(cuda)
    found = on_gpu(ids.to(cuda), labels=ids.to(cuda)).loss
    found.backward()
    assert relative(found.detach(), loss.detach()) < 1e-9
    for n, p in on_gpu.named_parameters():
        wanted = expected[n]
        if wanted is not None:
            assert p.grad is not None
            # a gradient that is zero but for rounding has no direction
            assert relative(p.grad, wanted) < 1e-8 or wanted.norm() < 1e-15, n


@pytest.mark.parametrize("name", [*MIXERS, "hybrid"])
def test_models_in_bfloat16(cuda, name):
    ids = tokens(2, 40).to(cuda)
    model = tiny(name, torch.float32).to(cuda)
    want = model(ids).logits
    assert relative(model.to(torch.bfloat16)(ids).logits, want.double().cpu()) < 0.1


@pytest.mark.parametrize("name", [*MIXERS, "hybrid"])
def test_decoding(cuda, name):
    """Streaming, transformers' generate and the full forward pass choose the same tokens as the
    CPU.
    """
    prompt = tokens(2, 9)
    want = torch.stack(list(stream(tiny(name), prompt, temperature=0, max_new_tokens=12)), 1)
    model = tiny(name).to(cuda)
    got = torch.stack(list(stream(model, prompt.to(cuda), temperature=0, max_new_tokens=12)), 1)
    assert torch.equal(got.cpu(), want)
    generated = model.generate(prompt.to(cuda), max_new_tokens=12, do_sample=False)
    assert torch.equal(generated[:, 9:].cpu(), want)
    cache = FastWeightsCache()
    model(prompt.to(cuda), None, cache, use_cache=True)
    assert all(state.position.is_cuda for state in cache.states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MIXERS, "hybrid", "linearized"])
def test_graphs_choose_the_same_tokens(cuda, name, dtype):
    """One token after the other by a CUDA graph and by passes of the model."""
    linear = name == "linearized"
    model = linear_llama(LinearAttentionConfig(window=4)) if linear else tiny(name)
    model, prompt = model.to(cuda, dtype), tokens(2, 80).to(cuda)
    graph, eager, found, want = Decoder(model), Decoder(model), [], []
    logits, expected = graph.read(prompt), eager.read(prompt)
    for _ in range(12):
        found.append(likeliest(logits))
        want.append(likeliest(expected))
        logits, expected = graph.read_token(found[-1]), eager.read(want[-1][:, None])
    assert torch.equal(torch.stack(found), torch.stack(want))
    assert graph.step is None or graph.refuse_graph() is None
    if name not in GROWING and dtype != torch.float64:
        assert graph.step is not None, graph.refuse_graph()


@pytest.mark.parametrize("name", [*MIXERS, "hybrid"])
def test_packed_documents_are_as_single_ones(cuda, name):
    ids, model = tokens(1, 24).to(cuda), tiny(name, torch.float64).to(cuda)
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None].to(cuda)
    apart = torch.cat([model(document).logits for document in ids.split([9, 15], 1)], 1)
    packed = model(ids, position_ids=positions).logits
    assert relative(packed.detach(), apart.detach().cpu()) < 1e-9


@pytest.mark.parametrize("name", [*MIXERS, "hybrid"])
def test_assisted_decoding_chooses_the_same_tokens(cuda, name):
    prompt, model = tokens(1, 9).to(cuda), tiny(name).to(cuda)
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assisted = model.generate(
        prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
    )
    assert torch.equal(assisted, plain)


@pytest.mark.usefixtures("cuda")
def test_training_resumes_bit_by_bit(tmp_path):
    """A run in two sittings ends with the weights of one in a single sitting."""
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    stop = iter([False, False, False, True])
    assert not train(config, tmp_path / "parts", stop=lambda: next(stop)).complete
    assert train(config, tmp_path / "parts").complete
    whole, parts = (
        load_file(tmp_path / out / "model" / "model.safetensors") for out in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(weights, parts[name]) for name, weights in whole.items())
