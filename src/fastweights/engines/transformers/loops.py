"""Recurrences that modelling files loop over themselves: RG-LRU, RWKV-4, mLSTM and lightning
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.engines.transformers.substitute import Call, Substitute
from fastweights.layers import upcast
from fastweights.methods import evaluate
from fastweights.models.cache_names import one_cache
from fastweights.recurrence import Decay
from fastweights.recurrence.scales import EMPTY_LOG_SCALE, round_up

State = tuple[Tensor, Tensor, Tensor]


def _advance(record: Decay, start: Tensor | None) -> tuple[Tensor, Tensor]:
    o, state = evaluate(record, start)
    assert isinstance(state, Tensor)
    return o, state


def scan_gated(
    self: nn.Module,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """RG-LRU's scan of x and α ``[b t d]`` from the state ``[b d]``, which is empty where `reset`
    ``[b t 1]`` is True.
    """
    del self
    if hidden_states.shape[1] == 1:
        return NotImplemented
    # a decay that is 0 already has no log; the smallest number's leaves nothing of a state, too
    alpha = upcast(recurrent_gate)
    log_alpha = alpha.clamp(min=torch.finfo(alpha.dtype).tiny).log()[..., None]
    one, x = hidden_states.new_ones(1, 1, 1, 1), hidden_states[..., None]
    record = Decay(one, one, x, log_alpha).restart(reset[..., 0])
    o, state = _advance(
        record, None if recurrent_states is None else recurrent_states[..., None, None]
    )
    return o[..., 0], state[..., 0, 0].to(acc_dtype)


def attend_by_channel(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: State | list[Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, list[Tensor] | State | None]:
    """RWKV-4's attention of keys and values ``[b t d]``; a state is (numerator, denominator,
    maximum) ``[b d]`` each, the first two divided by e^maximum.
    """
    if key.shape[1] == 1:
        return NotImplemented
    k, v = upcast(key), upcast(value)
    own = k + upcast(time_first)
    # e^-10⁴ is 0 already, and finite logs can be summed
    log_alpha = -upcast(time_decay).exp().clamp(max=1e4)
    start = k.new_full(k[:, 0].shape, EMPTY_LOG_SCALE) if state is None else state[2]
    before, m = _log_scales(k.detach(), log_alpha.detach(), start.detach())
    read = before.maximum(own.detach())
    kept, own = (before - read).to(k.dtype).exp(), (own.double() - read).to(k.dtype).exp()
    gain, decay = (k.double() - m).to(k.dtype).exp(), log_alpha + (before - m).to(k.dtype)
    # what rounding leaves of it above 0 is taken away
    decay = decay - decay.detach().clamp(min=0)
    starts = (None, None) if state is None else state[:2]
    numerator, sums = _accumulate(gain, v, decay, starts[0])
    denominator, weights = _accumulate(gain, torch.ones_like(v[:1, :1, :1]), decay, starts[1])
    o = (kept * numerator + own * v) / (kept * denominator + own)
    if not return_state and state is None:
        return o.to(key.dtype), None
    return o.to(key.dtype), [sums, weights, m[:, -1].to(sums.dtype)]


def _log_scales(gain: Tensor, log_alpha: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """m_t = max(m_{t-1} + log α, w_t) before and after every token, float64, of w ``[b t d]``, log
    α ``[d]`` and m_0 ``[b d]``.
    """
    tokens = torch.arange(1, gain.shape[1] + 1, dtype=torch.float64, device=gain.device)
    total, start = tokens[:, None] * log_alpha.double(), start.double()[:, None]
    after = total + (gain - total).cummax(1).values.maximum(start)
    # a state keeps the last one in its dtype
    after[:, -1] = round_up(after[:, -1], gain.dtype)
    return torch.cat([start, after[:, :-1]], 1), after


def _accumulate(
    gain: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The decaying sum of gain · v before every token ``[b t d]``, and after the last ``[b d]``."""
    one = gain.new_ones(1, 1, 1, 1)
    record = Decay(one, gain[..., None], v[..., None], log_alpha[..., None])
    o, after = _advance(record, None if state is None else state[..., None, None])
    first = gain.new_zeros(gain[:, :1].shape) if state is None else upcast(state)[:, None]
    return torch.cat([first, o[:, :-1, :, 0]], 1), after[..., 0, 0]


class _Gates(NamedTuple):
    """Of mLSTM heads whose state is kept divided by e^m, as theirs is; float64 ``[b t h 1]``.

    Attributes:
        decay: log α_t + m_{t-1} - m_t
        gain: e^{i_t - m_t}, of the key
        m: max(m_{t-1} + log α_t, i_t)
    """

    decay: Tensor
    gain: Tensor
    m: Tensor

    @classmethod
    def of(cls, igate: Tensor, fgate: Tensor, start: Tensor) -> _Gates:
        """Of i and f ``[b h t]`` and m_0 ``[b h 1]``."""
        gain, log_alpha = igate.double(), F.logsigmoid(fgate.double())
        total = log_alpha.cumsum(-1)
        m = total + (gain - total).cummax(-1).values.maximum(start.double())
        # a state keeps the last one in its dtype
        dtype, fixed = torch.promote_types(igate.dtype, torch.float32), m.detach().clone()
        fixed[..., -1] = round_up(fixed[..., -1], dtype)
        m = m + (fixed - m.detach())
        decay = log_alpha + torch.cat([start.double().detach(), fixed[..., :-1]], -1) - fixed
        # what rounding leaves of it above 0 is taken away
        decay = decay - decay.detach().clamp(min=0)
        return cls(*(s.transpose(1, 2)[..., None] for s in (decay, (gain - fixed).exp(), m)))


