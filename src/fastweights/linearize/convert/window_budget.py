"""A budget of windows, or of bytes, divided among the key heads of a model by how far each of them
looks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastweights.linearize.convert.attention import attend_all, branches
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.head_windows import GroupedBranch
from fastweights.linearize.convert.landmarks import Keys, place_among
from fastweights.linearize.convert.modes import AttentionCall, Mode, require_window, set_window
from fastweights.linearize.convert.rules import branch_of
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.methods import evaluate
from fastweights.models.evaluation import evaluation_mode
from fastweights.shapes import Output
from fastweights.training.loop.report import Follow, unfollowed

SHORTEST, LONGEST = 1 / 8, 5
"""Of the windows that a key head can have, powers of two, over the one that all had."""


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of key heads, by the number of the layer.

    Attributes:
        windows: Their windows.
        columns: Their `feature_dim`; empty where all have that of the configuration.
    """

    windows: Mapping[int, tuple[int, ...]]
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def in_words(self) -> str:
        """Say how many key heads have which window, and how many landmarks."""
        windows = Counter(window for own in self.windows.values() for window in own)
        landmarks = Counter(2 * count for own in self.columns.values() for count in own)
        said = [("windows", windows), ("landmarks", landmarks)]
        return "; ".join(
            f"{name} of {sum(counts.values())} key heads: "
            + ", ".join(f"{size} in {count}" for size, count in sorted(counts.items()))
            for name, counts in said
            if counts
        )


def share_windows(
    model: Any,
    texts: Collection[Mapping[str, Tensor]],
    windows: Sequence[int] = (),
    follow: Follow = unfollowed,
) -> dict[int, tuple[int, ...]]:
    """Give the key heads of a linearized model windows of their own, in place, that are together as
    long as before.

    Nothing is trained. On some texts it is measured by how much the output of every key head is off
    that of softmax under each window, the sum of squared errors, with the branch's landmarks and
    sinks as they are. From the shortest windows on, the tokens go where that error falls most per
    token.

    Args:
        model: A model linearized with ``LinearAttentionConfig(features="landmarks")``, whose
            landmarks are placed.
        texts: Inputs of the model, such as ``{"input_ids": [b t]}``, longer than the longest
            window.
        windows: What a key head can have, in tokens; none for the powers of two between an eighth
            and five times of what it has.
        follow: Told of every text that is read.

    Returns:
        The windows of the key heads, by the number of the layer.

    Raises:
        ValueError: If its layers have no landmarks or windows, or have their own already, or the
            shortest of `windows` is none, or longer than what each head has.
    """
    config, own = _require_one_window(model), branches(model)
    choices = windows or _powers(SHORTEST * config.window, LONGEST * config.window)
    if not 0 < min(choices) <= config.window:
        raise ValueError(
            f"share_windows(windows={list(choices)}) of heads that have {config.window}: the"
            " shortest is at least 1, and at most what each head has; name a shorter one"
        )
    heads = sum(branch.attention.kv_heads for branch in own.values())
    columns = config.feature_dim
    costs = {(window, columns): window for window in choices}
    return dict(_share(model, texts, costs, config.window * heads, {columns: own}, follow).windows)


def share_state(
    model: Any,
    texts: Collection[Mapping[str, Tensor]],
    keys: Keys,
    size: int,
    *,
    columns: Sequence[int] = (),
    seed: int = 0,
    follow: Follow = unfollowed,
) -> HeadSizes:
    """Give the key heads of a linearized model windows and landmarks of their own, in place, whose
    states take some bytes together.

    It does what `share_windows` does, in bytes in the place of tokens: windows, up to half of the
    longest text, compete in one budget, and landmarks where several numbers of them are given. Of
    SmolLM2 the latter had a lower error and a higher perplexity when landmarks still read keys with
    their positions: 26.1 of WikiText-2 with 2 to 64 in a head, and 22.3 with 32 in each, at the
    same 4.4 MB.

    Args:
        model: As in `share_windows`; landmarks are placed here.
        texts: As in `share_windows`.
        keys: What landmarks are placed by, of `read_keys`.
        size: Bytes of the states of all key heads, their sinks left out.
        columns: What a key head's `feature_dim` can be; none for the one that all have.
        seed: Of where the clusters begin.
        follow: Told of every text that is read.

    Raises:
        ValueError: If the layers have no landmarks or windows, or the smallest states do not fit.
    """
    config, own = _require_one_window(model), branches(model)
    attention, placed = next(iter(own.values())).attention, dict[int, dict[int, LinearBranch]]()
    counts = columns or [config.columns(attention)]
    for count in counts:
        placed[count] = {layer: _resized(branch, count) for layer, branch in own.items()}
        place_among(keys, placed[count], seed, follow)
    longest = max(text["input_ids"].shape[1] for text in texts) // 2
    costs = {
        (window, count): head_bytes(attention, window, count, model.dtype.itemsize)
        for window in _powers(FEWEST, longest)
        for count in counts
    }
    return _share(model, texts, costs, size, placed, follow)


