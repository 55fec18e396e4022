"""Scores: a number a token, high for those that should stay.

A score is a frozen dataclass with `kind`, `accumulates` and a call that looks at a `Step`; an
entry in `SCORERS` makes it available to recipes. Decides nothing about how many tokens stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..kernels.score import ref


@dataclass
class Step:
    """What a score may look at: T new queries and the N exact tokens they attended to.

    q [B, Hq, T, D], k [B, Hk, N, D]; the queries are the last T of the N tokens. valid bool
    [B, 1 or Hk, N] and real bool [B, 1, T] hide padding (None: there is none). number counts the
    decode steps, 0 for the prompt. seed is different for every layer and step. bias fp32 [B, Hq, N]
    is added to the logits.
    """

    q: Tensor
    k: Tensor
    scale: float
    softcap: float | None
    valid: Tensor | None
    real: Tensor | None
    number: int
    seed: int
    group: str
    bias: Tensor | None = None

    def mass(
        self, rows: int | None = None, noise: ref.Noise | None = None, tau: float = 1.0
    ) -> Tensor:
        """Attention each token gets from the last `rows` queries (None: all), fp32 [B, Hk, N]."""
        t = self.q.shape[2]
        skip = 0 if rows is None else max(0, t - rows)
        mass = ref.column_mass(
            self.q[:, :, skip:],
            self.k,
            self.scale,
            valid=self.valid,
            real=None if self.real is None else self.real[:, :, skip:],
            softcap=self.softcap,
            bias=self.bias,
            noise=noise,
            tau=tau,
        )
        b, hk, n = self.k.shape[0], self.k.shape[1], self.k.shape[2]
        heads = mass.view(b, hk, -1, n)  # [B, Hk, R, N]
        if self.group == "max":
            return heads.amax(dim=2)
        return heads.sum(dim=2) if self.group == "sum" else heads.mean(dim=2)

    def generator(self) -> torch.Generator:
        """Random numbers that depend on the seed alone."""
        return torch.Generator(self.q.device).manual_seed(self.seed)


@dataclass(frozen=True)
class Scorer:
    """Base of all scores. accumulates: later steps add to a token's score."""

    kind: ClassVar[str] = ""
    accumulates: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Recent(Scorer):
    """Age: the newest tokens stay."""

    kind: ClassVar[str] = "recent"


@dataclass(frozen=True)
class Mass(Scorer):
    """Accumulated attention, all queries (H2O, arXiv:2306.14048)."""

    kind: ClassVar[str] = "mass"
    accumulates: ClassVar[bool] = True

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return step.mass()


@dataclass(frozen=True)
class Observation(Scorer):
    """Attention from the last queries of the prompt, smoothed over neighbours (SnapKV).

    arXiv:2404.14469, section 4: window queries vote, pooling with `kernel` tokens keeps clusters.
    """

    window: int = 32
    pool: str = "avg"
    kernel: int = 7
    kind: ClassVar[str] = "observation"

    def __post_init__(self) -> None:
        if self.pool not in ("avg", "max", "none"):
            raise RecipeError(f"pool={self.pool!r} is not one of avg, max, none")
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RecipeError(
                f"window={self.window} must be 1 or more and kernel={self.kernel} odd"
            )

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        mass = step.mass(rows=self.window)
        if self.pool == "none":
            return mass
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        return pool(mass, self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class Noisy(Scorer):
    """Accumulated softmax of noisy, tempered logits (Keyformer, arXiv:2403.09054, equation 9).

    noise: "gumbel", or the paper's ablations "gaussian" (same mean and deviation), "constant" and
    "none". tau goes from tau_begin to tau_end in `steps` decode steps. Noise is drawn afresh for
    every row, key and step, as in the official code (Algorithm 1 draws it once).
    """

    noise: str = "gumbel"
    tau_begin: float = 1.0
    tau_end: float = 2.0
    steps: int = 128
    kind: ClassVar[str] = "noisy"
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.noise not in _NOISES:
            raise RecipeError(f"noise={self.noise!r} is not one of {', '.join(_NOISES)}")
        if min(self.tau_begin, self.tau_end) <= 0 or self.steps < 1:
            raise RecipeError("tau_begin and tau_end must be above 0, steps 1 or more")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        part = min(1.0, step.number / self.steps)
        tau = self.tau_begin + (self.tau_end - self.tau_begin) * part
        draw, generator = _NOISES[self.noise], step.generator()
        noise = None if draw is None else lambda logits: draw(logits, generator)
        return step.mass(noise=noise, tau=tau)


@dataclass(frozen=True)
class Random(Scorer):
    """A number drawn once a token: the floor every score must beat."""

    kind: ClassVar[str] = "random"

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n = step.k.shape[:3]
        shape = (b, hk, n)
        return torch.rand(shape, generator=step.generator(), device=step.k.device)


_EULER = 0.5772156649015329


def _gumbel(logits: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    return -(-uniform.clamp_min(1e-20).log()).clamp_min(1e-20).log()


def _gaussian(logits: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(logits.shape, generator=generator, device=logits.device)
    return normal.mul_(math.pi / math.sqrt(6)).add_(_EULER)


def _constant(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.full_like(logits, _EULER)


_NOISES: dict[str, Callable[[Tensor, torch.Generator], Tensor] | None] = {
    "gumbel": _gumbel,
    "gaussian": _gaussian,
    "constant": _constant,
    "none": None,
}

SCORERS: dict[str, type[Scorer]] = {
    cls.kind: cls for cls in (Recent, Mass, Observation, Noisy, Random)
}