def read_cells(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Tensor | tuple[Tensor, State]:
    """mLSTM of q, k ``[b h t k]``, v ``[b h t v]`` and the gates ``[b h t]`` from the state
    (C ``[b h k v]``, n ``[b h k]``, m ``[b h 1]``).

    o_t = q_t C_t / (max(|q_t n_t|, e^{-m_t}) + eps), with C and n divided by e^m: the eps counts
    beside numbers so divided, so that m is part of the function and has a gradient.
    """
    config, tokens = self.config, query.shape[2]
    if tokens == 1:
        return NotImplemented
    mode = mode or str(config.mode)
    with_state = "inference" in mode
    if "train" in mode:
        with_state = config.return_last_states if return_last_states is None else return_last_states
        padded = config.mode == "train_with_padding"
        if with_state if padded else tokens % config.chunk_size:
            return NotImplemented
    b, h, _, k = key.shape
    if c_initial is None:
        c_initial = upcast(value).new_zeros(b, h, k, value.shape[-1])
    n_initial = c_initial[..., 0] if n_initial is None else n_initial
    m_initial = n_initial[..., :1] if m_initial is None else m_initial
    gates = _Gates.of(igate, fgate, m_initial)
    q, key, v = (upcast(s).transpose(1, 2) for s in (query, key, value))
    record = Decay(
        q * k**-0.5,
        key * gates.gain.to(key.dtype),
        F.pad(v, (0, 1), value=1.0),
        gates.decay.to(key.dtype),
    )
    o, state = _advance(record, torch.cat([c_initial, n_initial[..., None]], -1))
    fixed = gates.m.detach()
    least, eps = (-fixed).exp().to(o.dtype), config.eps * (gates.m - fixed).exp().to(o.dtype)
    o = o[..., :-1] / (o[..., -1:].abs().maximum(least) + eps)
    o = o.transpose(1, 2).to(query.dtype)
    if not with_state:
        return o
    return o, (state[..., :-1], state[..., -1], gates.m[:, -1].to(state.dtype))


def attend_with_decay(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """A layer of lightning attention, ``[b t d]``, and its state ``[b h k v]``."""
    del position_embeddings, kwargs
    cache = one_cache(past_key_values=past_key_values, cache=cache)
    start = None
    if cache is not None:
        start = cache.get_linear_cache(self.layer_idx)
    if hidden_states.shape[1] == 1 and start is not None:
        return NotImplemented
    streams = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        streams = (streams * attention_mask[:, :, None]).to(streams.dtype)
    heads = streams.unflatten(-1, (self.num_attention_heads, -1))
    q, k, v = heads.split(self.head_dim, dim=3)
    o, state = _advance(Decay(q, k, v, -upcast(self.slope_rate)[None, None, :, 0]), start)
    state = state.to(v.dtype)
    o = F.sigmoid(self.output_gate(hidden_states)) * self.norm(o.flatten(2))
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return self.out_proj(o), state


def _gated_calls() -> Iterator[Call]:
    b, t, d = 2, 9, 5
    reset = torch.zeros(b, t, 1, dtype=torch.bool)
    reset[0, 4] = reset[1, 0] = True
    for state in (None, torch.randn(b, d, dtype=torch.float32)):
        yield Call((None, torch.randn(b, t, d), torch.rand(b, t, d), reset, state))


def _channel_calls() -> Iterator[Call]:
    b, t, d = 2, 9, 5
    for state in (None, (torch.randn(b, d), torch.rand(b, d), torch.randn(b, d))):
        decay, first, key, value = *torch.randn(2, d), *torch.randn(2, b, t, d)
        yield Call((decay, first, 3 * key, value), {"state": state, "return_state": True})


def _cell_calls() -> Iterator[Call]:
    file = import_module("transformers.models.xlstm.modeling_xlstm")
    b, h, k, v = 2, 2, 4, 6
    backend = file.xLSTMBackend(file.xLSTMConfig(hidden_size=16, num_heads=h, chunk_size=4))
    for tokens, state in ((11, False), (11, True)):
        gates = torch.randn(2, b, h, tokens)
        start = torch.randn(b, h, k, v), torch.randn(b, h, k), torch.randn(b, h, 1)
        named: dict[str, Any] = dict(
            zip(("c_initial", "n_initial", "m_initial"), start, strict=True)
        )
        q, key, value = *torch.randn(2, b, h, tokens, k), torch.randn(b, h, tokens, v)
        yield Call((backend, q, key, value, 3 * gates[0], gates[1]), named if state else {})


class _State(NamedTuple):
    """A cache that stays as it is."""

    state: Tensor

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        del layer_idx
        return self.state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """The layer returns its state as well."""


def _lightning_calls() -> Iterator[Call]:
    file = import_module("transformers.models.minimax.modeling_minimax")
    config = file.MiniMaxConfig(
        hidden_size=8,
        num_attention_heads=2,
        head_dim=4,
        num_hidden_layers=2,
        block_size=4,
        layer_types=["linear_attention", "full_attention"],
    )
    layer, mask = file.MiniMaxLightningAttention(config, 0), torch.ones(2, 9)
    mask[0, :3] = 0
    for cache in (None, _State(torch.randn(2, 2, 4, 4))):
        yield Call((layer, torch.randn(2, 9, 8), None, mask, cache))


LOOPS = (
    Substitute("RecurrentGemmaRglru._rnn_scan", scan_gated, _gated_calls),
    Substitute("rwkv_linear_attention_cpu", attend_by_channel, _channel_calls),
    Substitute("xLSTMBackend.forward", read_cells, _cell_calls),
    Substitute("MiniMaxLightningAttention.forward", attend_with_decay, _lightning_calls),
)
