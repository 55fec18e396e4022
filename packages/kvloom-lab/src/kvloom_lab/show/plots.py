"""The pictures of all commands, as figures of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvloom.errors import InputError

if TYPE_CHECKING:
    from ..analyse.attention import LayerAttention
    from ..analyse.distribution import Distribution
    from ..bench.throughput import ThroughputRow
    from ..bench.timing import TimedRow
    from ..eval.comparison import Row
    from ..planner.plan_recipes import Plan
    from ..tuner.run import Tuning


FORMATS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")


def check_plot(path: str | Path) -> None:
    """Raise `InputError` if the suffix of a file is not a plot format."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise InputError(f"plot file {str(path)!r} must end in one of .{', .'.join(FORMATS)}")


def new_figure(width: float, height: float, dpi: int = 150) -> Any:
    """Return an empty figure, its sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def line_style(i: int) -> dict[str, Any]:
    """Return color, marker and line style of line i, as arguments of matplotlib.

    Colors repeat after ten lines, with another marker and line style.
    """
    cycle = i // 10
    return {
        "color": f"C{i % 10}",
        "marker": "osD^vP"[cycle % 6],
        "markersize": 4,
        "linestyle": ("-", "--", ":", "-.")[cycle % 4],
    }


def _add_legend(figure: Any, **options: Any) -> None:
    """Add a legend to the right of all panels; options: further ones of `Figure.legend`."""
    figure.legend(fontsize=8, handlelength=4, loc="outside right upper", **options)


def comparison_plot(rows: Sequence[Row], environment: dict[str, Any]) -> Any:
    """Return quality against bits per value; recipes without figures are omitted."""
    measured = [row for row in rows if row.problem is None and row.bits_per_value is not None]
    panels: dict[str, Callable[[Row], float | None]] = {
        "perplexity of the continuation (lower is better)": lambda row: row.perplexity
    }
    if any(row.needle is not None for row in measured):
        panels["needle answers correct, % (higher is better)"] = _needle_percent
    figure = new_figure(6 * len(panels) + 2, 4.8)
    e = environment
    figure.suptitle(f"{e['model']} ({e['dtype']}), context {e['context']:,}", fontsize=11)
    marks: dict[str, Any] = {}  # in the legend once, although both panels have them
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, height) in zip(all_axes, panels.items(), strict=True):
        heights = []
        for i, row in enumerate(measured):
            y = height(row)
            if y is None or not math.isfinite(y):
                continue
            style = line_style(i) | ({"color": "black"} if row.recipe == "full" else {})
            style |= {"markersize": 6, "linestyle": "", "label": row.recipe}
            (marks[row.recipe],) = axes.plot([row.bits_per_value], [y], **style)
            if row.recipe == "full":
                axes.axhline(y, color="black", linewidth=0.8, linestyle=":")
            heights.append(y)
        if height is _needle_percent:
            axes.set_ylim(-6, 112)
        elif heights and max(heights) > 4 * min(heights):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("bits per value")
        axes.set_xlim(left=0)
        axes.margins(x=0.12, y=0.12)
        axes.grid(alpha=0.3)
    _add_legend(figure, handles=list(marks.values()))
    return figure


def _needle_percent(row: Row) -> float | None:
    return None if row.needle is None else 100 * row.needle


def bench_plot(rows: Sequence[TimedRow], environment: dict[str, Any]) -> Any:
    """Return the times, by context if there are several."""
    times = [(row.name, row.context, row.ms) for row in rows if row.ms is not None]
    contexts = sorted({context for _, context, _ in times})
    names = list(dict.fromkeys(name for name, *_ in times))
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    e = environment
    axes.set_title(
        f"bench {e['verb']}: {e['shape']}, {e['dtype']}, batch {e['batch']}", fontsize=10
    )
    if len(contexts) > 1:
        for i, name in enumerate(names):
            points = sorted((context, ms) for other, context, ms in times if other == name)
            axes.plot(*zip(*points, strict=True), label=name, **line_style(i))
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
        axes.set(yscale="log", xlabel="tokens of context", ylabel="ms")
        _add_legend(figure)
    else:
        milliseconds = [ms for *_, ms in times]
        bars = axes.barh(names[::-1], milliseconds[::-1])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set_xlabel(f"ms at {contexts[0]:,} tokens" if contexts else "ms")
        if times and max(milliseconds) > 20 * min(milliseconds):
            axes.set_xscale("log")
        axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    return figure


def throughput_plot(rows: Sequence[ThroughputRow], environment: dict[str, Any]) -> Any:
    """Return the tokens per second, a panel for each size of requests.

    Rows whose quality is not equal are paler; lines are from the least to the most of all rounds.
    """
    from ..bench.throughput import EQUAL_KL
    from ..planner.units import show_bytes

    timed = [row for row in rows if row.processor_tokens_s]
    sizes = list(dict.fromkeys((row.prompt, row.new) for row in rows))
    figure = new_figure(6 * len(sizes) + 2, 4.8)
    e = environment
    figure.suptitle(
        f"{e['model']} ({e['dtype']}), {show_bytes(e['memory'])} of caches", fontsize=11
    )
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        shown = [row for row in timed if (row.prompt, row.new) == size][::-1]
        rates = [row.processor_tokens_s for row in shown if row.processor_tokens_s]
        equal = [row.kl is not None and row.kl <= EQUAL_KL for row in shown]
        best = [rate.best for rate in rates]
        spread = [[x.best - x.low for x in rates], [x.high - x.best for x in rates]]
        bars = axes.barh(
            [f"{row.name} ({row.batch})" for row in shown], best, xerr=spread, ecolor="0.4",
            color=["C0" if same else "#b0c8de" for same in equal],
        )  # fmt: skip
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        axes.set_title(f"{size[0]:,} tokens and {size[1]:,} new", fontsize=10)
        axes.set_xlabel(f"tokens per processor second; dark: KL up to {EQUAL_KL}")
        axes.margins(x=0.12)
        axes.grid(alpha=0.3)
    return figure


def plan_plot(plan: Plan) -> Any:
    """Return memory and speed by context.

    The band around a speed reaches from the low to the high estimate.
    """
    timed = any(point.tokens_s for row in plan.rows for point in row.curve)
    figure = new_figure(12 if timed else 8, 4.8)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    figure.suptitle(f"{plan.model.name}, batch {plan.batch}", fontsize=10)
    weights = plan.model.weights.nbytes
    for i, row in enumerate(row for row in plan.rows if row.curve):
        style = line_style(i)
        contexts = [point.context for point in row.curve]
        total = [(weights + point.kv_bytes) / 2**30 for point in row.curve]
        panels[0].plot(contexts, total, label=row.recipe, **style)
        rates = [point.tokens_s for point in row.curve if point.tokens_s]
        if rates:
            panels[1].plot(contexts, [rate.best for rate in rates], **style)
            low, high = [rate.low for rate in rates], [rate.high for rate in rates]
            band = {"color": style["color"], "alpha": 0.08, "linewidth": 0}
            panels[1].fill_between(contexts, low, high, **band)
    if plan.memory is not None:
        panels[0].axhline(plan.memory / 2**30, color="0.3", linewidth=1, label="memory")
    panels[0].set_ylabel("weights and KV cache, GiB")
    if timed:
        panels[1].set_ylabel("tokens per second, estimated")
        if plan.target is not None:
            panels[1].axhline(plan.target, color="0.3", linewidth=1)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xlabel="tokens of context")
        panel.grid(alpha=0.3)
    _add_legend(figure)
    return figure


SMALLEST = 1e-6  # nats; below it, divergences are drawn here


def tuning_plot(tuning: Tuning, name: str) -> Any:
    """Return divergence against bytes. name: the model's."""
    figure = new_figure(7, 4.8)
    axes, t = figure.add_subplot(), tuning.tuned
    uniform = [(share, kl) for _, share, kl in tuning.uniform]
    for label, points, style in (
        ("all layers the same, predicted", uniform, "C7."),
        ("tuned, predicted", tuning.front, "C0-"),
        ("this recipe, measured", [(t.share, t.kl)], "C3*"),
    ):
        shares, divergences = zip(*points, strict=True)
        axes.plot(shares, [max(SMALLEST, kl) for kl in divergences], style, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="share of the exact cache's bytes",
        ylabel="KL divergence from the exact cache, nats",
        title=f"{name}, context {t.context:,}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def attention_plot(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> Any:
    """Return the papers' four plots of attention."""
    figure = new_figure(11, 7.6, dpi=110)
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    from ..analyse.attention import EDGES, GRID, THRESHOLD

    e = environment
    figure.suptitle(
        f"{e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}", fontsize=12
    )
    axes = figure.subplots(2, 2)
    (sparsity, curve), (variance, scores) = axes
    numbers = [x.number for x in layers]
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, len(layers)))

    sparsity.bar(numbers, [x.sparsity for x in layers], color=colors)
    sparsity.set_ylim(0, 1)
    sparsity.set_title(f"sparsity: weights below {THRESHOLD:.0%} of their row's largest")

    for x, color in zip(layers, colors, strict=True):
        curve.plot(GRID, x.cdf, color=color, linewidth=1.4, label=f"layer {x.number}")
    curve.plot(GRID, np.mean([x.cdf for x in layers], axis=0), color="black", label="mean")
    curve.axhline(0.9, color="gray", linestyle=":", linewidth=1)
    curve.set_title("attention mass on the best tokens")
    curve.set_xlabel("fraction of the tokens, best first")
    if len(layers) <= 12:
        curve.legend(fontsize=8, loc="lower right")
    curve.xaxis.set_major_formatter(PercentFormatter(1))

    variance.bar(numbers, [x.variance for x in layers], color=colors)
    variance.set_title("variance over tokens of the attention they receive")

    before = np.mean([x.before for x in layers], axis=0)
    after = np.mean([x.after for x in layers], axis=0)
    edges = 10.0 ** np.array(EDGES)
    scores.stairs(before, edges, fill=True, color="0.8", label="before: every token of the prompt")
    label = f"after {e['recipe']}: tokens in the cache"
    scores.stairs(after, edges, color="C3", linewidth=1.8, label=label)
    scores.set(
        xscale="log",
        title="attention that a token receives from a later query, all layers",
        xlabel="score; the first bar includes all lower scores",
        ylabel="share of the tokens",
    )
    scores.margins(y=0.25)
    scores.legend(fontsize=8, loc="upper left")
    for panel in (sparsity, curve, scores):
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    for panel in (sparsity, variance):
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes.flat:
        panel.title.set_fontsize(10.5)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure


