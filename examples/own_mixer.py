"""A mixer of your own: linear attention whose heads forget at rates that they learn."""

from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from fastweights import Decay, FastWeightsConfig, FastWeightsForCausalLM, Mixer, register
from fastweights.layers import HeadNorm, TokenContext, head_width, split_heads


class Fading(Mixer):
    """
    f_q  x W_Q        f_α  σ(a), one per head
    f_k  x W_K        f_g  SiLU(x W_G)
    f_v  x W_V        d_k = d_v = d

    with RMSNorm per head.
    """

    def __init__(self, d: int, heads: int = 2) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale = heads, width**-0.5
        self.W_q, self.W_k, self.W_v, self.W_g, self.W_o = (
            nn.Linear(d, d, bias=False) for _ in range(5)
        )
        self.a = nn.Parameter(torch.empty(heads))
        self.norm = HeadNorm(width, center=False, affine=True)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.a, 2, 6)

    def project(self, x: Tensor, past: TokenContext) -> tuple[Decay, Tensor]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        log_alpha = logsigmoid(self.a.float())[None, None, :, None]
        return Decay(q * self.scale, k, v, log_alpha), silu(self.W_g(x))


def needles(count: int = 32, length: int = 20) -> tuple[Tensor, Tensor]:
    """One of 16 tokens somewhere in noise, and a mark at the end that asks which it was."""
    ids, needle = torch.randint(16, 31, (count, length)), torch.randint(0, 16, (count,))
    ids[torch.arange(count), torch.randint(0, length - 2, (count,))] = needle
    ids[:, -2], ids[:, -1] = 31, needle
    labels = torch.full_like(ids, -100)  # nothing else is to be learnt
    labels[:, -1] = needle
    return ids, labels


register("own_mixer", Fading)
torch.manual_seed(0)
model = FastWeightsForCausalLM(
    FastWeightsConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, mixers=[{"name": "own_mixer"}]
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(81):
    ids, labels = needles()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

with TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = FastWeightsForCausalLM.from_pretrained(folder).eval()
ids, _ = needles(count=8)
found = loaded.generate(ids[:, :-1], max_new_tokens=1, do_sample=False)[:, -1]
print("saved, loaded; needles", ids[:, -1].tolist(), "found", found.tolist())
