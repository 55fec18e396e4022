"""A recipe: KIVI between exact first and last layers."""

from dataclasses import replace

import kvloom
from kvloom import LayerOverride, Protect, Recipe, Store
from kvloom.recipe import resolve


@kvloom.register_recipe("kivi-between")
def kivi_between(bits: int | float = 2, exact: int = 1, residual: int = 128) -> Recipe:
    """KIVI, but for the first and the last layers, which stay exact.

    exact: the number of exact layers at either end.
    """
    ends = (f"{end} {exact}" for end in ("first", "last") if exact)
    return replace(
        resolve(f"kivi:bits={bits},residual={residual}"),
        layers=tuple(LayerOverride(end, store=Store(), protect=Protect()) for end in ends),
    )
