"""How a budget is divided over the layers of a model.

Every policy preserves the total to the token: the layers with the largest remainders get the tokens
that rounding leaves. No layer gets more than all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import RecipeError

POLICIES = (
    "uniform",
    "pyramid",  # MiniKV: from 2x - x/7 at the bottom layer to x/7 at the top one, linearly
    "pyramidkv",  # PyramidKV: from 2x - x/20 to x/20; uniform for a prompt shorter than 2x
    "joint",  # the heads of all layers compete for one budget, with head_share=
    "variance",  # in proportion to the variance of a layer's attention mass
    "inverse-variance",
)
BY_VARIANCE = ("variance", "inverse-variance")
DEPTH = {"pyramid": 7, "pyramidkv": 20}


def weights(
    policy: str | Sequence[float],
    layers: int,
    variances: Sequence[float] | None = None,
    cap: float = math.inf,
) -> list[float]:
    """Return the weight of each layer; variances: [layers], for the two policies that need them.

    cap: the most tokens that a layer can keep, divided by the average x. Where the bottom layer's
    share exceeds it, the pyramid of PyramidKV is flatter (KVCache-Factory's rule). Raises
    `RecipeError` where there are other than `layers` weights.
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
            bottom = min(bottom, cap)
        top = 2 - bottom
        steps = max(1, layers - 1)
        return [bottom + (top - bottom) * i / steps for i in range(layers)] if layers > 1 else [1.0]
    if policy in BY_VARIANCE:
        assert variances is not None, "these policies wait for every layer's prompt"
        if not all(map(math.isfinite, variances)):  # scores beyond fp32
            return [1.0] * layers
        tiny = 1e-12
        return [v + tiny if policy == "variance" else 1 / (v + tiny) for v in variances]
    return [1.0] * layers


def split(total: int, weights: Sequence[float], cap: int) -> list[int]:
    """Divide `total` tokens by `weights`, none above `cap`; sums to min(total, cap * layers).

    The tokens beyond a layer's cap are divided over the other layers, in proportion, or equally
    where all of these have weight 0.
    """
    layers = len(weights)
    tokens = [0] * layers
    uncapped = list(range(layers))
    left = min(total, cap * layers)
    while uncapped:
        if not any(weights[i] for i in uncapped):
            weights = [1.0] * layers
        total_weight = math.fsum(weights[i] for i in uncapped)
        capped = [i for i in uncapped if left * weights[i] / total_weight >= cap]
        if not capped:
            break
        for i in capped:
            tokens[i] = cap
        left -= cap * len(capped)
        uncapped = [i for i in uncapped if i not in capped]
    if uncapped:
        total_weight = math.fsum(weights[i] for i in uncapped)
        exact = {i: left * weights[i] / total_weight for i in uncapped}
        for i, x in exact.items():
            tokens[i] = math.floor(x)
        remainder = left - sum(tokens[i] for i in uncapped)
        for i in sorted(uncapped, key=lambda i: math.floor(exact[i]) - exact[i])[:remainder]:
            tokens[i] += 1
    return tokens