def distribution_plot(distributions: Sequence[Distribution], environment: dict[str, Any]) -> Any:
    """Return magnitudes of keys and values as images, before and after reordering.

    Of the layers, the first, the middle and the last are drawn.
    """
    from ..analyse.distribution import KINDS

    e = environment
    numbers = sorted({d.layer for d in distributions})
    layers = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    kinds = [kind for kind in KINDS if any(d.kind == kind for d in distributions)]
    by_layer = {(d.layer, d.kind): d for d in distributions}
    figure = new_figure(13, 1 + 2.3 * len(kinds), dpi=110)
    figure.suptitle(f"|x| of {e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}; "
                    f"groups of {e['recipe']}")  # fmt: skip
    axes = figure.subplots(len(kinds), 2 * len(layers), squeeze=False)
    for row, kind in enumerate(kinds):
        vmax = max(float(np.quantile(by_layer[n, kind].x.abs().numpy(), 0.999)) for n in layers)
        for column, number in enumerate(layers):
            d = by_layer[number, kind]
            for reordered, order in enumerate((None, d.order)):
                panel = axes[row][2 * column + reordered]
                if reordered and order is None:
                    panel.axis("off")
                    continue
                x = d.x.abs() if order is None else d.x.abs()[order]
                image = panel.imshow(x.numpy(), aspect="auto", cmap="magma", vmin=0, vmax=vmax,
                                     interpolation="nearest")  # fmt: skip
                title = "by group" if reordered else KINDS[kind]
                panel.set_title(f"layer {number}, {title}", fontsize=9)
                panel.tick_params(labelsize=7)
                if order is not None and d.group_of is not None:
                    for end in d.group_of[order].diff().nonzero().flatten().tolist():
                        panel.axhline(end + 0.5, color="white", linewidth=0.6)
                if not reordered and not column:
                    panel.set_ylabel("channel", fontsize=8)
                if row == len(kinds) - 1:
                    panel.set_xlabel("token", fontsize=8)
        figure.colorbar(image, ax=list(axes[row]), shrink=0.9, pad=0.01)
    return figure
