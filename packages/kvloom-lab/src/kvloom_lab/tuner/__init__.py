"""Tune a recipe for a model: formats and budgets of each layer, chosen by measured divergence.

`candidates` lists what a layer can be, `scores` stores how much each choice costs, `knapsack` and
`problem` choose and measure whole recipes, and `run` does all of it.
"""

from __future__ import annotations

from .run import Settings, Tuning, tune

__all__ = ["Settings", "Tuning", "tune"]
