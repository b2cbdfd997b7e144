"""A token of a few sequences through a linearized model's layers, by calls of C packed once.

The branches read the queries, keys and values that the model's own attentions would have given
them. Whether that is all that the model computes is tried out: the step must give the bits of the
modules. Where weights are of few bits, it is then made anew of kernels that round otherwise. Of
several sequences modules make features by torch, which sums in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fastweights.kernels.attention import CacheReader, gone_by
from fastweights.kernels.growing import append, drop_oldest
from fastweights.kernels.native import library
from fastweights.kernels.native.window_token import HeadTokens, TokenStreams
from fastweights.linearize.convert.attention import attend, take_memory
from fastweights.linearize.convert.attention_layers import softmax_name
from fastweights.linearize.convert.branch import LinearBranch, WindowedBranch
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.head_windows import GroupedBranch
from fastweights.linearize.convert.landmark_branch import LandmarkBranch
from fastweights.linearize.convert.modes import Student
from fastweights.linearize.convert.transformers_seams import (
    decoder_layers,
    implementation_of,
)
from fastweights.models.native_step import (
    Call,
    LayerCalls,
    LayerModules,
    NativeStep,
    require_call,
    require_products,
)
from fastweights.models.quantize import Int8Linear
from fastweights.models.token_reader import NoStepError
from fastweights.ops.normalization import RMSNorm, prepare_norm, rms_normalize
from fastweights.ops.rotation import Rotation, prepare_rotation
from fastweights.recurrence import Recurrence
from fastweights.recurrence.head_groups import HeadGroups

_TOKENS = 6
"""Tokens that are read to try a step out, the last two by it."""

_tried: WeakKeyDictionary[nn.Module, tuple[tuple[type, ...], bool]] = WeakKeyDictionary()
"""Of which classes the modules of models were when a step was tried out, and whether it had their
bits."""


class BranchToken:
    """What reads the next token of a branch, by a call of C packed once for its sinks, and holds
    the state that this writes.

    Args:
        branch: Which is in the step of a model, whose weights stay where they are.
        streams: Where it is then, for each sequence.
    """

    def __init__(self, branch: LinearBranch, streams: Sequence[TokenStreams]) -> None:
        self._branch, self._streams = branch, streams
        by_head = isinstance(branch, GroupedBranch)
        self._groups = branch.branches if by_head else (branch,)
        self._heads = branch.key_heads if by_head else [list(range(branch.attention.kv_heads))]
        self._landmarks = [own for own in self._groups if isinstance(own, LandmarkBranch)]
        self._weights = list(branch.parameters())
        windows = all(isinstance(own, WindowedBranch) for own in self._groups)
        convolved = any(own.convolution is not None for own in self._groups)
        unversioned = any(w.is_inference() for w in self._weights)
        self._refused = not windows or convolved or unversioned
        self._memory: StateLayer | None = None
        self._tokens: HeadTokens | None = None
        self._past: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._places: list[int] = []

    def read(self, memory: StateLayer, places: list[int]) -> bool:
        """Read a token of each sequence at these places, which leaves o where it belongs, and its
        state held here; False where the branch reads it."""
        if self._refused or not (self._goes_on(memory, places) or self._begin(memory, places)):
            return False
        for call in self.calls:
            call()
        self.count(memory, [place + 1 for place in places])
        return True

    @property
    def alone_from(self) -> int:
        """The place from which on no sink asks for another call."""
        return max((own.all_left for own in self._landmarks), default=0)

    @property
    def calls(self) -> tuple[Call, ...]:
        """What reads the next token behind the state that is held here."""
        return () if self._tokens is None else self._tokens.calls

    def count(self, memory: StateLayer, places: list[int]) -> None:
        """Count a token that the calls have read; the next ones are at these places."""
        self._places = places
        memory.tokens += 1

    def state(self) -> tuple[Tensor, ...]:
        assert self._tokens is not None
        parts = [part for own in self._tokens.states() for part in own]
        if not self._past:
            return tuple(parts)
        keys, count = self._past
        return *parts, keys, count.new_tensor(self._places)

    def holds(self, memory: StateLayer, places: list[int]) -> bool:
        """Whether the state is held here, and the next tokens are at these places."""
        return memory.holder is self and places == self._places

    def _goes_on(self, memory: StateLayer, places: list[int]) -> bool:
        """Whether the state is the one that is held, and its call goes on being right."""
        return self.holds(memory, places) and self.unchanged() and self._reads_alone(places)

    def unchanged(self) -> bool:
        """Whether the weights are those that the calls were packed with."""
        return self._versions == [w._version for w in self._weights]

    def _reads_alone(self, places: list[int]) -> bool:
        return all(own.reads_alone(place) for own in self._landmarks for place in {*places})

    def _begin(self, memory: StateLayer, places: list[int]) -> bool:
        """Take the state, if C reads the token by itself, at its place in its document."""
        if not self._reads_alone(places):
            return False
        kept = memory.state
        assert kept is not None
        # keys, values, memory and age of each group, and behind them what sinks have kept
        groups = [kept[4 * i : 4 * i + 4] for i in range(len(self._groups))]
        past = kept[4 * len(groups) :]
        if past and past[1].tolist() != places:
            return False
        records = (
            self._records(own, tuple(part[i : i + 1] for part in past))
            for i, own in enumerate(self._streams)
        )
        try:
            tokens = HeadTokens(
                list(zip(*records, strict=True)), self._heads, groups, self._streams
            )
        except ValueError:
            self._refused = True
            return False
        if self._memory is not None and self._memory.holder is self:
            self._memory.state = self._memory.state  # a copy, of another cache
        self._memory, self._tokens, self._past, self._places = memory, tokens, past, places
        self._versions = [w._version for w in self._weights]
        memory.lend(self)
        return True

    def _records(self, streams: TokenStreams, past: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The records of one sequence's token, one for each group of heads."""
        record: Recurrence = self._branch.record(streams.q, streams.k, streams.v, past=past)
        return record.groups if isinstance(record, HeadGroups) else (record,)


