"""Speed: kvloom compared with torch and transformers, in one run on one machine.

    from . import LayerShape, decode, rows, timing
    candidates = decode.candidates(LayerShape(32, 8, 128), ["full", "kivi"], context=8192)
    times = timing.time_candidates(candidates, repeats=20)
    print(rows.make_rows(candidates, times, decode.BASELINES, shape="", context=8192, batch=1))

`decode` measures one layer's attention to a long context, `prefill` to a prompt, `pack` the
quantization of a prompt alone, `generate` whole decode steps of a model.
`workload.filled_caches` and `transformers_caches` fill caches without computing a prompt. `timing`
times all candidates alternately. `rows`, `table` and `plot` show the result.
"""

from __future__ import annotations

from ..workload.layers import LayerShape, ModelShape
from .timing import TimedRow

__all__ = ["LayerShape", "ModelShape", "TimedRow"]
