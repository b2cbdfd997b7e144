"""Our models in vLLM: every mixer, and engines that are started for one test each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastweights import MIXERS
from served import Request, make, mixed_requests, require_likeliest, run, serving, start, token_ids
from tiny import tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]
pytest.importorskip("vllm")

ENDLESS = [{"name": name} for name in ("softmax", "olmo2")]
WINDOWS = [
    {"name": "softmax", "window": 4},
    {"name": "swa", "window": 9},
    {"name": "fox", "window": 5},
    {"name": "lolcats", "window": 6},
    {"name": "lolcats", "window": 0},
]
APART = ("softmax", "olmo2", "swa", "fox", "mla", "lolcats", "rwkv7")
FIXED = [{"name": name} for name in MIXERS if name not in APART]
RESIDUAL = [{"name": "rwkv7"}, {"name": "rwkv7", "residual": True}, {"name": "rwkv7_channel"}]
SIDE_BY_SIDE = {"name": "gla", "beside": [{"name": "mamba2"}, {"name": "softmax", "window": 3}]}
MODELS = {
    "first": FIXED[:16],
    "second": FIXED[16:32],
    "third": [*FIXED[32:], *RESIDUAL],
    "windows": [*WINDOWS, SIDE_BY_SIDE],
    "softmax": [*ENDLESS, {"name": "metala"}, {"name": "softmax", "window": 4}],
    "softmax alone": ENDLESS,
    "latents": [{"name": "mla"}, {"name": "gated_deltanet"}],
}


@pytest.mark.parametrize("name", MODELS)
def test_every_mixer_is_served(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, MODELS[name])
    requests = mixed_requests(64 if name == "softmax" else 24)
    with serving(tmp_path, max_num_batched_tokens=48, max_num_seqs=16) as llm:
        outputs = run(llm, requests)
    require_likeliest(model, requests, outputs)


def test_sequences_that_lose_their_pages_are_read_again(
    tmp_path: Path,
) -> None:
    model = make(tmp_path, MODELS["softmax"])
    requests = [Request(one.prompt, 60) for one in mixed_requests(12, seed=6)]
    with serving(tmp_path, num_gpu_blocks_override=14, max_num_seqs=8, block_size=32) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, lost = scheduler._preempt_request, []
        scheduler._preempt_request = lambda *args, **kw: (lost.append(args), preempt(*args, **kw))
        outputs = run(llm, requests)
    assert lost
    require_likeliest(model, requests, outputs)


@pytest.mark.parametrize("name", ["hybrid", "states"])
def test_a_prefix_that_was_read_is_not_read_again(name: str, tmp_path: Path) -> None:
    mixers = {"hybrid": MODELS["softmax"], "states": [{"name": "metala"}, {"name": "mamba2"}]}
    model = make(tmp_path, mixers[name])
    common = mixed_requests(1, seed=7)[0].prompt
    common = (common * 200)[:200]
    requests = [Request([*common, *one.prompt[:20]], 8) for one in mixed_requests(20, seed=8)]
    with serving(tmp_path, enable_prefix_caching=True, max_num_batched_tokens=128) as llm:
        first = run(llm, requests[:1])
        others = run(llm, requests[1:])
    assert any(output.num_cached_tokens for output in others)
    require_likeliest(model, requests, [*first, *others])


def test_a_new_start_says_the_same(tmp_path: Path) -> None:
    make(tmp_path, MODELS["softmax"])
    requests, said = mixed_requests(6, seed=9), []
    for _ in range(2):
        with serving(tmp_path, max_num_batched_tokens=32, max_num_seqs=8) as llm:
            said.append([*map(token_ids, run(llm, requests))])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"learnt_positions": 100}, {}, "pass --max-model-len 100"),
        ({}, {"tensor_parallel_size": 2}, "without --tensor-parallel-size"),
        ({"mixers": [{"name": "fox"}]}, {}, "no place for a decay of its scores"),
        ({"mixers": [{"name": "softmax"}, {"name": "softmax", "heads": 2}]}, {}, "make them alike"),
    ],
)
def test_what_cannot_be_served_is_refused(
    fields: dict, settings: dict, reason: str, tmp_path: Path
) -> None:
    tiny("metala", torch.float32, **fields).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=reason):
        start(tmp_path, **settings)
