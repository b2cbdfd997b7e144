"""A rule of your own: erase under one vector, write under another; checked, then in a model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from fastweights import (
    LTV,
    Chunkwise,
    FastWeightsConfig,
    FastWeightsForCausalLM,
    Mixer,
    Parallel,
    Recurrent,
    evaluate,
    explain,
    register,
)
from fastweights.layers import HeadNorm, head_width, split_heads
from fastweights.recurrence import ErasingTransition, MatrixRule
from fastweights.recurrence.products import decay_products


def heads_first(stream: Tensor, dtype: torch.dtype) -> Tensor:
    return stream.to(dtype).transpose(1, 2)  # [b h t ·]: the layout in which chunks are matrices


@dataclass(frozen=True, eq=False)
class EraseWrite(MatrixRule[Tensor]):
    """Erase under one vector, write under another.

    S_t = (I - β_t e_tᵀ e_t) α_t S_{t-1} + k_tᵀ v_t ;  o_t = q_t S_t
    """

    writes = ("k", "beta")  # zero where a token is padding

    q: Tensor  # [b t h k]
    k: Tensor  # [b t h k]
    v: Tensor  # [b t h v]
    e: Tensor  # [b t h k], of length 1
    beta: Tensor  # [b t h 1]
    log_decay: Tensor  # [b t h 1], log α ≤ 0

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, e, beta, log_decay = self._streams(state.dtype)
        state = log_decay.exp() * state
        state = state - (beta * e).mT @ (e @ state) + k.mT @ v
        return (q @ state).transpose(1, 2).to(self.output), state

    def chunk(self, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, e, beta, log_decay = self._streams(state.dtype)
        found = self._found(v, state)
        wrote, erased = (decay_products(q, key, log_decay) for key in (k, beta * e))
        o = wrote.inner @ v - erased.inner @ found + wrote.query @ state
        after = wrote.advance(state, v) - erased.key.mT @ found
        return o.transpose(1, 2).to(self.output), after

    def _found(self, v: Tensor, state: Tensor) -> Tensor:
        """r: what each token finds under e, of the values `v` and the `state` before the chunk."""
        _, k, _, e, beta, log_decay = self._streams(self.accumulator)
        wrote, erased = (decay_products(e, key, log_decay) for key in (k, beta * e))
        before = wrote.inner.tril(-1) @ v + wrote.query @ state  # with nothing erased since
        return torch.linalg.solve_triangular(
            erased.inner.tril(-1), before, upper=False, unitriangular=True
        )

    def _streams(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        b, t, h = self.shape
        streams = (self.q, self.k, self.v, self.e, self.beta, self.log_decay)
        return tuple(heads_first(s.expand(b, t, h, -1), dtype) for s in streams)

    def attention_map(self) -> Tensor:
        """The output for v = 1, token by token, from the empty state."""
        b, t, h = self.shape
        unit = torch.eye(t, dtype=self.accumulator, device=self.device).expand(b, h, t, t)
        o, _ = replace(self, v=unit.transpose(1, 2)).chunk(
            unit.new_zeros(b, h, self.q.shape[-1], t)
        )
        return o.transpose(1, 2)

    def ltv(self) -> LTV:
        """A linear time-varying system whose transition is the identity plus rank one."""
        q, k, e, beta, decay = (
            s.to(self.accumulator).expand(*self.shape, -1)
            for s in (self.q, self.k, self.e, self.beta, self.log_decay.exp())
        )
        return LTV(A=ErasingTransition(decay, e, beta), B=k, C=q)


class EraseWriteMixer(Mixer):
    """
    f_q  x W_Q        f_α  σ(x W_α + b_α), one per head
    f_k  x W_K        f_g  1
    f_v  x W_V        d_k = d_v = d

    and L2(x W_E), σ(x W_β) of the rule `EraseWrite`, RMSNorm per head.
    """

    def __init__(self, d: int, heads: int = 2) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale = heads, width**-0.5
        self.W_q, self.W_k, self.W_v, self.W_e, self.W_o = (
            nn.Linear(d, d, bias=False) for _ in range(5)
        )
        self.W_beta, self.W_alpha = nn.Linear(d, heads), nn.Linear(d, heads)
        self.norm = HeadNorm(width, center=False, affine=True)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.W_alpha.bias, 4.0)  # α = 0.98: about 50 tokens

    def project(self, x, past):
        q, k, v, e = (
            split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v, self.W_e)
        )
        beta, alpha = self.W_beta(x)[..., None], self.W_alpha(x)[..., None]
        e = normalize(e.float(), dim=-1)
        return EraseWrite(q * self.scale, k, v, e, beta.sigmoid(), logsigmoid(alpha.float())), None


def needles(count: int = 32, length: int = 20) -> tuple[Tensor, Tensor]:
    """One of 16 tokens somewhere in noise, and a mark at the end that asks which it was."""
    ids, needle = torch.randint(16, 31, (count, length)), torch.randint(0, 16, (count,))
    ids[torch.arange(count), torch.randint(0, length - 2, (count,))] = needle
    ids[:, -2], ids[:, -1] = 31, needle
    labels = torch.full_like(ids, -100)  # nothing else is to be learnt
    labels[:, -1] = needle
    return ids, labels


torch.manual_seed(0)
q, k, e = (torch.randn(2, 50, 3, 8, dtype=torch.float64) for _ in range(3))
v, beta, decay = (torch.randn(2, 50, 3, width, dtype=torch.float64) for width in (4, 1, 1))
record = EraseWrite(q, k, v, normalize(e, dim=-1), beta.sigmoid(), logsigmoid(decay + 3))
o, state = evaluate(record, method=Recurrent())  # the definition
for method in (Chunkwise(16), Parallel()):
    torch.testing.assert_close(evaluate(record, method=method), (o, state))
torch.testing.assert_close(record.ltv().kernel(), record.attention_map())
print("token by token, in chunks, at once, and as a linear system: the same")
print(explain(record).splitlines()[-1])

register("own_rule", EraseWriteMixer)
model = FastWeightsForCausalLM(
    FastWeightsConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, mixers=[{"name": "own_rule"}]
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
