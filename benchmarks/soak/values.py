"""Numbers that a model should not give: NaN, infinities, denormals, numbers beyond fp16.

What is not finite is refused, and changes nothing. All other numbers give finite outputs, near
attention in float64 over what the layer holds (tools/held.py).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from kvloom.errors import NotFinite, RecipeError
from kvloom.keep import policy
from sequences import DTYPES, Case, Sequence, case_of

from .tally import Tally

CASES = 100_000
LARGEST = {"fp32": 1e30, "bf16": 1e30, "fp16": 6e4}


def run_all(tally: Tally) -> None:
    """Run cases whose keys or values are changed in some places."""
    policy.FLOOR_TOKENS = 2
    refused = 0
    for seed in tally.numbers(CASES):
        case = case_of(seed)
        steps = tuple(x for x in case.operations if x[0] == "step")
        with tally.case(f"values {seed}"), torch.no_grad():
            refused += run(replace(case, operations=steps), Random(seed))
    tally.figures["refused"] = refused


def run(case: Case, draw: Random) -> bool:
    """Run the steps of a case; return whether one was refused."""
    sequence = Changed(case, draw)
    for operation in (*case.operations, ("step", 1)):
        try:
            sequence._step(*operation[1:])
        except NotFinite:
            return True
        except RecipeError:  # a first prompt that is too short for a pyramid of budgets
            return False
        findings = sequence.findings
        assert not findings.wrong, findings.wrong
        eps = torch.finfo(DTYPES[case.dtype]).eps
        # sums of equal values round in one direction
        assert findings.attention <= max(2.0**-18, 2 * eps * (eps > 1e-6)), findings
    return False


class Changed(Sequence):
    """A sequence whose keys and values have extreme numbers in some places."""

    def __init__(self, case: Case, draw: Random) -> None:
        super().__init__(case)
        self.random, self.kind = draw, draw.choice(["denormal", "large", "constant", "channel"])

    def _inputs(self, tokens: int, repeated: slice | None = None) -> list:
        return [
            step._replace(k=self._changed(step.k), v=self._changed(step.v))
            for step in super()._inputs(tokens, repeated)
        ]

    def _changed(self, x: Tensor) -> Tensor:
        """Return x with extreme numbers."""
        dtype, draw = DTYPES[self.case.dtype], self.random
        largest = LARGEST[self.case.dtype]
        if self.kind == "denormal":
            return x * torch.finfo(dtype).smallest_normal
        if self.kind == "constant":
            return torch.full_like(x, draw.choice([0.0, 1.0, -3.5, largest**0.25]))
        x = x.clone()
        if self.kind == "channel":  # as a large bias of keys
            x[..., draw.randrange(x.shape[3])] += draw.choice([30.0, 300.0])
        elif draw.random() < 0.3:
            x[..., draw.randrange(x.shape[2]), draw.randrange(x.shape[3])] = largest * draw.random()
        return x

    def _check_bytes(self, prompt: list) -> None:
        """Compare nothing: `laws` does."""
