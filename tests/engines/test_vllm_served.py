"""Our models in vLLM: each request is answered as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights import FastWeightsForCausalLM
from served import (
    Request,
    add,
    finish,
    make,
    mixed_requests,
    require_likeliest,
    run,
    serving,
    step,
    token_ids,
)
from tiny import VOCABULARY

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FastWeightsForCausalLM]:
    folder = tmp_path_factory.mktemp("hybrid")
    fields = {"learnt_positions": 256, "tie_word_embeddings": True, "logit_cap": 20.0}
    mixers = [{"name": "metala"}, {"name": "softmax", "window": 4}, {"name": "softmax"}]
    return folder, make(folder, [*mixers, {"name": "gated_deltanet"}], **fields)


@pytest.fixture(scope="module")
def llm(hybrid: tuple[Path, FastWeightsForCausalLM]) -> Iterator[Any]:
    with serving(hybrid[0], max_num_batched_tokens=32, max_num_seqs=8) as engine:
        yield engine


def test_tokens_are_those_of_generate(llm: Any, hybrid: tuple[Path, Any]) -> None:
    requests = mixed_requests(12, seed=3)
    for request, output in zip(requests, run(llm, requests), strict=True):
        ids = torch.tensor([request.prompt])
        expected = hybrid[1].generate(ids, max_new_tokens=request.count, do_sample=False)
        assert token_ids(output) == expected[0, len(request.prompt) :].tolist()


def test_requests_that_come_and_go_do_not_change_others(llm: Any, hybrid: tuple) -> None:
    requests, done = mixed_requests(64, seed=1), {}
    for i, request in enumerate(requests):
        add(llm, f"{i}", request)
        add(llm, f"gone {i}", Request(request.prompt[::-1], 40))
        if i % 3 == 0:
            step(llm, done)
        if i >= 5:
            llm.llm_engine.abort_request([f"gone {i - 5}"])
    llm.llm_engine.abort_request([f"gone {i}" for i in range(59, 64)])
    done |= finish(llm)
    assert len(done) == 64
    require_likeliest(hybrid[1], requests, [done[str(i)] for i in range(64)])


def test_sampled_tokens_depend_on_the_seed_alone(llm: Any) -> None:
    # so few tokens that all prompts are read in one step: where they are not, vLLM 0.32 asks a
    # generator of the CPU for its offset, which has none
    requests = [Request(one.prompt[:4], 8) for one in mixed_requests(7, seed=4)]
    together = run(llm, requests, temperature=1.0, seed=5)
    alone = [run(llm, [request], temperature=1.0, seed=5)[0] for request in requests]
    assert [*map(token_ids, together)] == [*map(token_ids, alone)]
    greedy = run(llm, requests)
    assert [*map(token_ids, together)] != [*map(token_ids, greedy)]
    one = run(llm, requests, temperature=1.0, top_k=1, seed=5)
    assert [*map(token_ids, one)] == [*map(token_ids, greedy)]


def test_the_vocabulary_is_the_models(llm: Any) -> None:
    assert llm.llm_engine.vllm_config.model_config.get_vocab_size() == VOCABULARY
