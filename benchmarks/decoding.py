"""Tokens per second of a pretrained model: transformers, patched, imported, linearized; in turns.

    python benchmarks/decoding.py SMOLLM2 --converted CONVERSION --llama smollm2.gguf
    python benchmarks/decoding.py SMOLLM2 --contexts 512 --sequences 2 4 8 --out several.json

`SMOLLM2` is a folder of a model that has an importer, `CONVERSION` what `fastweights linearize` has
made of it, and the GGUF file what llama.cpp reads, where llama-cpp-python is installed. The folder
of `--genai` is what `python -m onnxruntime_genai.models.builder -i SMOLLM2 -o FOLDER -p int4 -e
cpu` writes; `--compiled` adds transformers by torch.compile, with a cache of a fixed size, which is
compiled for a minute. All of these may be left out.

One sequence or several, after prompts of several lengths: milliseconds per token of each, the least
and the median of `--rounds` tokens, which all read in turn, a few at a time, and tokens per second,
of all sequences together, of the least. "imported, modules" is the imported model without
`NativeStep`. "linearized" has a window of 64 and is not trained, which takes as long; a conversion
has constant states, so it reads no more than `MOST_READ` tokens before. "flat" are the tokens of
the conversion in 4 bits after whole prompts of all lengths, in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

from fastweights import patch_transformers
from fastweights.generate import Decoder
from fastweights.importers import import_model
from fastweights.lab.bench.report import open_report
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.models import quantize
from fastweights.models.cache_names import CACHE
from measuring import options

CONTEXTS = (64, 512, 2048, 8192)
WINDOW = 64
MOST_READ = 2048
AT_ONCE = 4
"""Tokens of one before the next one's turn: what spins after one is not timed with the other."""
THEIRS, PATCHED, COMPILED = "transformers", "transformers, patched", "transformers, compiled"
LLAMA, GENAI = "llama.cpp", "ONNX Runtime GenAI"
CONVERTED, FEW = "default conversion", ", 4 bits"
BITS = {"": None, ", int8": 8, FEW: 4}
Read = Callable[[Tensor], object]


class Contender(NamedTuple):
    """A model, whose prompt is read by the first of its kind."""

    name: str
    model: Any
    modules: bool = False

    def begin(self, cache: Any) -> Read:
        """What reads tokens behind a cache that is its own."""
        decoder = Decoder(self.model, cache)
        if self.modules:
            return lambda token: decoder.read(token[:, None])
        return decoder.read_next


