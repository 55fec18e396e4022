"""Speed: kvloom compared with torch and transformers, in one run on one machine.

    from kvloom_lab.bench import LayerShape, candidates, timing
    steps = candidates.decode_candidates(LayerShape(32, 8, 128), ["full", "kivi"], context=8192)
    times = timing.time_candidates(steps, repeats=20)

`candidates` says what is compared: one layer's attention to a long context, or to a prompt, the
quantization of a prompt alone, and whole decode steps of a model. Caches are filled without
computing a prompt. `timing` times all candidates alternately, and makes rows of the result.
"""

from __future__ import annotations

from ..workload.layers import LayerShape, ModelShape
from .timing import TimedRow

__all__ = ["LayerShape", "ModelShape", "TimedRow"]
