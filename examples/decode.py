"""Decode in constant memory, beside a softmax model whose memory grows."""

import torch

from fastweights import FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM, stream

torch.manual_seed(0)


def model_of(*mixers: str) -> FastWeightsForCausalLM:
    config = FastWeightsConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        mixers=[{"name": name} for name in mixers],
    )
    return FastWeightsForCausalLM(config).eval()


def bytes_after(model: FastWeightsForCausalLM, tokens: int) -> int:
    cache = FastWeightsCache()
    with torch.inference_mode():
        model(input_ids=torch.randint(0, 256, (1, tokens)), past_key_values=cache, use_cache=True)
    return cache.nbytes


linear = model_of("gated_deltanet")
for name, model in {
    "gated DeltaNet": linear,
    "one softmax layer in four": model_of(*["gated_deltanet"] * 3, "softmax"),
    "softmax": model_of("softmax"),
}.items():
    sizes = ", ".join(f"{bytes_after(model, n):,} after {n}" for n in (100, 400, 1600))
    print(f"{name}: bytes of memory {sizes}")

prompt = torch.randint(0, 256, (1, 50))
streamed = torch.stack(list(stream(linear, prompt, max_new_tokens=30, temperature=0)), dim=1)
generated = linear.generate(prompt, max_new_tokens=30, do_sample=False)[:, 50:]
assert torch.equal(streamed, generated)
print("stream and generate agree:", streamed[0, :10].tolist(), "…")
