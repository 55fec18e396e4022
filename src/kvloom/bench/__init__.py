"""Speed: kvloom beside what people have, in one run on one machine.

    from kvloom.bench import Shape, clock, decode, rows
    sides = decode.sides(Shape(32, 8, 128), ["full", "kivi"], context=8192)
    print(rows.of(sides, clock.run(sides, repeats=20), ...))

`decode` is one layer's attention to a long context, `prefill` a prompt's, `pack` the store alone,
`generate` whole steps of a model. `caches` fills caches without computing a prompt, `clock` lets
sides take turns, `rows`, `report` and `plot` show what was measured.
"""

from __future__ import annotations

from .rows import Row
from .shape import ModelShape, Shape

__all__ = ["ModelShape", "Row", "Shape"]
