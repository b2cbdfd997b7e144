"""Train a language model on the bundled Shakespeare, stop, go on, and sample from it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights import stream
from fastweights.train import AdamW, Architecture, Bytes, Cosine, Every, Text, TrainConfig, train

STEPS = 40

config = TrainConfig(
    text=Text(sources=("shakespeare",), tokenization=Bytes()),
    model=Architecture(mixers=({"name": "metala", "heads": 2},), layers=2, width=32),
    optimizer=AdamW(lr=1e-2),
    schedule=Cosine(warmup=10),
    every=Every(log=10, evaluation=STEPS, checkpoint=10),
    steps=STEPS,
    batch=8,
    length=64,
)

with TemporaryDirectory() as folder:
    out = Path(folder) / "run"
    asked = iter(range(STEPS))
    stopped = train(config, out, cpu=True, stop=lambda: next(asked) >= STEPS // 2)
    print(f"stopped after step {stopped.step} of {stopped.steps}")

    result = train(config, out, cpu=True)  # the same call goes on, to the same weights
    print(f"complete: {result.nats_per_byte:.2f} nats per byte on the held-out text")

    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")

prompt = tokenizer("KING:", return_tensors="pt", add_special_tokens=False).input_ids
generator = torch.Generator().manual_seed(0)
tokens = stream(model, prompt, max_new_tokens=80, temperature=0.8, generator=generator)
print("KING:" + tokenizer.decode(torch.cat(list(tokens))))