def contenders(folder: Path, converted: Path | None) -> Iterator[list[Contender]]:
    """Those that keep the same of a prompt."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield [Contender(THEIRS, theirs, modules=True), Contender(PATCHED, theirs, modules=True)]
    ours = import_model(theirs).eval()
    yield [*_of_bits("imported", ours), Contender("imported, modules", ours, modules=True)]
    linear = linearize(copy.deepcopy(theirs), LinearAttentionConfig(window=WINDOW)).eval()
    yield _of_bits("linearized", linear)
    if converted is not None:
        loaded = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
        yield _of_bits(CONVERTED, loaded)


def _of_bits(name: str, model: Any) -> list[Contender]:
    return [
        Contender(name + more, model if bits is None else quantize(copy.deepcopy(model), bits))
        for more, bits in BITS.items()
    ]


def begin_all(kinds: list[list[Contender]], ids: Tensor) -> dict[str, Read]:
    """What reads tokens behind a prompt ``[b t]``, by name."""
    begun: dict[str, Read] = {}
    for kind in kinds:
        first, *_ = kind
        constant = first.name not in (THEIRS, "imported")
        decoder = Decoder(first.model)
        decoder.read_prompt(ids[:, -MOST_READ:] if constant else ids, None, 2048)
        for one in kind:
            begun[one.name] = one.begin(copy.deepcopy(decoder.cache))
    return begun


def begin_llama(file: Path, ids: Tensor, threads: int, room: int) -> Read:
    """llama.cpp behind one prompt, of the weights as they are in the file."""
    from llama_cpp import Llama

    both = {"n_threads": threads, "n_threads_batch": threads}
    model = Llama(str(file), n_ctx=room, **both, verbose=False)
    model.eval(ids[0].tolist())
    return lambda token: model.eval(token.tolist())


def begin_genai(folder: Path, ids: Tensor, threads: int, room: int) -> Read:
    """ONNX Runtime GenAI behind one prompt, of the weights as they are in the folder."""
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    session = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    model = genai.Model(config)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=room)
    generator = genai.Generator(model, settings)
    generator.append_tokens(ids[0].tolist())
    return lambda token: generator.append_tokens(token.tolist())


def begin_compiled(model: Any, ids: Tensor, room: int) -> Read:
    """transformers by torch.compile behind one prompt, in a cache with room for so many tokens."""
    cache = StaticCache(config=model.config, max_cache_len=room)
    given = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
    places = iter(range(ids.shape[1], room))
    torch._dynamo.reset()
    step = torch.compile(model.forward, dynamic=False)

    @torch.inference_mode()
    def read(token: Tensor) -> object:
        return step(input_ids=token[:, None], position_ids=torch.tensor([[next(places)]]), **given)

    with torch.inference_mode():
        model(ids, **given)
    return read


def begin_others(
    chosen: argparse.Namespace, kinds: list[list[Contender]], ids: Tensor
) -> dict[str, Read]:
    """The programs of others behind one prompt."""
    room, begun = ids.shape[1] + chosen.rounds + 3 * AT_ONCE, {}
    if chosen.compiled:
        begun[COMPILED] = begin_compiled(kinds[0][0].model, ids, room)
    if chosen.llama is not None:
        begun[LLAMA] = begin_llama(chosen.llama, ids, chosen.threads, room)
    if chosen.genai is not None:
        begun[GENAI] = begin_genai(chosen.genai, ids, chosen.threads, room)
    return begun


def read_in_turn(begun: dict[str, Read], sequences: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each token, by contender; the first makes room and packs calls."""
    times: dict[str, list[float]] = {name: [] for name in begun}
    tokens = [torch.full((sequences,), i) for i in range(1, AT_ONCE + 1)]
    for _ in range(1 + rounds // AT_ONCE):
        for name, read in begun.items():
            with patch_transformers() if name == PATCHED else nullcontext():
                for token in tokens:
                    start = perf_counter()
                    read(token)
                    times[name].append(1e3 * (perf_counter() - start))
    return {name: found[AT_ONCE:] for name, found in times.items()}


def measure(
    chosen: argparse.Namespace, kinds: list[list[Contender]], ids: Tensor
) -> dict[str, Any]:
    """Milliseconds of a token and tokens per second, by contender."""
    begun, sequences = begin_all(kinds, ids), len(ids)
    if sequences == 1:
        begun |= begin_others(chosen, kinds, ids)
    return speeds_of(read_in_turn(begun, sequences, chosen.rounds), sequences)


def speeds_of(times: dict[str, list[float]], sequences: int) -> dict[str, Any]:
    """Least and median milliseconds, and tokens per second of the least."""
    least = {name: min(found) for name, found in times.items()}
    middle = {name: median(found) for name, found in times.items()}
    speed = {name: 1e3 * sequences / found for name, found in least.items()}
    return {"least": least, "median": middle, "tokens per second": speed}


def flat(chosen: argparse.Namespace, kinds: list[list[Contender]]) -> dict[str, Any]:
    """The conversion of 4 bits after prompts of all lengths, which are read as a whole."""
    (model,) = (one.model for kind in kinds for one in kind if one.name == CONVERTED + FEW)
    begun: dict[str, Read] = {}
    for context in chosen.contexts:
        decoder = Decoder(model)
        decoder.read_prompt(prompts(1, context), None, 2048)
        begun[f"after {context:,}"] = decoder.read_next
    return speeds_of(read_in_turn(begun, 1, chosen.rounds), 1)


def prompts(sequences: int, context: int) -> Tensor:
    """Drawn tokens ``[b t]``."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(1000, (sequences, context), generator=drawn)


def main() -> None:
    parser = options(__doc__, "decoding", rounds=24)
    parser.add_argument("model", type=Path)
    parser.add_argument("--converted", type=Path, help="what fastweights linearize made of it")
    parser.add_argument("--llama", type=Path, help="GGUF file of the model, for llama.cpp")
    parser.add_argument("--genai", type=Path, help="folder of it for ONNX Runtime GenAI")
    parser.add_argument("--compiled", action="store_true", help="transformers by torch.compile too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--sequences", type=int, nargs="+", default=(1,))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    settings = {"rounds": chosen.rounds, "threads": chosen.threads, "model": chosen.model.name}
    report = open_report("decoding", chosen.out, settings)
    kinds: list[list[Contender]] = []
    for context, sequences in product(chosen.contexts, chosen.sequences):
        beside = "" if sequences == 1 else f", {sequences} sequences"
        if not report.has(group := f"context {context}{beside}"):
            kinds = kinds or list(contenders(chosen.model, chosen.converted))
            found = measure(chosen, kinds, prompts(sequences, context))
            report.add(group, [{"context": context, "sequences": sequences, **found}])
    if chosen.converted is not None and 1 in chosen.sequences and not report.has("flat"):
        kinds = kinds or list(contenders(chosen.model, chosen.converted))
        report.add("flat", [flat(chosen, kinds)])


if __name__ == "__main__":
    main()
