"""Mixers of a served model: their states, or their keys and values, are in vLLM's caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers.attention import Attention

from fastweights.engines.vllm.forms import KeptKeys, KeptState
from fastweights.engines.vllm.groups import LayerGroup
from fastweights.engines.vllm.states import PagedStateLayer
from fastweights.engines.vllm.weights import Replacement
from fastweights.kernels.pages import load, store
from fastweights.layers import LayerStream
from fastweights.methods import Auto, Method, advance, evaluate
from fastweights.mixer import Mixer, MixerState
from fastweights.recurrence.streams import state_parts


class StateMixer(PagedStateLayer, Replacement):
    """A mixer with states, which reads the tokens ``[n 1 d]`` of all sequences of a step.

    Attributes:
        mixer: The mixer of the model.
        form: How its state is made of the tensors of a page.
    """

    def __init__(
        self, mixer: Mixer, kept: KeptState, page: int, name: str, layers: dict[str, Any]
    ) -> None:
        super().__init__(kept.layout, page, name, layers)
        self.mixer, self.form = mixer, kept.form

    def forward(
        self,
        x: Tensor,
        state: object = None,
        *,
        keep: None = None,
        segments: None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> tuple[Tensor, None]:
        """(y, None); the states are read from their pages and written to them.

        Args:
            x: ``[n 1 d]``, all tokens of the step, a sequence's behind each other.
            state: Not read: vLLM says whose tokens these are.
            keep, segments: None, as there is neither padding nor a packed document.
            method: How the recurrence is evaluated.
            stream: What earlier layers say of these tokens, ``[n 1 c]``, and this one to later.
        """
        stream = LayerStream() if stream is None else stream
        groups, tokens = self.groups(), x[:, 0]
        if groups is None:
            own = LayerStream(_turned(stream.values))
            y, _ = self.mixer(x.transpose(0, 1), method=method, stream=own)
            stream.values = _turned(own.values)
            return y.transpose(0, 1), None
        y, given, left = torch.zeros_like(tokens), stream.values, None
        for group in groups:
            own = LayerStream(None if given is None else group.take(given[:, 0]))
            group.put(y, self._read(group, group.take(tokens), method, own))
            if own.values is not None:
                left = x.new_zeros(len(x), own.values.shape[-1]) if left is None else left
                group.put(left, own.values.to(left.dtype))
        stream.values = None if left is None else left[:, None]
        return y[:, None], None

    def _read(self, group: LayerGroup, x: Tensor, method: Method, stream: LayerStream) -> Tensor:
        """What `Mixer.forward` does; states are settled, so that they fit their pages."""
        memory, others = self.paged[: self.form.parts], self.paged[self.form.parts :]
        before = None
        if not group.begins:  # of which the memory stays where it is
            before = self.form.state([*memory, *load(others, group.slots)])
        driven, recurrence, gate, past = self.mixer.project_all(
            x, before, keep=group.keep, method=method, stream=stream
        )
        if before is None:
            o, after = evaluate(driven, None, method)
            store(memory, group.slots, state_parts(driven.settle(after)))
        else:
            o = advance(driven, before.memory, group.slots, method)
        store(others, group.slots, [*(past.tails[n] for n in self.form.tails), past.position])
        return self.mixer.read(o, gate, recurrence)


def _turned(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.transpose(0, 1)


class KeyMixer(Replacement):
    """A softmax mixer over all tokens, whose keys and values vLLM keeps and attends to.

    Attributes:
        mixer: The mixer of the model.
        attention: vLLM's attention.
    """

    def __init__(self, mixer: Mixer, kept: KeptKeys, width: int, config: Any, name: str) -> None:
        super().__init__()
        self.mixer, self.width = mixer, width
        self.attention = Attention(
            kept.heads,
            width,
            kept.keys**-0.5,
            num_kv_heads=kept.groups,
            cache_config=config.cache_config,
            prefix=name,
        )

    def forward(
        self,
        x: Tensor,
        state: MixerState,
        *,
        keep: None = None,
        segments: None = None,
        method: Method = Auto(),
        stream: LayerStream | None = None,
    ) -> tuple[Tensor, None]:
        """(y, None) of all tokens ``[n 1 d]`` of the step, each a sequence at its position."""
        _, record, gate, _ = self.mixer.project_all(x, state, method=method, stream=stream)
        rule: Any = record
        n, _, h = rule.shape
        groups = self.attention.num_kv_heads
        q, k, v = (
            self._widen(s.expand(n, 1, heads, -1)).flatten(1)
            for s, heads in ((rule.q, h), (rule.k, groups), (rule.v, groups))
        )
        o = self.attention(q, k, v).unflatten(-1, (h, self.width))
        return self.mixer.read(o[:, None, :, : rule.values], gate, rule), None

    def _widen(self, s: Tensor) -> Tensor:
        """Zeros behind the channels, which change no product, up to a width that vLLM knows."""
        return F.pad(s, (0, self.width - s.shape[-1])).to(self.attention.dtype)
