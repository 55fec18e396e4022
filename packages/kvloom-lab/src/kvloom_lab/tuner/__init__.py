"""Tune a recipe for a model: formats and budgets of each layer, chosen by measured divergence.

`candidates` lists what a layer can be, `prompt` measures it, `scores` stores the figures,
`knapsack` chooses, `repair` measures whole recipes, and `run` does all of it.
"""

from __future__ import annotations

from .run import Settings, Tuning, tune

__all__ = ["Settings", "Tuning", "tune"]
