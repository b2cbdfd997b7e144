"""Profiles as figures, with captions that say how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Circle
from matplotlib.ticker import LogFormatter, MaxNLocator
from torch import Tensor

from fastweights.analysis import maps
from fastweights.analysis.profile import LayerProfile, MemoryProfile, Profile, spread_evenly
from fastweights.render.html import ReportFigure
from fastweights.render.plots import (
    HEAT,
    PALETTE,
    canvas,
    label,
    legend,
    legend_beside,
    logarithmic,
)
from fastweights.shapes import Map

Color = str | tuple[float, float, float, float]
Memories = Sequence[tuple[int, MemoryProfile]]
SHOWN = 8
"""Layers that are drawn one by one, or named in a legend, at most; evenly spaced if there
are more.
"""
TICKS = 10
"""Layers that are named below an axis, at most."""
LONGEST = 1e5
"""Half-lives above this number of tokens, and infinite ones, are drawn as this."""


def profile_figures(profile: Profile) -> list[ReportFigure]:
    """Draw all figures that the layers of `profile` have numbers for."""
    mapped, linear = _phis_by_layer(profile), _memories_by_layer(profile)
    drawn = [_normalisers(profile), _conditions(profile)]
    if linear:
        systems = (_half_lives(profile, linear), _eigenvalues(linear))
        drawn = [*systems, _hankel(profile, linear), _response(profile, linear), *drawn]
    if mapped:
        drawn = [_maps(profile, mapped), _attention(mapped), *drawn]
    return [picture for picture in drawn if picture is not None]


OF_MEMORIES: Mapping[tuple[str, str], Callable[[MemoryProfile], float]] = {
    ("Median half-life", "tokens"): lambda m: float(m.half_lives.clamp(max=LONGEST).median()),
    ("Effective state dimension", "of k, mean over heads"): lambda m: float(m.dimensions.mean()),
    ("Strongest transition over the window", "log₁₀ of the gain"): lambda m: (
        float(m.log_gains.amax(-1).median()) / np.log(10)
    ),
}
OF_MAPS: Mapping[tuple[str, str], Callable[[Map], Tensor]] = {
    ("Dilution of attention", "entropy / uniform entropy"): maps.dilution,
    ("Span of attention", "tokens back, mean"): maps.span,
    ("Effective rank of the map", "of the window"): maps.rank,
}
"""What models are compared by, by its title and unit."""


def comparison(profiles: Sequence[Profile]) -> ReportFigure:
    """Draw the models side by side, against depth."""
    figure, axes = canvas(2, 3)
    for color, profile in zip(_colors(len(profiles)), profiles, strict=True):
        last = max(1, len(profile.layers) - 1)
        linear, mapped = _memories_by_layer(profile), _phis_by_layer(profile)
        shown = [
            *([(i / last, measure(m)) for i, m in linear] for measure in OF_MEMORIES.values()),
            *([(i / last, float(f(phi).mean())) for i, phi in mapped] for f in OF_MAPS.values()),
        ]
        for one, points in zip(axes.flat, shown, strict=True):
            if points:
                _line(one, points, color, profile.name)
    for one, (title, y) in zip(axes.flat, (*OF_MEMORIES, *OF_MAPS), strict=True):
        label(one, title, "depth", y)
        one.set_xlim(-0.03, 1.03)
    logarithmic(axes[0, 0])
    legend(axes[1, 0])
    caption = (
        "Depth runs from the first layer (0) to the last (1). The upper row needs a linear form,"
        " which softmax lacks; the lower row is read off the attention maps of the first tokens."
    )
    return ReportFigure("comparison", "Side by side", caption, figure)


def teacher_distances(profiles: Sequence[Profile]) -> ReportFigure | None:
    """Draw the distances from the first model that is softmax throughout; None without it and
    another one."""
    teachers = [p for p in profiles if all(layer.rule == "Softmax" for layer in p.layers)]
    students = [
        p for p in profiles if teachers and p is not teachers[0] and _same_window(p, teachers[0])
    ]
    if not students:
        return None
    figure, axes = canvas(1, 3)
    for color, student in zip(_colors(len(students)), students, strict=True):
        found = [(depth, maps.distance(*pair)) for depth, pair in _beside(student, teachers[0])]
        for one, name in zip(axes.flat, ("kl", "mse", "rank"), strict=True):
            points = [(depth, float(getattr(distance, name))) for depth, distance in found]
            _line(one, points, color, student.name)
    label(axes[0, 0], f"KL({teachers[0].name} ‖ model)", "depth", "nats per query")
    label(axes[0, 1], "Mean squared difference", "depth", "per pair of tokens")
    label(axes[0, 2], "Effective rank minus the teacher's", "depth", "")
    legend(axes[0, 0])
    caption = (
        "The maps of a layer are averaged over heads and compared with those of the teacher's layer"
        " at the same relative depth. Rows of |Φ| are taken as distributions; a KL that is missing"
        " is infinite: the model has no weight at all where its teacher has some."
    )
    return ReportFigure("teacher", f"Distance from {teachers[0].name}", caption, figure)


def _maps(profile: Profile, mapped: Sequence[tuple[int, Map]]) -> ReportFigure:
    columns = min(4, max(len(phi) for _, phi in mapped))
    numbers = [mapped[i] for i in spread_evenly(len(mapped), SHOWN)]
    figure, axes = canvas(len(numbers), columns, 2.1, 2.1)
    for row, (number, phi) in enumerate(numbers):
        layer = profile.layers[number]
        for column in range(columns):
            _map(axes[row, column], layer, phi, column, columns)
        axes[row, 0].set_ylabel(f"layer {number} · {layer.mixer}\nquery", fontsize=7)
    caption = (
        "|Φ| with every row divided by its largest entry (dark: the token that a query reads most),"
        " queries downwards, keys to the right, for heads spread over the layer. Columns are tokens"
        " that everyone reads, bands along the diagonal are short memory, a dark triangle is"
        " dilution."
    )
    return ReportFigure("maps", "Attention maps", caption, figure)


def _map(axes: Axes, layer: LayerProfile, phi: Map, column: int, columns: int) -> None:
    axes.grid(visible=False)
    axes.tick_params(labelsize=6)
    if column >= len(layer.heads):
        axes.set_visible(False)
        return
    place = (
        round(column * (len(layer.heads) - 1) / max(1, columns - 1))
        if len(layer.heads) > columns
        else column
    )
    size = phi[place].abs().float()
    top = size.amax(-1, keepdim=True)
    axes.imshow(
        torch.where(top > 0, size / top, 0).numpy(),
        cmap=HEAT,
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set_title(f"head {layer.heads[place]}", fontsize=7, loc="left")


def _attention(mapped: Sequence[tuple[int, Map]]) -> ReportFigure:
    figure, axes = canvas(1, 4, 3.0)
    numbers, phis = zip(*mapped, strict=True)
    panels = (
        ("Dilution", "entropy / uniform entropy", [maps.dilution(phi).mean(-1) for phi in phis]),
        ("Span", "tokens back, mean", [maps.span(phi).mean(-1) for phi in phis]),
        ("Effective rank", f"of {phis[0].shape[-1]}", [maps.rank(phi) for phi in phis]),
        ("Negative weights", "share of Σ|Φ|", [maps.negative_share(phi) for phi in phis]),
    )
    for one, (title, y, values) in zip(axes.flat, panels, strict=True):
        _dots(one, values, numbers)
        label(one, title, "layer", y)
    axes[0, 0].set_ylim(0, 1.02)
    axes[0, 3].set_ylim(0, 1.02)
    caption = (
        "A dot per head, a bar for the layer's mean. Dilution 1 is a query that reads all tokens"
        " before it alike; the rank says how many directions the map of the window really has."
    )
    return ReportFigure("attention", "Attention by layer and head", caption, figure)


def _half_lives(profile: Profile, linear: Memories) -> ReportFigure:
    figure, axes = canvas(1, 3, 3.9)
    lives = [m.half_lives.clamp(max=LONGEST) for _, m in linear]
    _bands(axes[0, 0], [number for number, _ in linear], lives)
    heads = max(life.shape[1] for life in lives)
    table = np.full((heads, len(profile.layers)), np.nan)
    for (number, _), life in zip(linear, lives, strict=True):
        table[: life.shape[1], number] = life.transpose(0, 1).flatten(1).median(1).values.numpy()
    image = axes[0, 1].imshow(table, aspect="auto", cmap="viridis", norm="log")
    axes[0, 1].grid(visible=False)
    tick_layers(axes[0, 1], [number for number, _ in linear])
    axes[0, 1].yaxis.set_major_locator(MaxNLocator(integer=True))
    _scale(figure, axes[0, 1], image)
    for color, (number, _), life in zip(_depths(len(linear)), linear, lives, strict=True):
        _plot_over_text(
            axes[0, 2], life.flatten(1).median(1).values, color, _legend_entry(number, profile)
        )
    for one in (axes[0, 0], axes[0, 2]):
        logarithmic(one)
    label(axes[0, 0], "By layer: median, 10 to 90 %", "layer", "half-life [tokens]")
    label(axes[0, 1], "Median by head and layer", "layer", "head (of those chosen)")
    label(axes[0, 2], "Over the text: running median", "token", "half-life [tokens]")
    legend(axes[0, 2])
    caption = (
        "Tokens until a component of the state has halved, if each token's eigenvalue of Λ_t"
        f" lasted. Components that never decay are drawn at {LONGEST:.0e}. What moves over the text"
        " is dynamic memory."
    )
    return ReportFigure("half-lives", "Half-lives", caption, figure)


def _scale(figure: Figure, axes: Axes, image: AxesImage) -> None:
    bar = figure.colorbar(image, ax=axes, format=LogFormatter(), label="tokens")
    bar.ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    bar.ax.tick_params(which="both", labelsize=8)


def _eigenvalues(linear: Memories) -> ReportFigure:
    linear = [linear[i] for i in spread_evenly(len(linear), SHOWN)]
    columns = min(4, len(linear))
    figure, axes = canvas(-(-len(linear) // columns), columns, 2.7, 2.4)
    for one in axes.flat[len(linear) :]:
        one.set_visible(False)
    for one, color, (number, m) in zip(axes.flat, _depths(len(linear)), linear, strict=False):
        _spectrum(one, m.eigenvalues, color)
        one.set_title(f"layer {number}", fontsize=9, loc="left")
    caption = (
        "All eigenvalues of Λ_t over the text, heads and components (in the complex plane where"
        " they are complex). 1 keeps, 0 forgets at once, -1 keeps and flips the sign; outside the"
        " unit circle states explode."
    )
    return ReportFigure("eigenvalues", "Eigenvalues of the transitions", caption, figure)


def _spectrum(axes: Axes, values: Tensor, color: Color) -> None:
    if values.is_complex():
        shown = values.flatten()[:: max(1, values.numel() // 4000)]
        axes.scatter(shown.real, shown.imag, s=1.5, color=color, alpha=0.4)
        axes.add_patch(Circle((0, 0), 1, fill=False, color=PALETTE[7], linewidth=0.8))
        axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
        axes.set_aspect("equal")
        return
    flat = values.flatten().float().numpy()
    low = min(0.0, float(flat.min()))
    axes.hist(flat, bins=60, range=(low, max(1.0, float(flat.max()))), color=color, density=True)
    axes.set_yticks([])
    axes.set_xlabel("λ", fontsize=8)


def _hankel(profile: Profile, linear: Memories) -> ReportFigure:
    figure, axes = canvas(1, 2, 4.2)
    for color, (number, m) in zip(_depths(len(linear)), linear, strict=True):
        top = m.hankel[..., :1]
        middle = torch.where(top > 0, m.hankel / top, 0).flatten(0, 1).median(0).values
        axes[0, 0].semilogy(
            1 + np.arange(len(middle)),
            middle.clamp(min=1e-9),
            color=color,
            label=_legend_entry(number, profile),
        )
    _dots(axes[0, 1], [m.dimensions.mean(0) for _, m in linear], [number for number, _ in linear])
    axes[0, 0].set_ylim(1e-9, 2)
    label(
        axes[0, 0],
        "Hankel singular values, over the largest",
        "number",
        "median over heads and cuts",
    )
    label(axes[0, 1], "Effective dimension of the state", "layer", "per head")
    axes[0, 1].set_ylim(0, None)
    legend(axes[0, 0])
    k = ", ".join(str(n) for n in sorted({m.hankel.shape[-1] for _, m in linear}))
    caption = (
        f"The map from the {profile.extent.window} tokens before a place in the text to the outputs"
        f" after it has as many singular values as the state has rows (here {k}); those that matter"
        " are the memory in use. The effective dimension is the exponential of their entropy."
    )
    return ReportFigure("hankel", "How much of the state is used", caption, figure)


def _response(profile: Profile, linear: Memories) -> ReportFigure:
    figure, axes = canvas(1, 2, 4.2)
    for color, (number, m) in zip(_depths(len(linear)), linear, strict=True):
        size = m.response.mean(0)
        axes[0, 0].loglog(
            1 + np.arange(len(size)),
            size / size[0],
            color=color,
            label=_legend_entry(number, profile),
        )
    gains = [m.log_gains.clamp(min=-690) / np.log(10) for _, m in linear]
    _dots(axes[0, 1], [g[..., 0].median(0).values for g in gains], [number for number, _ in linear])
    axes[0, 1].axhline(0, color=PALETTE[7], linewidth=0.8, linestyle=":")
    label(axes[0, 0], "Impulse response", "lag + 1 [tokens]", "|Φ|, root mean square, over lag 0")
    label(axes[0, 1], "Strongest direction through the window", "layer", "log₁₀ of its gain")
    legend(axes[0, 0])
    caption = (
        "Left: how much of a token's value is still in the output some tokens later. Right: the"
        " largest singular value of the product of transitions over the window, a dot per head:"
        " above 0 gradients can explode, far below 0 they vanish."
    )
    return ReportFigure("response", "Impulse responses and gradients", caption, figure)


def _normalisers(profile: Profile) -> ReportFigure | None:
    found = [
        (i, layer.normalisers)
        for i, layer in enumerate(profile.layers)
        if layer.normalisers is not None
    ]
    if not found:
        return None
    figure, axes = canvas(1, 1, 6.0)
    for color, (number, eta) in zip(_depths(len(found)), found, strict=True):
        _plot_over_text(
            axes[0, 0], eta.abs().median(1).values, color, _legend_entry(number, profile)
        )
    logarithmic(axes[0, 0])
    label(axes[0, 0], "Running median over heads", "token", "|η|")
    legend_beside(axes[0, 0])
    caption = (
        "What outputs are divided by. In DSF η_{t-1}/η_t is the transition: where η grows, old"
        " tokens fade."
    )
    return ReportFigure("normalisers", "Normalisers η", caption, figure)


def _conditions(profile: Profile) -> ReportFigure | None:
    found = [
        (i, layer.examined, layer.solver)
        for i, layer in enumerate(profile.layers)
        if layer.solver is not None
    ]
    if not found:
        return None
    figure, axes = canvas(1, 2, 4.2)
    for color, (number, places, solver) in zip(_depths(len(found)), found, strict=True):
        for one, values in zip(axes.flat, (solver.condition[0], solver.residual[0]), strict=True):
            one.plot(
                places, values.median(1).values, color=color, label=_legend_entry(number, profile)
            )
            one.fill_between(
                places, values.amin(1), values.amax(1), color=color, alpha=0.15, linewidth=0
            )
    logarithmic(axes[0, 0])
    logarithmic(axes[0, 1])
    label(axes[0, 0], "Condition number of H + Λ", "token", "median over heads, and range")
    label(axes[0, 1], "What the solver leaves", "token", "‖q - (H + Λ) x‖ / ‖q‖")
    legend(axes[0, 0])
    caption = (
        "Conjugate gradients need about √condition steps per digit; with condition 1 Mesa is linear"
        " attention, which needs none."
    )
    return ReportFigure("conditions", "Mesa's linear systems", caption, figure)


def _phis_by_layer(profile: Profile) -> list[tuple[int, Map]]:
    return [(i, layer.phi) for i, layer in enumerate(profile.layers) if layer.phi is not None]


def _memories_by_layer(profile: Profile) -> list[tuple[int, MemoryProfile]]:
    return [(i, layer.memory) for i, layer in enumerate(profile.layers) if layer.memory is not None]


def _same_window(one: Profile, other: Profile) -> bool:
    """Whether both have maps, of as many tokens."""
    sizes = [{phi.shape[-1] for _, phi in _phis_by_layer(profile)} for profile in (one, other)]
    return len(sizes[0]) == 1 and sizes[0] == sizes[1]


def _beside(student: Profile, teacher: Profile) -> Iterable[tuple[float, tuple[Tensor, Tensor]]]:
    """(depth, the head averages of a layer of the student and of the teacher's at the same relative
    depth).
    """
    last = max(1, len(student.layers) - 1)
    models = _phis_by_layer(teacher)
    for i, phi in _phis_by_layer(student):
        _, model = models[round(i / last * (len(models) - 1))]
        yield i / last, (maps.weights(phi).mean(0), maps.weights(model).mean(0))


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, name: str) -> None:
    axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3.5, label=name)


def _dots(axes: Axes, per_layer: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """A dot per head and a bar at the layer's mean."""
    for number, values in zip(numbers, per_layer, strict=True):
        jitter = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else np.zeros(1)
        axes.scatter(number + jitter, values, s=9, color=PALETTE[0], alpha=0.7, linewidths=0)
        axes.plot(
            [number - 0.32, number + 0.32],
            [float(values.mean())] * 2,
            color=PALETTE[1],
            linewidth=1.6,
        )
    tick_layers(axes, numbers)


