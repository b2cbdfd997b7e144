"""A budget of windows, divided among the key heads of a model by how far each of them looks."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.head_windows import GroupedBranch
from fastweights.linearize.convert.modes import AttentionCall, Mode, require_window, set_window
from fastweights.linearize.convert.rules import branch_of
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.methods import evaluate
from fastweights.shapes import Output
from fastweights.training.loop.report import Follow, unfollowed

SHORTEST, LONGEST = 1 / 8, 5
"""Of the windows that a key head can have, powers of two, over the one that all had."""


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
    converted = branches(model)
    config = _require_one_window(model, converted.values())
    powers = (2**exponent for exponent in range(32))
    least, most = SHORTEST * config.window, LONGEST * config.window
    choices = windows or [window for window in powers if least <= window <= most]
    if not 0 < min(choices) <= config.window:
        raise ValueError(
            f"share_windows(windows={list(choices)}) of heads that have {config.window}: the"
            " shortest is at least 1, and at most what each head has; name a shorter one"
        )
    mode, training = _MeasureWindows(sorted(choices)), model.training
    model.eval()
    with torch.no_grad(), use_mode(model, mode):
        for inputs in follow(texts, "measuring windows"):
            model.base_model(**inputs, use_cache=False)
    model.train(training)
    errors = torch.cat([mode.errors[layer] for layer in converted], 1)
    chosen = divide(errors.T.tolist(), mode.windows, config.window * errors.shape[1])
    rows, rest = dict[int, tuple[int, ...]](), iter(chosen)
    for layer, branch in converted.items():
        rows[layer] = tuple(islice(rest, branch.attention.kv_heads))
    set_windows(model, rows)
    return rows


def _require_one_window(model: Any, branches: Iterable[LinearBranch]) -> LinearAttentionConfig:
    configs = list({branch.config for branch in branches})
    if len(configs) == 1 and configs[0].features == "landmarks" and configs[0].has_window:
        return configs[0]
    raise ValueError(
        f"share_windows of a {type(model).__name__}: it takes a model whose linear layers have"
        ' landmarks and one window for all heads; linearize with features="landmarks" and a window'
        " above 0, and place the landmarks, first"
    )


class _MeasureWindows(Mode):
    """Softmax, which leaves behind Σ ‖o - o'‖² ``[windows g]`` of each layer's key heads, o' their
    output under each of some windows."""

    constant = False

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows, self.errors = windows, dict[int, Tensor]()

    def attend(self, call: AttentionCall) -> Output:
        softmax, record = call.softmax(), require_window(call.record(), "share_windows")
        keep = 1 if call.keep is None else call.keep[..., None, None]
        rows = list[Tensor]()
        for window in self.windows:
            o, _ = evaluate(set_window(record, window))
            error = ((call.branch.read(o) - softmax).square() * keep).sum((0, 1, 3))
            rows.append(error.unflatten(0, (call.k.shape[2], -1)).sum(-1))
        self.errors[call.layer] = torch.stack(rows).double() + self.errors.get(call.layer, 0)
        return softmax


def divide(errors: Sequence[Sequence[float]], windows: Sequence[int], budget: int) -> list[int]:
    """Return a window for each head, `budget` tokens together at most: from the shortest on, the
    step whose error falls most per token comes first, and where none falls that of the shortest.

    Args:
        errors: Each head's error under each window.
        windows: In rising order.
        budget: Tokens of all heads together.
    """
    chosen = [0] * len(errors)
    left = budget - windows[0] * len(errors)
    first = ((_best_step(own, windows, 0, left), head) for head, own in enumerate(errors))
    steps = [(*step, head) for step, head in first if step is not None]
    heapq.heapify(steps)
    while steps:
        _, end, head = heapq.heappop(steps)
        cost = windows[end] - windows[chosen[head]]
        if cost <= left:
            chosen[head], left = end, left - cost
        if (step := _best_step(errors[head], windows, chosen[head], left)) is not None:
            heapq.heappush(steps, (*step, head))
    return [windows[place] for place in chosen]


def _best_step(
    errors: Sequence[float], windows: Sequence[int], start: int, left: int
) -> tuple[float, int] | None:
    """(minus the fall of the error per token, where to) of the best longer window that `left` more
    tokens pay for, the shortest of equally good ones; None if there is none."""
    steps = [
        ((errors[end] - errors[start]) / (windows[end] - windows[start]), end)
        for end in range(start + 1, len(windows))
        if windows[end] - windows[start] <= left
    ]
    return min(steps, default=None)


def set_windows(model: Any, windows: Mapping[int, Sequence[int]]) -> None:
    """Rebuild the branches of a linearized model, in place, with windows of their key heads' own
    and the same parameters.

    Args:
        model: A linearized model, all of whose heads have one window.
        windows: Those of the key heads, by the number of the layer; of layers that are linear, and
            maybe of others.
    """
    if model.config.linearize["analog"].get("head_windows"):
        return  # they are set already
    modules = attentions_with_branch(model)
    rows = tuple(tuple(windows.get(layer, ())) for layer in range(1 + max(windows)))
    config = replace(modules[0].linear_branch.config, head_windows=rows)
    for module in modules:
        module.linear_branch = _with_windows(module.linear_branch, config)
    model.config.linearize = {**model.config.linearize, "analog": asdict(config)}


def _with_windows(branch: LinearBranch, config: LinearAttentionConfig) -> LinearBranch:
    """The branch with windows of its heads' own, and the same parameters."""
    made = branch_of(config, branch.attention).to(next(branch.parameters()).device)
    groups = (
        zip(made.groups, made.key_heads, strict=True)
        if isinstance(made, GroupedBranch)
        else [(made, list(range(branch.attention.kv_heads)))]
    )
    for group, heads in groups:
        group.load_state_dict(
            {
                name: rows.unflatten(0, (branch.attention.kv_heads, -1))[heads].flatten(0, 1)
                for name, rows in branch.state_dict().items()
            }
        )
    return made.train(branch.training)
