"""Make a Llama linear by attention transfer, and see whether its linear side is used."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.linearize import (
    AttentionCall,
    LinearAttentionConfig,
    LinearOnly,
    Mode,
    WindowOnly,
    branches,
    linearize,
    use_mode,
)

torch.manual_seed(0)
llama = LlamaForCausalLM(  # in earnest: LlamaForCausalLM.from_pretrained(…)
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
).eval()
ids = torch.randint(0, 64, (4, 40))
with torch.no_grad():
    wanted = llama(input_ids=ids).logits

model = linearize(llama, LinearAttentionConfig(window=4))  # in place


def distance() -> float:
    """How far the logits are from the softmax model's, relative."""
    with torch.no_grad():
        return ((model(input_ids=ids).logits - wanted).norm() / wanted.norm()).item()


class Transfer(Mode):
    """The softmax goes on; the linear attention learns its outputs."""

    constant = False

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def attend(self, call: AttentionCall) -> Tensor:
        with torch.no_grad():
            softmax = call.softmax()
        self.losses.append((call.linear() - softmax).square().mean() / softmax.square().mean())
        return softmax


print(f"before transfer: {distance():.3f} away from the softmax")
model.requires_grad_(False)
new = [p.requires_grad_() for branch in branches(model).values() for p in branch.parameters()]
optimizer = torch.optim.AdamW(new, lr=3e-2)
for _ in range(60):
    transfer = Transfer()
    with use_mode(model, transfer):
        model(input_ids=torch.randint(0, 64, (8, 40)))
    torch.stack(transfer.losses).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"after transfer:  {distance():.3f}")
for mode in (WindowOnly(), LinearOnly()):
    with use_mode(model, mode):
        print(f"{type(mode).__name__}: {distance():.3f}")
