"""Scores: a number a token, high for those that should stay.

A score is a frozen dataclass with `kind` and a call that looks at a `Step`; `join` says what
becomes of the score a token had. An entry in `SCORERS` makes it available to recipes. Decides
nothing about how many tokens stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..kernels import ops
from ..kernels.score.noise import KINDS, Noise
from ..registry.fields import typed


@dataclass
class Step:
    """What a score may look at: T new queries and the N exact tokens they attended to.

    q [B, Hq, T, D], k [B, Hk, N, D]; the queries are the last T of the N tokens. valid bool
    [B, 1 or Hk, N] and real bool [B, 1, T] hide padding (None: there is none). index int32 or int64
    [B or 1, Hk or 1, N]: the tokens' places in the sequence, of `seen` so far. number counts the
    decode steps, 0 for the prompt. seed is different for every layer. bias fp32 [B, Hq, N] is added
    to the logits. products: scale * q @ k, where attention has left it (`kernels.score`).
    """

    q: Tensor
    k: Tensor
    scale: float
    softcap: float | None
    valid: Tensor | None
    real: Tensor | None
    index: Tensor
    seen: int
    number: int
    seed: int
    group: str
    bias: Tensor | None = None
    products: Tensor | None = None

    def mass(self, rows: int | None = None, noise: Noise | None = None, tau: float = 1.0) -> Tensor:
        """Attention each token gets from the last `rows` queries (None: all), fp32 [B, Hk, N]."""
        t = self.q.shape[2]
        skip = 0 if rows is None else max(0, t - rows)
        b, hk, n = self.k.shape[0], self.k.shape[1], self.k.shape[2]
        options: dict[str, Any] = {
            "valid": self.valid,
            "real": None if self.real is None else self.real[:, :, skip:],
            "softcap": self.softcap,
            "bias": self.bias,
            "noise": noise,
            "tau": tau,
        }
        if self.products is not None and not skip:
            mass = ops.step_mass(self.products, n, hk, **options)
        else:
            mass = ops.column_mass(self.q[:, :, skip:], self.k, self.scale, **options)
        heads = mass.view(b, hk, -1, n)  # [B, Hk, R, N]
        if self.group == "max":
            return heads.amax(dim=2)
        return heads.sum(dim=2) if self.group == "sum" else heads.mean(dim=2)

    def noise(self, kind: str, fixed: bool) -> Noise:
        """Noise for these queries and keys; fixed: one number a key, whatever the query."""
        first = self.seen - self.q.shape[2]
        return Noise(kind, self.seed, self.index, first, fixed)


@dataclass(frozen=True)
class Scorer:
    """Base of all scores.

    weighs: whether it asks a `Step` for its mass.
    """

    kind: ClassVar[str] = ""
    weighs: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        raise NotImplementedError

    def join(self, held: Tensor, new: Tensor) -> Tensor:
        """A token's score, given the one it had and this step's: the new one."""
        return new


@dataclass(frozen=True)
class Recent(Scorer):
    """Age: the newest tokens stay."""

    kind: ClassVar[str] = "recent"


@dataclass(frozen=True)
class Dilated(Scorer):
    """Age with gaps: of the older tokens, every `stride`-th stays (Keyformer's dilated window).

    arXiv:2403.09054, figure 2. Which ones is decided by their place in the sequence, so that a
    token that stays does so until the window has passed it.
    """

    stride: int = 2
    kind: ClassVar[str] = "dilated"

    def __post_init__(self) -> None:
        if type(self.stride) is not int or self.stride < 1:
            raise RecipeError(f"stride={self.stride!r} must be a whole number, 1 or more")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n = step.k.shape[:3]
        age = step.index - step.seen  # -1 for the newest
        in_gap = step.index % self.stride != 0
        return torch.where(in_gap, age - step.seen, age).float().expand(b, hk, n)


@dataclass(frozen=True)
class Mass(Scorer):
    """Accumulated attention, all queries (H2O, arXiv:2306.14048).

    damping: at every step a token's score so far is multiplied by it (Keyformer, section 3.2).
    """

    damping: float = 1.0
    kind: ClassVar[str] = "mass"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        typed(self, "damping")
        if not 0 < self.damping <= 1:
            raise RecipeError(f"damping={self.damping!r} must lie in (0, 1]")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return step.mass()

    def join(self, held: Tensor, new: Tensor) -> Tensor:
        """The sum, what was held damped."""
        return (held if self.damping == 1 else held * self.damping) + new


@dataclass(frozen=True)
class Observation(Scorer):
    """Attention from the last queries of the prompt, smoothed over neighbours (SnapKV).

    arXiv:2404.14469, section 4: the last `window` queries vote, and votes are pooled over `kernel`
    neighbors, so that clusters stay. Tokens inside the window and before it are pooled separately.
    """

    window: int = 32
    pool: str = "avg"
    kernel: int = 7
    kind: ClassVar[str] = "observation"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        typed(self, "window", "kernel")
        if self.pool not in ("avg", "max", "none"):
            raise RecipeError(f"pool={self.pool!r} is not one of avg, max, none")
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RecipeError(
                f"window={self.window} must be 1 or more, and kernel={self.kernel} odd"
            )

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        mass = step.mass(rows=self.window)
        if self.pool == "none":
            return mass
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        parts = mass.tensor_split([max(0, mass.shape[-1] - self.window)], dim=-1)
        half = self.kernel // 2
        return torch.cat([pool(x, self.kernel, 1, half) for x in parts if x.numel()], dim=-1)


@dataclass(frozen=True)
class Noisy(Scorer):
    """Accumulated softmax of noisy, tempered logits (Keyformer, arXiv:2403.09054, equation 9).

    noise: "gumbel", or the paper's ablations "gaussian" (same mean and deviation), "constant" and
    "none". fixed: one number a key for its whole life, as in Algorithm 1; else every query draws
    its own, as in the official code. tau goes from tau_begin to tau_end in `steps` decode steps.
    """

    noise: str = "gumbel"
    fixed: bool = False
    tau_begin: float = 1.0
    tau_end: float = 2.0
    steps: int = 128
    kind: ClassVar[str] = "noisy"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        typed(self, "fixed", "tau_begin", "tau_end", "steps")
        if self.noise not in (*KINDS, "none"):
            raise RecipeError(f"noise={self.noise!r} is not one of {', '.join(KINDS)}, none")
        if not (0 < self.tau_begin < math.inf and 0 < self.tau_end < math.inf):
            raise RecipeError(
                f"tau_begin={self.tau_begin} and tau_end={self.tau_end} must be numbers above 0"
            )
        if self.steps < 1:
            raise RecipeError(f"steps={self.steps} must be 1 or more")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        part = min(1.0, step.number / self.steps)
        tau = self.tau_begin + (self.tau_end - self.tau_begin) * part
        noise = None if self.noise == "none" else step.noise(self.noise, self.fixed)
        return step.mass(noise=noise, tau=tau)

    def join(self, held: Tensor, new: Tensor) -> Tensor:
        """The sum."""
        return held + new


@dataclass(frozen=True)
class Random(Scorer):
    """A number drawn once a token: the floor every score must beat."""

    kind: ClassVar[str] = "random"

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n = step.k.shape[:3]
        drawn = step.noise("gumbel", fixed=True).block(hk, 1, 0, 1, n)
        return drawn[:, :, 0, 0].expand(b, hk, n)


SCORERS: dict[str, type[Scorer]] = {
    cls.kind: cls for cls in (Recent, Dilated, Mass, Observation, Noisy, Random)
}
