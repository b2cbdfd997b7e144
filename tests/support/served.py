"""Models in vLLM's engine, in this process, and what they should have said."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastweights import FastWeightsForCausalLM
from tiny import tiny, tokens

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""A small cache and one process, which leaves threads to whom they belong."""
LONGEST = 256


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are to follow."""

    prompt: list[int]
    count: int


def mixed_requests(count: int, longest: int = 90, seed: int = 0) -> list[Request]:
    """Requests of all lengths: some of one token, some longer than a step reads."""
    lengths = torch.randint(1, longest, (count,), generator=torch.Generator().manual_seed(seed))
    return [
        Request(tokens(1 if i % 9 == 8 else int(n), seed=i + 100 * seed).tolist(), 1 + i % 7 * 2)
        for i, n in enumerate(lengths)
    ]


def make(folder: Path, mixers: list[dict[str, Any]], **fields: Any) -> FastWeightsForCausalLM:
    """A model with a layer of each of these mixers, and its folder."""
    model = tiny("metala", torch.float32, mixers=mixers, num_hidden_layers=len(mixers), **fields)
    model.save_pretrained(folder)
    return model


def start(folder: Path, **settings: Any) -> Any:
    """vLLM's engine with the model of this folder."""
    os.environ |= SETTINGS
    from vllm import LLM

    common = {"dtype": "float32", "max_model_len": LONGEST, "skip_tokenizer_init": True}
    return LLM(str(folder), **{**common, "enable_prefix_caching": False, **settings})


def stop(llm: Any) -> None:
    """End the engine, so that another can be started in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Any]:
    """vLLM's engine for the length of a block; of two at once in a process, the first to end ends
    the other.
    """
    llm = start(folder, **settings)
    try:
        yield llm
    finally:
        stop(llm)


def add(llm: Any, name: str, request: Request, **sampling: Any) -> None:
    """Hand a request to the engine, which reads nothing of it yet."""
    from vllm import SamplingParams

    params = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    chosen = SamplingParams(max_tokens=request.count, **{**params, **sampling})
    llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt}, chosen)


def step(llm: Any, done: dict[str, Any]) -> None:
    """One step of the engine; finished requests are put into `done`."""
    for output in llm.llm_engine.step():
        if output.finished:
            done[output.request_id] = output


def finish(llm: Any) -> dict[str, Any]:
    """Steps until nothing is left to do; the finished requests by name."""
    done: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        step(llm, done)
    return done


def run(llm: Any, requests: Iterable[Request], **sampling: Any) -> list[Any]:
    """The engine's outputs for requests handed over at once."""
    names = [str(i) for i, request in enumerate(requests)]
    for name, request in zip(names, requests, strict=True):
        add(llm, name, request, **sampling)
    done = finish(llm)
    return [done[name] for name in names]


def token_ids(output: Any) -> list[int]:
    """The tokens of a finished request."""
    return list(output.outputs[0].token_ids)


@torch.no_grad()
def require_likeliest(
    model: Any, requests: Sequence[Request], outputs: Sequence[Any], tolerance: float = 2e-4
) -> None:
    """Every token is the likeliest one after its prompt, and those before it, and its log
    probability is that of the model alone.
    """
    for request, output in zip(requests, outputs, strict=True):
        answer = token_ids(output)
        assert len(answer) == request.count
        ids = torch.tensor([request.prompt + answer])
        logs = model(ids).logits[0, len(request.prompt) - 1 : -1].float().log_softmax(-1)
        expected = logs.gather(-1, ids[0, len(request.prompt) :, None])[:, 0]
        given = [
            at[token].logprob for at, token in zip(output.outputs[0].logprobs, answer, strict=True)
        ]
        torch.testing.assert_close(torch.tensor(given), expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(expected, logs.amax(-1), atol=tolerance, rtol=0)
