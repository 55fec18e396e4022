"""Scores: one number a token, high for the tokens that should stay.

A score is a frozen dataclass with a `kind`; it is called with a `Step` and returns the scores.
`register_score` makes one available to recipes. Decides nothing about how many tokens stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..kernels import ops
from ..kernels.score.noise import KINDS, Noise
from ..registry import Registry
from ..registry.fields import check_fields

S = TypeVar("S", bound="Scorer")


@dataclass
class Step:
    """The input of a score: T new queries and the N exact tokens that they attended to.

    q: [B, Hq, T, D], rotated as the model rotates them; they are the last T of the N tokens.
    k, v: [B, Hk, N, D]. All three have the model's dtype.
    scale, softcap: of the logits; softcap None: logits are not capped.
    valid, real: bool [B, 1 or Hk, N] and [B, 1, T], False for padding; None: there is no padding.
    index: int32 or int64 [B or 1, Hk or 1, N], the tokens' positions in the sequence.
    seen: the length of the sequence so far. number: counts decode steps, 0 for the prompt.
    seed: differs from layer to layer. group: how query heads of a group are combined.
    bias: fp32 [B, Hq, N], added to the logits (ALiBi).
    products: scale * q @ k, where attention has computed it already (`kernels.score`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
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
        """Attention mass of each token from the last `rows` queries (None: all), fp32 [B, Hk, N].

        noise and tau: added to the logits, and their temperature (Keyformer).
        """
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
    """Base class of scores; derive a frozen dataclass whose fields are the score's options.

    kind: the name in recipes. weighs: whether the score calls `Step.mass`.
    """

    kind: ClassVar[str] = ""
    weighs: ClassVar[bool] = False

    def __call__(self, step: Step) -> Tensor:
        """Return the score of every token, fp32 [B, Hk, N], finite or infinite but not NaN."""
        raise NotImplementedError

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """Combine the scores before a step with the step's own, both fp32 [B, Hk, N].

        The default forgets the former scores.
        """
        return new


@dataclass(frozen=True)
class Recent(Scorer):
    """Age: the newest tokens stay."""

    kind: ClassVar[str] = "recent"


@dataclass(frozen=True)
class Dilated(Scorer):
    """Age with gaps: of the older tokens, every `stride`-th stays (Keyformer's dilated window).

    arXiv:2403.09054, figure 2. The position in the sequence decides which tokens stay, so that a
    token that stays once stays until the window has passed it.
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

    damping: factor on the accumulated score at every step (Keyformer, section 3.2).
    """

    damping: float = 1.0
    kind: ClassVar[str] = "mass"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "damping")
        if not 0 < self.damping <= 1:
            raise RecipeError(f"damping={self.damping!r} must lie in (0, 1]")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return step.mass()

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """The sum, the former score damped."""
        return (former if self.damping == 1 else former * self.damping) + new


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
        check_fields(self, "window", "kernel")
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
    "none". fixed: one draw for each key, as in Algorithm 1; otherwise one for each query and key,
    as in the official code. tau rises from tau_begin to tau_end in `steps` decode steps.
    """

    noise: str = "gumbel"
    fixed: bool = False
    tau_begin: float = 1.0
    tau_end: float = 2.0
    steps: int = 128
    kind: ClassVar[str] = "noisy"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "fixed", "tau_begin", "tau_end", "steps")
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

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """The sum."""
        return former + new


@dataclass(frozen=True)
class Random(Scorer):
    """One random number for each token: the baseline that every score must beat."""

    kind: ClassVar[str] = "random"

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n = step.k.shape[:3]
        drawn = step.noise("gumbel", fixed=True).block(hk, 1, 0, 1, n)
        return drawn[:, :, 0, 0].expand(b, hk, n)


SCORERS: Registry[type[Scorer]] = Registry(
    "score",
    {cls.kind: cls for cls in (Recent, Dilated, Mass, Observation, Noisy, Random)},
    Scorer,
    ("__call__",),
)

Rule = Callable[[Step], Tensor]
"""Takes a `Step` and returns fp32 [B, Hk, N], one number for each token and key/value head."""


def register_score(cls: type[S]) -> type[S]:
    """Make a score available to recipes by its `kind`; usable as a decorator.

    cls: a frozen dataclass derived from `Scorer`. Raises `RecipeError` for another class and for a
    name that is taken.
    """
    SCORERS.register(cls)
    return cls


def checked(scorer: Rule, step: Step) -> Tensor:
    """Return the scores of a step, fp32 [B, Hk, N].

    Raises `RecipeError` with the score's name for any other shape, dtype or device, and for NaN
    from a score that is not built in.
    """
    scores = scorer(step)
    expected = step.k.shape[:3]
    if not isinstance(scores, Tensor):
        raise _refused(scorer, f"returned {type(scores).__name__}, not a tensor")
    if scores.shape != expected or scores.dtype != torch.float32:
        raise _refused(
            scorer,
            f"returned {_called(scores.dtype)} {list(scores.shape)}; return float32 "
            f"{list(expected)}: rows, key/value heads, tokens",
        )
    if scores.device != step.k.device:
        raise _refused(scorer, f"returned scores on {scores.device}; return {step.k.device}")
    if not _built_in(scorer) and bool(scores.isnan().any()):
        raise _refused(scorer, "returned NaN; return numbers, or infinity")
    return scores


def _built_in(scorer: Rule) -> bool:
    kind = getattr(scorer, "kind", "")
    return SCORERS.is_builtin(kind) and type(scorer) is SCORERS[kind]


def _refused(scorer: Rule, why: str) -> RecipeError:
    name = getattr(scorer, "kind", "") or getattr(scorer, "__name__", type(scorer).__name__)
    return RecipeError(f"score {name!r} {why}")


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
