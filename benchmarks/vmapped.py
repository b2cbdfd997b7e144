"""Five small models of one mixer trained one after the other, and all at once under ``torch.vmap``:
milliseconds.

``torch.vmap`` has no rule for compiled kernels, so that the models trained at once take the loop
over chunks in torch.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from fastweights.kernels import only
from fastweights.kernels.chunked import CHUNK_LOOP
from fastweights.lab.sweep import SweepModel, SweepPlan
from fastweights.lab.tasks import TASKS, Batch
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.loss import IGNORE_INDEX

SEEDS = range(5)
TASK = "mqar-small-32x4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", nargs="+", default=["gla", "linear"])
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--repeats", type=int, default=20)
    chosen = parser.parse_args()
    for mixer in chosen.mixers:
        for width in chosen.widths:
            print(
                json.dumps(
                    {"mixer": mixer, "width": width, **measured(mixer, width, chosen.repeats)}
                ),
                flush=True,
            )


def measured(mixer: str, width: int, repeats: int) -> dict[str, float]:
    """The least milliseconds in which all five models make an update; the two ways take turns."""
    protocol = replace(TASKS[TASK], backbone=replace(TASKS[TASK].backbone, widths=(width,)))
    runs = list(
        SweepPlan(
            {TASK: protocol}, (SweepModel.of(mixer),), rates=(3e-3,), seeds=tuple(SEEDS)
        ).runs()
    )
    models = [FastWeightsForCausalLM(run.config()) for run in runs]
    batches = [protocol.fresh(seed, 0, protocol.training.batch) for seed in SEEDS]
    ways = {"one by one": one_by_one(models, batches), "vmapped": at_once(models, batches)}
    for update in ways.values():
        update()
    rounds = [
        {name: _milliseconds(update) for name, update in ways.items()} for _ in range(repeats)
    ]
    return {name: round(min(times[name] for times in rounds), 2) for name in ways}


def one_by_one(models: list[FastWeightsForCausalLM], batches: list[Batch]) -> Callable[[], None]:
    """An update of every model, as the sweep makes it."""
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]

    def update() -> None:
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            _loss(model(batch.inputs).logits, batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return update


def at_once(models: list[nn.Module], batches: list[Batch]) -> Callable[[], None]:
    """The same updates on stacked parameters."""
    stacked, buffers = stack_module_state(models)
    parameters = {name: p.detach() for name, p in stacked.items()}
    base: nn.Module = copy.deepcopy(models[0]).to("meta")
    inputs, labels = (
        torch.stack(parts) for parts in zip(*((b.inputs, b.labels) for b in batches), strict=True)
    )
    optimizer = torch.optim.AdamW(list(parameters.values()), fused=True)

    def loss(
        own: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor:
        embedded = F.embedding(inputs, own["model.embed_tokens.weight"])
        return _loss(
            functional_call(base, (own, buffers), (), {"inputs_embeds": embedded}).logits, labels
        )

    step = vmap(grad(loss))

    def update() -> None:
        with only(CHUNK_LOOP.name):
            for name, gradient in step(parameters, buffers, inputs, labels).items():
                parameters[name].grad = gradient
        optimizer.step()

    return update


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _milliseconds(update: Callable[[], None]) -> float:
    start = time.perf_counter()
    update()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