def tick_layers(axes: Axes, layers: Sequence[int]) -> None:
    """Name layers below an axis, at most so many that their numbers do not collide."""
    axes.set_xticks([layers[i] for i in spread_evenly(len(layers), TICKS)])


def _bands(axes: Axes, numbers: Sequence[int], lives: Sequence[Tensor]) -> None:
    quantiles = np.array(
        [np.quantile(life.flatten().float().numpy(), (0.1, 0.5, 0.9)) for life in lives]
    )
    below, above = quantiles[:, 1] - quantiles[:, 0], quantiles[:, 2] - quantiles[:, 1]
    axes.errorbar(
        numbers,
        quantiles[:, 1],
        (below.tolist(), above.tolist()),
        fmt="o",
        color=PALETTE[0],
        capsize=3,
        markersize=5,
    )
    tick_layers(axes, numbers)


def _plot_over_text(axes: Axes, values: Tensor, color: Color, name: str, points: int = 60) -> None:
    """Medians over at most so many stretches of the text."""
    stretches = np.array_split(values.float().numpy(), min(points, len(values)))
    at = np.cumsum([len(s) for s in stretches]) - len(stretches[-1]) / 2
    axes.plot(at, [float(np.median(s)) for s in stretches], color=color, linewidth=1, label=name)


def _legend_entry(number: int, profile: Profile) -> str:
    """The entry of a legend; names that begin with _ have none."""
    return f"layer {number}" if number in spread_evenly(len(profile.layers), SHOWN) else "_"


def _depths(count: int) -> list[Color]:
    """Colours from the first layer to the last."""
    return [matplotlib.colormaps["viridis"](0.88 * i / max(1, count - 1)) for i in range(count)]


def _colors(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]
