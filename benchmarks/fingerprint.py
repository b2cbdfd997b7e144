"""The numbers that a change of structure must leave alone, bit for bit.

    python benchmarks/fingerprint.py save FOLDER        # before the change
    python benchmarks/fingerprint.py save FOLDER2       # after it
    python benchmarks/fingerprint.py compare FOLDER FOLDER2

With fixed seeds: outputs, final states and all gradients of every mixer, by every method of
evaluation, in float32 and with padding and packed documents; a training of 50 steps; a small Llama
trained and linearized; a sweep; a claim. `compare` prints what differs, by how much, and exits with
1 if anything does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastweights
from fastweights import MIXERS, Auto, Chunkwise, Parallel, Recurrent

METHODS = {
    "auto": Auto(),
    "chunkwise": Chunkwise(16),
    "parallel": Parallel(),
    "recurrent": Recurrent(),
}
PLAN = """tasks = ["mqar-small-32x4"]
mixers = ["softmax", "metala", "deltanet"]
rates = [3e-3]
seeds = [0, 1]
every = 10

[training]
steps = 20
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    saving = verbs.add_parser("save", help="write the numbers of this checkout to a folder")
    saving.add_argument("folder", type=Path)
    comparing = verbs.add_parser("compare", help="compare two such folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "compare":
        return compare(arguments.before, arguments.after)
    save(arguments.folder)
    return 0


def save(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for name in sorted(MIXERS):
        tensors |= dict(mixer_numbers(name))
    save_file(
        {name: t.detach().clone().contiguous() for name, t in tensors.items()},
        folder / "mixers.safetensors",
    )
    train(folder / "train")
    linearize(folder)
    sweep(folder)
    command("reproduce dsf-lemma2", "--out", folder / "claim")


def mixer_numbers(name: str) -> Iterator[tuple[str, Tensor]]:
    """Outputs, states and gradients of one mixer, by every method, with and without masks."""
    keep = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) > 0.2
    segments = torch.arange(37).div(13, rounding_mode="floor").expand(2, -1)
    ways: dict[str, dict[str, Any]] = {name: {"method": way} for name, way in METHODS.items()}
    ways |= {"keep": {"keep": keep}, "segments": {"segments": segments}}
    for label, way in ways.items():
        yield from ((f"{name}/{label}/{key}", value) for key, value in run(name, **way))


def run(name: str, **how: Any) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    mixer = MIXERS[name](d=64)
    x = torch.randn(2, 37, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y, state = mixer(x, **how)
    yield "y", y
    yield from ((f"state{i}", t) for i, t in enumerate(leaves(state)))
    y.sin().sum().backward()
    assert x.grad is not None
    yield "dx", x.grad
    yield from ((f"d{key}", p.grad) for key, p in mixer.named_parameters() if p.grad is not None)
    with torch.no_grad():  # a token after those
        z, _ = mixer(x[:, :1], state)
    yield "token", z


def leaves(state: Any) -> Iterator[Tensor]:
    """The tensors of a mixer's state, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        yield from leaves(list(state.values()))
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from leaves(part)
    elif hasattr(state, "__dataclass_fields__"):
        for field in state.__dataclass_fields__:
            yield from leaves(getattr(state, field))


def train(out: Path) -> None:
    small = "--layers 2 --width 64 --length 64 --batch 4 --sample 0 --device cpu"
    command("train --mixers metala,softmax --steps 50", small, "--out", out)


def linearize(folder: Path) -> None:
    """A small Llama of random weights, transfer and adaptation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer = folder / "train" / "model"
    for file in tokenizer.glob("tokenizer*"):
        (folder / "llama" / file.name).write_bytes(file.read_bytes())
    steps = "--transfer-steps 10 --finetune-steps 10 --batch 4 --length 64 --window 8"
    data = "--data shakespeare --device cpu"
    command("linearize", folder / "llama", data, steps, "--out", folder / "linearized")


def sweep(folder: Path) -> None:
    (folder / "plan.toml").write_text(PLAN)
    here = "--workers 0 --device cpu"
    command("sweep", folder / "plan.toml", here, "--out", folder / "sweep")


def command(*parts: str | Path) -> None:
    """Run a verb of the command with one thread, so that sums have one order."""
    words = [w for part in parts for w in (part.split() if isinstance(part, str) else [str(part)])]
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "import fastweights.cli, sys\n"
        "sys.exit(fastweights.cli.main())\n"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True)


def compare(before: Path, after: Path) -> int:
    differences = [*tensor_differences(before, after), *row_differences(before, after)]
    for line in differences:
        print(line)
    print(f"{len(differences)} differences" if differences else "equal, bit for bit")
    return 1 if differences else 0


def tensor_differences(before: Path, after: Path) -> Iterator[str]:
    """Of every safetensors file that stays; the optimiser's and checkpoints' too."""
    files = {
        path.relative_to(root) for root in (before, after) for path in root.rglob("*.safetensors")
    }
    for path in sorted(files):
        if not ((before / path).exists() and (after / path).exists()):
            yield f"{path}: only in {before if (before / path).exists() else after}"
            continue
        old, new = load_file(before / path), load_file(after / path)
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new:
                yield f"{path} {name}: only in {before if name in old else after}"
            elif old[name].shape != new[name].shape:
                yield f"{path} {name}: {list(old[name].shape)} became {list(new[name].shape)}"
            elif not torch.equal(bits(old[name]), bits(new[name])):
                gap = (old[name].to(torch.complex128) - new[name].to(torch.complex128)).abs().max()
                size = old[name].to(torch.complex128).abs().max()
                yield f"{path} {name}: differs by {float(gap):.2e}, of {float(size):.2e}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


TIMES = {"seconds", "tokens_per_second", "minutes", "time", "began"}
TIMES |= {"versions", "machine", "key", "trial", "commit"}


ROWS = (
    *("train/metrics.jsonl", "linearized/evaluation.json"),
    *("sweep/rows.json", "claim/trials.jsonl"),
)


def row_differences(before: Path, after: Path) -> Iterator[str]:
    """Curves, sweep rows, evaluations and verdicts, without times."""
    for path in ROWS:
        first, second = (untimed(read(folder / path)) for folder in (before, after))
        if first != second:
            yield f"{path}: {json.dumps(first)[:300]} became {json.dumps(second)[:300]}"


def read(path: Path) -> Any:
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [json.loads(text) for text in texts]


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(part) for key, part in value.items() if key not in TIMES}
    return [untimed(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    print("fastweights from", Path(fastweights.__file__).parent)
    sys.exit(main())