def head_bytes(attention: AttentionLayer, window: int, columns: int, itemsize: int) -> int:
    """Return what a key head's state takes by itself: the window's keys and values but for one,
    numbers of `itemsize` bytes, with their `AGE`, and S and z of the landmarks in float32."""
    token = (attention.head_dim + attention.value_dim) * itemsize + AGE
    return (window - 1) * token + 2 * columns * (attention.value_dim + 1) * 4


AGE = 8
"""Bytes of the age of a token in a window, which heads with the same window have in common."""
FEWEST = 16
"""Tokens of the shortest window where a state is divided."""


def _powers(least: float, most: float) -> list[int]:
    return [power for power in (2**exponent for exponent in range(32)) if least <= power <= most]


def _resized(branch: LinearBranch, columns: int) -> LinearBranch:
    """A branch like this one, with as many columns, not placed yet."""
    config = replace(branch.config, feature_dim=columns)
    return branch_of(config, branch.attention).to(next(branch.parameters()).device)


def _share(
    model: Any,
    texts: Collection[Mapping[str, Tensor]],
    costs: Mapping[Any, int],
    budget: int,
    placed: Mapping[Any, Mapping[int, LinearBranch]],
    follow: Follow,
) -> HeadSizes:
    """Give every key head one of some sizes, in place: `costs` of its window and columns, all of
    which may cost `budget`; `placed` has the branches with each number of columns, by layer."""
    sizes = sorted(costs, key=lambda size: costs[size])
    mode = _MeasureSizes(sizes, placed)
    with evaluation_mode(model):
        for inputs in follow(texts, "measuring windows"):
            attend_all(model, inputs, mode)
    converted = branches(model)
    # a row per size, a column per key head: those of all layers share one budget
    errors = torch.cat([mode.errors[layer] for layer in converted], 1)
    rest = iter(divide(errors.T.tolist(), [costs[size] for size in sizes], budget))
    chosen = {
        layer: [sizes[place] for place in islice(rest, branch.attention.kv_heads)]
        for layer, branch in converted.items()
    }
    windows = {layer: tuple(window for window, _ in own) for layer, own in chosen.items()}
    columns = {layer: tuple(count or 0 for _, count in own) for layer, own in chosen.items()}
    found = HeadSizes(windows, columns if len(placed) > 1 else {})
    set_sizes(model, found, placed)
    return found


def _require_one_window(model: Any) -> LinearAttentionConfig:
    configs = list({branch.config for branch in branches(model).values()})
    shared = len(configs) == 1 and not configs[0].head_windows
    if shared and configs[0].features == "landmarks" and configs[0].has_window:
        return configs[0]
    raise ValueError(
        f"share_windows of a {type(model).__name__}: it takes a model whose linear layers have"
        ' landmarks and one window for all heads; linearize with features="landmarks" and a window'
        " above 0, and place the landmarks, first"
    )


class _MeasureSizes(Mode):
    """Softmax, which leaves behind Σ ‖o - o'‖² ``[sizes g]`` of each layer's key heads, o' their
    output under each of some sizes: windows, and columns of the branches that have them."""

    constant = False

    def __init__(
        self,
        sizes: Sequence[tuple[int, int | None]],
        placed: Mapping[int | None, Mapping[int, LinearBranch]],
    ) -> None:
        self.sizes, self.placed, self.errors = sizes, placed, dict[int, Tensor]()

    def attend(self, call: AttentionCall) -> Output:
        softmax, streams = call.softmax(), (call.q, call.k, call.v, call.keep, call.segments)
        keep = 1 if call.keep is None else call.keep[..., None, None]
        records = {
            columns: require_window(of[call.layer].record(*streams), "share_windows")
            for columns, of in self.placed.items()
        }
        rows = list[Tensor]()
        for window, columns in self.sizes:
            o, _ = evaluate(set_window(records[columns], window))
            # by query head, then summed over those of each key head
            error = ((call.branch.read(o) - softmax).square() * keep).sum((0, 1, 3))
            rows.append(error.unflatten(0, (call.k.shape[2], -1)).sum(-1))
        self.errors[call.layer] = torch.stack(rows).double() + self.errors.get(call.layer, 0)
        return softmax


