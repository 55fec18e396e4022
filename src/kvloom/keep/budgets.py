"""How a budget is divided over the layers of a model.

Every policy preserves the total to the token: what rounding leaves goes to the layers with the
largest remainders. Shares are weights per layer; no layer gets more than all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import RecipeError

POLICIES = {
    "uniform": "every layer the same",
    "pyramid": "MiniKV: from 2x - x/7 at the bottom layer to x/7 at the top one, linearly",
    "pyramidkv": "PyramidKV: from 2x - x/20 at the bottom layer to x/20 at the top one, linearly; "
    "uniform where the prompt is shorter than 2x",
    "variance": "in proportion to the variance of a layer's attention mass",
    "inverse-variance": "in inverse proportion to it",
}
BY_VARIANCE = ("variance", "inverse-variance")
DEPTH = {"pyramid": 7, "pyramidkv": 20}


def weights(
    policy: str | Sequence[float],
    layers: int,
    variances: Sequence[float] | None = None,
    most: float = math.inf,
) -> list[float]:
    """Weight of each layer; `variances` [layers] for the two policies that need them.

    most: the tokens that a layer can hold, divided by the average x. Where that is less than the
    bottom layer's share, the pyramid of PyramidKV is flatter (KVCache-Factory's rule).
    """
    if not isinstance(policy, str):
        if len(policy) != layers:
            raise RecipeError(
                f"{len(policy)} layer budgets for a model with {layers} layers of full attention; "
                "give one to each of these, and none to others"
            )
        return [float(w) for w in policy]
    if policy in DEPTH:
        bottom = 2 - 1 / DEPTH[policy]
        if policy == "pyramidkv":
            bottom = min(bottom, most)
        top = 2 - bottom
        steps = max(1, layers - 1)
        return [bottom + (top - bottom) * i / steps for i in range(layers)] if layers > 1 else [1.0]
    if policy in BY_VARIANCE:
        assert variances is not None, "these policies wait for every layer's prompt"
        tiny = 1e-12
        return [v + tiny if policy == "variance" else 1 / (v + tiny) for v in variances]
    return [1.0] * layers


def split(total: int, shares: Sequence[float], most: int) -> list[int]:
    """Divide `total` tokens by `shares`, none above `most`; sums to min(total, most * layers).

    What a capped layer cannot take goes to the others, in proportion.
    """
    layers = len(shares)
    given = [0] * layers
    open_layers = list(range(layers))
    left = min(total, most * layers)
    while open_layers:
        weight = math.fsum(shares[i] for i in open_layers)
        capped = [i for i in open_layers if left * shares[i] / weight >= most]
        if not capped:
            break
        for i in capped:
            given[i] = most
        left -= most * len(capped)
        open_layers = [i for i in open_layers if i not in capped]
    if open_layers:
        weight = math.fsum(shares[i] for i in open_layers)
        exact = {i: left * shares[i] / weight for i in open_layers}
        for i, x in exact.items():
            given[i] = math.floor(x)
        spare = left - sum(given[i] for i in open_layers)
        for i in sorted(open_layers, key=lambda i: math.floor(exact[i]) - exact[i])[:spare]:
            given[i] += 1
    return given
