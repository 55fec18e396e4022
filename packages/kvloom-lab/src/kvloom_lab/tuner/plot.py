"""The front of tuned and of uniform recipes as a picture: divergence against bytes."""

from __future__ import annotations

from pathlib import Path

from ..report.plots import new_figure
from .run import Tuning

SMALLEST = 1e-6  # nats; below it, divergences are drawn here


def plot(tuning: Tuning, name: str, path: str | Path) -> None:
    """Write the picture to `path`; its suffix is the format. Raises `InputError`."""
    figure = new_figure(path, 7, 4.8)
    axes, t = figure.add_subplot(), tuning.tuned
    uniform = [(share, kl) for _, share, kl in tuning.uniform]
    lines: list[tuple[str, list[tuple[float, float]], str]] = [
        ("all layers the same, predicted", uniform, "C7."),
        ("tuned, predicted", tuning.front, "C0-"),
        ("this recipe, measured", [(t.share, t.kl)], "C3*"),
    ]
    for label, points, style in lines:
        x, y = zip(*points, strict=True)
        axes.plot(x, [max(SMALLEST, kl) for kl in y], style, label=label)
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set_xlabel("share of the exact cache's bytes")
    axes.set_ylabel("KL divergence from the exact cache, nats")
    axes.set_title(f"{name}, context {t.context:,}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
