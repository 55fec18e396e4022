"""Scores by age, attention and length, and the registry of all scores.

A score is a frozen dataclass with a `kind`. It is called with a `Step`, and gives tokens that
should stay a high number. Decides nothing about how many tokens stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..kernels.score.noise import KINDS
from ..registry import Registry
from ..registry.fields import check_choice, check_fields, check_whole
from .expected import Expected
from .reconstruction import Reconstruction
from .rotated import Rotated
from .scorer import Scorer, Step
from .triattention import TriAttention

S = TypeVar("S", bound=Scorer)


@dataclass(frozen=True)
class Recent(Scorer):
    """Age: the newest tokens stay."""

    kind: ClassVar[str] = "recent"


@dataclass(frozen=True)
class Dilated(Scorer):
    """Age with gaps (Keyformer's dilated window, arXiv:2403.09054, figure 2).

    The position in the sequence decides which tokens stay, so that a token that stays once stays
    until the window has passed it.

    Attributes:
        stride: Of the older tokens, every `stride`-th stays.
    """

    stride: int = 2
    kind: ClassVar[str] = "dilated"

    def __post_init__(self) -> None:
        check_whole("stride", self.stride, 1)

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n = step.k.shape[:3]
        age = step.index - step.seen  # -1 for the newest
        in_gap = step.index % self.stride != 0
        return torch.where(in_gap, age - step.seen, age).float().expand(b, hk, n)


@dataclass(frozen=True)
class Mass(Scorer):
    """Accumulated attention, all queries (H2O, arXiv:2306.14048).

    Attributes:
        damping: Factor on the accumulated score at every step (Keyformer, arXiv:2403.09054, section
            3.2).
    """

    damping: float = 1.0
    kind: ClassVar[str] = "mass"
    sums_attention: ClassVar[bool] = True

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
    """Attention from the last queries of the prompt, smoothed over neighbors (SnapKV).

    arXiv:2404.14469, section 4. Tokens inside the window and before it are pooled separately.

    Attributes:
        window: How many last queries vote.
        pool: How votes are pooled, so that clusters stay: "avg", "max" or "none".
        kernel: Neighbors that are pooled, an odd number.
    """

    window: int = 32
    pool: str = "avg"
    kernel: int = 7
    kind: ClassVar[str] = "observation"
    sums_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("pool", self.pool, ("avg", "max", "none"))
        check_whole("window", self.window, 1, " of queries")
        check_whole("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise RecipeError(f"kernel={self.kernel} must be odd; use {self.kernel + 1}")

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

    Attributes:
        noise: "gumbel", or the paper's ablations "gaussian" (same mean and deviation), "constant"
            and "none".
        fixed: One draw for each key, as in Algorithm 1; otherwise one for each query and key, as in
            the official code.
        tau_begin: Temperature of the prompt.
        tau_end: Temperature from decode step `steps` on.
        steps: Decode steps in which the temperature rises.
    """

    noise: str = "gumbel"
    fixed: bool = False
    tau_begin: float = 1.0
    tau_end: float = 2.0
    steps: int = 128
    kind: ClassVar[str] = "noisy"
    sums_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "fixed", "tau_begin", "tau_end")
        check_choice("noise", self.noise, (*KINDS, "none"))
        if self.tau_begin <= 0 or self.tau_end <= 0:
            raise RecipeError(
                f"tau_begin={self.tau_begin} and tau_end={self.tau_end} must be numbers above 0"
            )
        check_whole("steps", self.steps, 1)

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


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """The negative length of the key (arXiv:2406.11430): short keys receive more attention."""

    kind: ClassVar[str] = "key-norm"

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return -step.k.float().norm(dim=-1)


@dataclass(frozen=True)
class ValueAware(Scorer):
    """The score of `base` times the L1 norm of the value (VATP, arXiv:2406.12335, equation 4).

    Attributes:
        base: One of kvloom's own scores that sum up attention, such as `Mass` or `Observation`.
    """

    base: Scorer = field(default_factory=Mass)
    kind: ClassVar[str] = "value-aware"
    sums_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not built_in(self.base) or not self.base.sums_attention:
            raise RecipeError(
                f"base={self.base!r} of a value-aware score must be one of kvloom's own scores of "
                "attention, such as mass or observation"
            )

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return self.base(step) * step.v.float().norm(p=1, dim=-1)

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """As `base` joins: a value's norm does not change, so it is a factor of both."""
        return self.base.join(former, new)


_BUILT_IN = (
    Recent, Dilated, Mass, Observation, Noisy, Random,
    Reconstruction, Rotated, Expected, TriAttention, ValueAware, KeyNorm,
)  # fmt: skip

SCORERS: Registry[type[Scorer]] = Registry(
    "score",
    {cls.kind: cls for cls in _BUILT_IN},
    Scorer,
    ("__call__",),
)

Rule = Callable[[Step], Tensor]
"""Takes a `Step` and returns fp32 [B, Hk, N], one number for each token and key/value head."""


def register_score(cls: type[S]) -> type[S]:
    """Make a score available to recipes by its `kind`; usable as a decorator.

    Args:
        cls: A frozen dataclass derived from `Scorer`.

    Returns:
        The class.

    Raises:
        RecipeError: It is another class, or its name is taken.
    """
    SCORERS.register(cls)
    return cls


def checked(scorer: Rule, step: Step) -> Tensor:
    """Return the scores of a step, fp32 [B, Hk, N].

    Raises `RecipeError` with the score's name for any other shape, dtype or device, and for NaN.
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
    if bool(scores.isnan().any()):
        raise _refused(scorer, "returned NaN; return numbers, or infinity")
    return scores


def built_in(scorer: Rule) -> bool:
    """Return whether a score is kvloom's own."""
    kind = getattr(scorer, "kind", "")
    return SCORERS.is_builtin(kind) and type(scorer) is SCORERS[kind]


def _refused(scorer: Rule, why: str) -> RecipeError:
    name = getattr(scorer, "kind", "") or getattr(scorer, "__name__", type(scorer).__name__)
    return RecipeError(f"score {name!r} {why}")


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