class LinearizedStep(NativeStep):
    """The step of a linearized model of Llama's form."""

    def __init__(self, model: Any, sequences: int, exact: bool = False) -> None:
        self._attentions = [layer.self_attn for layer in _layers_of(model)]
        for attention in self._attentions:
            _require_attention(attention)
        self._softmax = softmax_name(implementation_of(model.config))
        self._copied: list[tuple[Tensor, int]] = []
        super().__init__(model, sequences, hooked=(take_memory,), exact=exact)
        self._modes = [a.__dict__ for a in self._attentions if hasattr(a, "linear_branch")]
        width = self._attentions[0].head_dim
        self._kinds = _rotary_kinds(model, len(self._layers))
        self._turns = {
            kind: (self._room(f"cosines {kind}", width), self._room(f"sines {kind}", width))
            for kind in self._kinds
        }
        turned = [
            self._room("turned", layer.turning.numel() // sequences).view(layer.turning.shape)
            for layer in self._layers
        ]
        self._turned = [layer.divide(own) for layer, own in zip(self._layers, turned, strict=True)]
        self._begun = [
            library.chain([*layer.project, *self._rotations_of(layer, own, self._turns[kind])])
            for layer, own, kind in zip(self._layers, self._turned, self._kinds, strict=True)
        ]
        head = model.lm_head
        if not hasattr(head, "out_features"):
            raise NoStepError("its head is not a product")
        self._logits = self._room("logits", head.out_features)
        last = self.prepare_norm(model.model.norm, self._x, self._normed)
        self._end = library.chain([last, *self._calls_of_head(head)])
        self._tokens = list(map(self._token_of, self._attentions, self._layers, self._turned))
        self._linear = [token for token in self._tokens if token is not None]
        self._alone_from = max((token.alone_from for token in self._linear), default=0)
        self._joined: list[tuple[Call, ...]] = []
        self._whole: list[Call] = []
        self._readers = list(map(_reader_of, self._attentions, self._layers, self._turned))
        judged = _verdict(model) is not None or (sequences == 1 and not self.rounds)
        alone = self if judged else LinearizedStep(model, 1, exact=True)
        if not _has_the_modules_bits(alone):
            raise NoStepError("its layers compute more than projections, attention and an MLP")

    def parts(self) -> Iterator[LayerModules]:
        for layer in _layers_of(self.model):
            own, mlp = layer.self_attn, layer.mlp
            require_products(own.q_proj, own.k_proj)
            yield LayerModules(
                _norms_of(layer),
                (getattr(own, "q_norm", None), getattr(own, "k_norm", None)),
                (own.q_proj, own.k_proj, own.v_proj, own.o_proj),
                (mlp.gate_proj, mlp.up_proj, mlp.down_proj),
                own.q_proj.out_features // own.head_dim,
                own.k_proj.out_features // own.head_dim,
                mlp.act_fn,
            )

    def prepare_norm(self, norm: Any, x: Tensor, to: Tensor) -> Call:
        if self.rounds and (rms := self._rms_norm(norm, x)) is not None:
            return require_call(prepare_norm(rms, to), "a norm")
        if hasattr(norm, "variance_epsilon"):  # that of Llama
            return partial(_normalize, x, norm.weight, norm.variance_epsilon, to)

        def call() -> None:
            to.copy_(norm.forward(x))

        return call

    def _rms_norm(self, norm: Any, x: Tensor) -> RMSNorm | None:
        """The norm of x, where it is Llama's, or one that tried out is RMSNorm by other weights,
        such as 1 + w, of which this has a copy."""
        if hasattr(norm, "variance_epsilon"):
            return RMSNorm(x, norm.weight, norm.variance_epsilon)
        own, eps = getattr(norm, "weight", None), getattr(norm, "eps", None)
        if own is None or eps is None or own.is_inference():
            return None
        # of ones the norm gives weight / √(1 + ε)
        weight = norm.forward(torch.ones(own.numel())) * (1 + eps) ** 0.5
        tried = torch.linspace(-1, 2, own.numel())
        found, wanted = rms_normalize(tried, weight, eps), norm.forward(tried)
        if not torch.allclose(found, wanted, 1e-5, 1e-6):
            return None
        self._copied.append((own, own._version))
        return RMSNorm(x, weight, eps)

    @property
    def stale(self) -> bool:
        return super().stale or any(w._version != version for w, version in self._copied)

    def refuses_cache(self, cache: Any) -> str | None:
        if any(type(own["linear_mode"]) is not Student for own in self._modes):
            return "its layers compute something else than linear attention now"
        if len(getattr(cache, "layers", ())) != len(self._attentions):
            return "its cache is not one of its layers"
        whys = (
            _refuses_layer(*layer, self.sequences)
            for layer in zip(self._attentions, cache.layers, self._tokens, strict=True)
        )
        return next((why for why in whys if why is not None), None)

    def knows(self, cache: DynamicCache, padded: bool, positions: Tensor | None) -> bool:
        return not padded or all(token is not None for token in self._tokens)

    def __call__(
        self, token: Tensor, cache: DynamicCache, positions: Tensor | None = None
    ) -> Tensor:
        trunk, x, places = self.model.model, self._x, [cache.get_seq_length()] * self.sequences
        if positions is not None:
            places = positions.tolist()
        at = torch.tensor(places[:1] if len({*places}) == 1 else places)[:, None]
        x.copy_(trunk.embed_tokens(token[:, None]))
        for kind, turns in self._turns.items():
            chosen = {} if kind is None else {"layer_type": kind}
            for turn, own in zip(turns, trunk.rotary_emb(x, at, **chosen), strict=True):
                turn.copy_(own)
        if not self._read_at_once(cache.layers, places):
            for i, (layer, memory) in enumerate(zip(self._layers, cache.layers, strict=True)):
                for call in self._begun[i]:
                    call()
                self._attend(i, layer, memory, places, positions)
                self.finish(layer)
        for call in self._end:
            call()
        return self._logits[:, -1]

    def _read_at_once(self, memories: Sequence[Any], places: list[int]) -> bool:
        """Whether all layers are linear, go on from states that they hold, and have been read by
        calls that need nothing of Python between them."""
        if len(self._linear) < len(memories) or min(places) < self._alone_from:
            return False
        each = list(zip(self._linear, memories, strict=True))
        if not all(token.holds(memory, places) and token.unchanged() for token, memory in each):
            return False
        for call in self._join([token.calls for token in self._linear]):
            call()
        behind = [place + 1 for place in places]
        for token, memory in each:
            token.count(memory, behind)
        return True

    def _join(self, attentions: list[tuple[Call, ...]]) -> list[Call]:
        """The calls of all layers, of which these are those of their attentions."""
        if attentions != self._joined:
            finished = [layer.finish for layer in self._layers]
            parts = chain.from_iterable(zip(self._begun, attentions, finished, strict=True))
            self._joined, self._whole = attentions, library.chain([*chain.from_iterable(parts)])
        return self._whole

    def _attend(
        self, i: int, layer: LayerCalls, memory: Any, places: list[int], positions: Tensor | None
    ) -> None:
        """What the queries of a layer have read, where it is projected."""
        reads, attention = self._tokens[i], self._attentions[i]
        if reads is None:
            self._attend_softmax(i, layer, memory)
            return
        if reads.read(memory, places):
            return
        q, k = (turned.clone() for turned in self._turned[i])
        k, value = memory.update(k.transpose(1, 2), layer.value)
        k, value, branch = k.transpose(1, 2), value.transpose(1, 2), attention.linear_branch
        if positions is not None:
            q, k = branch.align(q, k, positions[:, None], None, None, memory.state)
        o = branch(q, k, value, None, None, memory)
        layer.read.view(o.shape).copy_(o)

    def _attend_softmax(self, i: int, layer: LayerCalls, memory: Any) -> None:
        """The same of a softmax layer, whose cache grows where it is: by torch, so that it has the
        modules' bits, where weights have all of theirs."""
        attention, (q, k) = self._attentions[i], self._turned[i]
        window = getattr(memory, "sliding_window", None)
        gone = 0 if window is None else gone_by(window, memory.keys.shape[2] + 1)
        if self.rounds and (reader := self._readers[i]) is not None:
            keys, values = reader.read(memory.keys, memory.values, gone)
        else:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            keys, values = append(memory.keys, k), append(memory.values, layer.value)
            given = {"scaling": attention.scaling, "dropout": 0.0}
            seen = _mask_of_all(memory, keys)
            o, _ = attend(self._softmax, attention, q, keys, values, seen, **given)
            layer.read.view(o.shape).copy_(o)
            keys, values = drop_oldest(keys, gone), drop_oldest(values, gone)
        if window is not None:
            memory.cumulative_length += 1
        memory.keys, memory.values = keys, values

    def _calls_of_head(self, head: Any) -> list[Call]:
        """What leaves the logits of the norm."""
        if type(head) is Int8Linear:
            return self._products(head, x=self._normed, to=[self._logits])
        return [lambda: self._logits.copy_(head(self._normed))]  # type: ignore[list-item,return-value]

    def _rotations_of(
        self, layer: LayerCalls, turned: tuple[Tensor, Tensor], turns: tuple[Tensor, Tensor]
    ) -> list[Call]:
        """What turns queries and keys by the cosines and sines of all channels, as Llama does."""
        cosines, sines = (turn[:, :, None] for turn in turns)
        return [
            require_call(prepare_rotation(Rotation(x, cosines, sines), y), "a rotation")
            for x, y in zip(layer.divide(layer.turning), turned, strict=True)
        ]

    def _token_of(
        self, attention: Any, layer: LayerCalls, turned: tuple[Tensor, Tensor]
    ) -> BranchToken | None:
        """What reads tokens of a linear layer, None of a softmax layer."""
        if not hasattr(attention, "linear_branch"):
            return None
        v, o = layer.value.transpose(1, 2), layer.read.unflatten(-1, (layer.heads, -1))
        each = zip(*(s.split(1) for s in (*turned, v, o)), strict=True)
        return BranchToken(attention.linear_branch, [TokenStreams(*own) for own in each])


def _reader_of(
    attention: Any, layer: LayerCalls, turned: tuple[Tensor, Tensor]
) -> CacheReader | None:
    """What reads tokens of a softmax layer, None of a linear layer."""
    if hasattr(attention, "linear_branch"):
        return None
    (q, k), (b, g) = turned, layer.value.shape[:2]
    o = layer.read.view(b, g, layer.heads // g, -1)
    q, k = q.view(b, g, layer.heads // g, -1), k.view(b, g, 1, -1)
    return CacheReader(q, k, layer.value, o, attention.scaling)


def _verdict(model: Any) -> bool | None:
    """Whether a step of such modules has their bits; None where none was tried out."""
    classes, found = _tried.get(model, ((), False))
    return found if classes == _classes_of(model) else None


def _classes_of(model: Any) -> tuple[type, ...]:
    return tuple(map(type, model.modules()))


@torch.inference_mode()
def _has_the_modules_bits(step: LinearizedStep) -> bool:
    """Tried once for each model, by one sequence."""
    model = step.model
    if (known := _verdict(model)) is not None:
        return known
    ids = torch.arange(_TOKENS)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    read = {"use_cache": True, "logits_to_keep": 1, "past_key_values": cache}
    model(ids[:, : _TOKENS - 2], **read)
    copy = deepcopy(cache)
    last = ids[:, _TOKENS - 2 :].split(1, 1)
    wanted = [model(token, **read).logits[:, -1] for token in last]
    try:
        found = [step(token[:, 0], copy).clone() for token in last]
    except (AttributeError, RuntimeError, TypeError):  # modules of other forms or arguments
        found = []
    same = len(found) == 2 and all(map(torch.equal, found, wanted))
    _tried[model] = _classes_of(model), same
    return same


def _layers_of(model: Any) -> list[Any]:
    try:
        return decoder_layers(model)
    except LookupError as error:
        raise NoStepError(f"its layers have not Llama's form ({error})") from error


def _mask_of_all(memory: Any, keys: Tensor) -> Tensor | None:
    """That of a full window, whose tokens are all seen, as transformers gives it: sums of tokens
    without one are rounded otherwise."""
    window, count = getattr(memory, "sliding_window", None), keys.shape[2]
    full = window is not None and count >= window
    return torch.ones(1, 1, 1, count, dtype=torch.bool) if full else None


def _norms_of(layer: Any) -> tuple[Any, Any, Any, Any]:
    """Before and behind the attention, before and behind the MLP: of Llama's names two, of Gemma's
    four, of OLMo 2's the two behind."""
    names = "input", "post_attention", "pre_feedforward", "post_feedforward"
    first, second, third, last = (getattr(layer, f"{name}_layernorm", None) for name in names)
    return (first, None, second, None) if last is None else (first, second, third, last)


def _rotary_kinds(model: Any, layers: int) -> list[str | None]:
    """By layer: which of the model's rotary embeddings it turns by, None where there is one."""
    several = "layer_type" in signature(model.model.rotary_emb.forward).parameters
    return list(model.config.layer_types) if several else [None] * layers


def _require_attention(attention: Any) -> None:
    if not hasattr(attention, "head_dim"):
        raise NoStepError("its attention does not say how wide a head is")
    if not hasattr(attention, "linear_branch") and getattr(attention, "linear_log_scale", 0):
        raise NoStepError("a softmax layer has no positions")


def _refuses_layer(
    attention: Any, memory: Any, token: BranchToken | None, sequences: int
) -> str | None:
    if token is not None and isinstance(memory, StateLayer) and memory.holder is token:
        return "its cache can go back" if memory.records else None
    if hasattr(attention, "linear_branch"):
        if not isinstance(memory, StateLayer) or memory.state is None or memory.records:
            return "its cache is empty, or can go back"
        kept = memory.state[0]
    else:
        plain = type(memory) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not plain or memory.keys is None:
            return "its cache is empty, or not of plain keys and values"
        if getattr(memory, "record_past", False):
            return "its cache can go back"
        kept = memory.keys
    if len(kept) != sequences:
        return f"its cache holds {len(kept)} sequences, not {sequences}"
    return None if kept.dtype is torch.float32 else "its cache is not float32"


def _normalize(x: Tensor, weight: Tensor, epsilon: float, to: Tensor) -> None:
    """x / √(mean x² + ε) ⊙ weight, rounded as Llama's RMSNorm does."""
    scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    torch.mul(weight, torch.mul(x, scale, out=to), out=to)