def divide(errors: Sequence[Sequence[float]], costs: Sequence[int], budget: int) -> list[int]:
    """Return the place of a choice for each head, which cost `budget` together at most: from the
    cheapest on, the step whose error falls most per cost comes first, and where none falls that of
    the cheapest.

    Args:
        errors: Each head's error under each choice.
        costs: Of the choices, in rising order.
        budget: What all heads may cost together.

    Raises:
        ValueError: If the cheapest choices cost more.
    """
    chosen, least = [0] * len(errors), costs[0] * len(errors)
    if least > budget:
        raise ValueError(
            f"the smallest states of {len(errors)} key heads take {least:,}, and there is room for"
            f" {budget:,}; allow more"
        )
    left = budget - least
    # every head offers its best step, and the best offer is taken
    first = ((_best_step(own, costs, 0, left), head) for head, own in enumerate(errors))
    steps = [(*step, head) for step, head in first if step is not None]
    heapq.heapify(steps)
    while steps:
        _, end, head = heapq.heappop(steps)
        cost = costs[end] - costs[chosen[head]]
        if cost <= left:
            chosen[head], left = end, left - cost
        # of what is left, which an offer made earlier may have exceeded
        if (step := _best_step(errors[head], costs, chosen[head], left)) is not None:
            heapq.heappush(steps, (*step, head))
    return chosen


def _best_step(
    errors: Sequence[float], costs: Sequence[int], start: int, left: int
) -> tuple[float, int] | None:
    """(minus the fall of the error per cost, where to) of the best dearer choice that `left` more
    pays for, the cheapest of equally good ones; None if there is none."""
    steps = [
        ((errors[end] - errors[start]) / (costs[end] - costs[start]), end)
        for end in range(start + 1, len(costs))
        if 0 < costs[end] - costs[start] <= left and errors[end] <= errors[start]
    ]
    return min(steps, default=None)


def set_sizes(
    model: Any,
    sizes: HeadSizes,
    placed: Mapping[int | None, Mapping[int, LinearBranch]] | None = None,
) -> None:
    """Rebuild the branches of a linearized model, in place, with sizes of their key heads' own.

    Args:
        model: A linearized model, all of whose heads have one size.
        sizes: Those of the key heads, of layers that are linear, and maybe of others.
        placed: The branches with each number of columns, whose parameters the heads get; None for
            those of the model, where all have its number of columns.
    """
    if model.config.linearize["analog"].get("head_windows"):
        return  # they are set already
    modules, layers = attentions_with_branch(model), range(1 + max(sizes.windows))
    windows, columns = (
        tuple(tuple(of.get(layer, ())) for layer in layers) if of else ()
        for of in (sizes.windows, sizes.columns)
    )
    before = modules[0].linear_branch.config
    config = replace(before, head_windows=windows, head_columns=columns)
    if placed is None:
        placed = {} if columns else {before.feature_dim: branches(model)}
    for module in modules:
        module.linear_branch = _with_sizes(module.layer_idx, module.linear_branch, config, placed)
    model.config.linearize = {**model.config.linearize, "analog": asdict(config)}


def _with_sizes(
    layer: int,
    branch: LinearBranch,
    config: LinearAttentionConfig,
    placed: Mapping[int | None, Mapping[int, LinearBranch]],
) -> LinearBranch:
    """The branch with sizes of its heads' own, and the parameters of those that are placed."""
    made = branch_of(config, branch.attention).to(next(branch.parameters()).device)
    kv_heads = branch.attention.kv_heads
    groups: Iterable[tuple[LinearBranch, list[int]]] = (
        zip(made.branches, made.key_heads, strict=True)
        if isinstance(made, GroupedBranch)
        else [(made, list(range(kv_heads)))]
    )
    for group, heads in groups:
        if group.config.feature_dim in placed:
            # parameters lie head by head: a group takes those of its key heads
            source = placed[group.config.feature_dim][layer].state_dict()
            group.load_state_dict(
                {
                    name: rows.unflatten(0, (kv_heads, -1))[heads].flatten(0, 1)
                    for name, rows in source.items()
                }
            )
    return made.train(branch.training)
