"""Parity (MesaNet, appendix H and Figure 8): ``python benchmarks/mesa/parity.py --seeds 5``.

The running parity of random bits is learned on strings of 40 and read off strings of 256. γ in (0,
1) cannot hold it; γ in (-1, 1), with Λ of 50 and more, can. The paper trains 10,000 batches of 256
strings, two layers of width 128; here are fewer and smaller ones. What the file holds already is
not trained again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train import AdamW, Cosine
from fastweights.training.loop.optimizers import set_learning_rates

MIXERS = {"γ in (0, 1)": "mesa", "γ in (-1, 1)": "mesa_signed"}
LENGTHS = (40, 64, 128, 256)


@dataclass(frozen=True)
class Setting:
    """One training. mixer: mesa or mesa_signed; trained, tested: lengths."""

    mixer: str = "mesa_signed"
    seed: int = 0
    steps: int = 300
    batch: int = 64
    trained: int = 40
    width: int = 64
    lr: float = 1e-2
    weight_decay: float = 0.03


def strings(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(bits, whether the ones so far are odd), ``[count length]``."""
    bits = torch.randint(2, (count, length), generator=generator)
    return bits, bits.cumsum(1) % 2


def trained(setting: Setting) -> FastWeightsForCausalLM:
    torch.manual_seed(setting.seed)
    config = FastWeightsConfig(
        vocab_size=2,
        hidden_size=setting.width,
        num_hidden_layers=2,
        mixers=[{"name": setting.mixer, "heads": 4}],
        intermediate_size=3 * setting.width,
    )
    model = FastWeightsForCausalLM(config).train()
    optimizers, generator = (
        AdamW(setting.lr, weight_decay=setting.weight_decay).build(model),
        torch.Generator(),
    )
    generator.manual_seed(setting.seed)
    for step in range(setting.steps):
        factor = Cosine(warmup=20).factor(step, setting.steps)
        set_learning_rates(optimizers, lambda peak, factor=factor: factor * peak)
        bits, odd = strings(setting.batch, setting.trained, generator)
        F.cross_entropy(model(bits).logits.flatten(0, 1), odd.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracies(model: FastWeightsForCausalLM, count: int = 256) -> dict[int, float]:
    """Of the parity of whole strings, by their length."""
    bits, odd = strings(count, max(LENGTHS), torch.Generator().manual_seed(12345))
    right = (model(bits).logits.argmax(-1) == odd).double().mean(0)
    return {length: right[length - 1].item() for length in LENGTHS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mesa_parity.json"))
    chosen = parser.parse_args()
    rows = json.loads(chosen.out.read_text())["rows"] if chosen.out.exists() else []
    done = {(row["mixer"], row["seed"]) for row in rows}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, (gate, mixer) in product(range(chosen.seeds), MIXERS.items()):
        if (mixer, seed) not in done:
            setting = Setting(mixer, seed, chosen.steps)
            found = accuracies(trained(setting))
            rows.append({"gate": gate, **asdict(setting), "accuracy": found})
            print(gate, seed, {n: round(a, 4) for n, a in found.items()}, flush=True)
            chosen.out.write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
