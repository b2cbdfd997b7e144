"""vLLM's server with a softmax Llama, and with the same model linearized.

    python benchmarks/vllm_serving.py

Runs in the environment of `make test-vllm`; three rounds take a quarter of an hour on two cores. A
second call goes on behind the last row. Both models are made here, with random weights: speed does
not ask for better ones. Both servers are there all the time, and only one is asked at a time, each
number of concurrent streams and length of prompts of the one, then of the other, and all of them
again in every round. A stream sends one request after the other, with a prompt of its own, and
reads `TOKENS` tokens. Of all requests: `requests_per_second`; `first_token`, the median of seconds
from request to first token; `token`, the median over requests of the mean seconds between tokens.
`cache` is the most of the cache that was in use, in bytes, and `resident` what the server's
processes hold behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.lab.bench.report import Report, open_report
from fastweights.linearize import LinearAttentionConfig, linearize
from measuring import options

STREAMS, PROMPTS, TOKENS = (1, 16, 64), (128, 2048), 32
NAMES = ("softmax", "linearized")
CACHE = 4
"""GiB that each server has for keys, values and states."""
WINDOW = 64
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 4096,
}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": f"{CACHE}",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": f"{os.cpu_count()}",
}


@dataclass(frozen=True)
class Server:
    """A server of one of the models."""

    name: str
    address: str
    process: psutil.Process

    def resident(self) -> int:
        """Bytes that its processes hold, what they share counted once."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_full_info().pss for one in family)


def make_models(folder: Path) -> dict[str, Path]:
    """Write both models; return their folders by name."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder / "softmax")
    linearize(model, LinearAttentionConfig(window=WINDOW)).save_pretrained(folder / "linearized")
    return {name: folder / name for name in NAMES}


@contextlib.asynccontextmanager
async def serve(name: str, folder: Path) -> AsyncIterator[Server]:
    """Start a server, wait until it answers, and end it behind the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "64"),
        *("--enforce-eager", "--skip-tokenizer-init", "--no-enable-prefix-caching"),
    ]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command = [*server, *options]
    with subprocess.Popen(command, env={**os.environ, **SETTINGS}) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as session:
                while not await _answers(session, address):
                    if process.poll() is not None:
                        raise RuntimeError(f"the server of {name} ended with {process.returncode}")
                    await asyncio.sleep(0.5)
            yield Server(name, address, psutil.Process(process.pid))
        finally:
            process.terminate()


async def _answers(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"{address}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _request(session: aiohttp.ClientSession, address: str, prompt: list[int]) -> list[float]:
    """Seconds since the request at which each token came."""
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "detokenize": False}
    begun, times = time.perf_counter(), []
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                count = len(choices[0].get("token_ids") or []) if choices else 0
                times += [time.perf_counter() - begun] * count
    if len(times) != TOKENS:
        raise RuntimeError(f"{len(times)} tokens came of {TOKENS}")
    return times


async def _usage(session: aiohttp.ClientSession, address: str, found: list[float]) -> None:
    """Look at the part of the cache in use, again and again."""
    while True:
        async with session.get(f"{address}/metrics") as answer:
            text = await answer.text()
        used = re.search(r"^vllm:kv_cache_usage_perc\S* (\S+)$", text, re.MULTILINE)
        found += [float(used[1])] if used else []
        await asyncio.sleep(0.2)


async def measure(server: Server, streams: int, length: int, each: int) -> dict[str, Any]:
    """`each` requests of every stream, one behind the other."""
    drawn = torch.Generator().manual_seed(streams * length)

    async def stream(session: aiohttp.ClientSession) -> list[list[float]]:
        times = []
        for _ in range(each):
            prompt = torch.randint(0, SIZES["vocab_size"], (length,), generator=drawn).tolist()
            times.append(await _request(session, server.address, prompt))
        return times

    usage: list[float] = []
    endless = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=endless
    ) as session:
        watch = asyncio.create_task(_usage(session, server.address, usage))
        begun = time.perf_counter()
        found = await asyncio.gather(*(stream(session) for _ in range(streams)))
        seconds = time.perf_counter() - begun
        watch.cancel()
    times = [one for several in found for one in several]
    return {
        "model": server.name,
        "streams": streams,
        "prompt": length,
        "requests": len(times),
        "requests_per_second": len(times) / seconds,
        "first_token": statistics.median(one[0] for one in times),
        "token": statistics.median((one[-1] - one[0]) / (TOKENS - 1) for one in times),
        "cache": int(max(usage) * CACHE * 2**30),
        "resident": server.resident(),
    }


async def run(report: Report, rounds: int) -> None:
    """Measure what the report lacks."""
    loads = list(product(range(rounds), PROMPTS, STREAMS))
    if all(report.has(_group(*load, name)) for load in loads for name in NAMES):
        return
    with tempfile.TemporaryDirectory() as place:
        folders = make_models(Path(place))
        async with contextlib.AsyncExitStack() as stack:
            servers = await asyncio.gather(
                *(stack.enter_async_context(serve(*one)) for one in folders.items())
            )
            for server in servers:  # what is only made at the first requests
                await measure(server, max(STREAMS), PROMPTS[0], 1)
            for number, length, streams in loads:
                for server in servers if number % 2 == 0 else servers[::-1]:
                    group = _group(number, length, streams, server.name)
                    if not report.has(group):
                        row = await measure(server, streams, length, 3 if streams == 1 else 1)
                        report.add(group, [{"round": number, **row}])


def _group(number: int, length: int, streams: int, name: str) -> str:
    return f"{name}, {streams} × {length} tokens, round {number}"


def main() -> None:
    chosen = options(__doc__, "vllm_serving", rounds=3).parse_args()
    settings = {"tokens": TOKENS, "window": WINDOW, "sizes": SIZES}
    report = open_report("vllm_serving", chosen.out, settings)
    asyncio.run(run(report, chosen.rounds))


if __name__ == "__main__":
    main()
