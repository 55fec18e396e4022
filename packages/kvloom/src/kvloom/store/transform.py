"""How channels are transformed before they are quantized: the options and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RecipeError
from ..registry.fields import check_fields

SPANS = ("head", "layer")
CLIPS = ("group", "layer")


@dataclass(frozen=True)
class Transform:
    """How the channels of a token are grouped and scaled before they are quantized.

    No other transform combines with rotate or hadamard.

    Attributes:
        span: A group has channels of one "head", or of the "layer", all key/value heads together.
        reorder: Channels that are alike in calibration form a group; sizes differ, `group` is their
            average.
        clip: Groups reach from alpha * min to alpha * max; a number, or calibrated for each "group"
            or for the "layer" (SKVQ, arXiv:2405.06219, equation 3).
        smooth: Channels are divided by their calibrated largest magnitude.
        static: A group's range is that of calibration, so no scale and zero are stored.
        rotate: Groups are rotated at random and rounded to the levels of a normal distribution,
            with a scale and no zero (see `kernels.quantize.rotated`).
        hadamard: Each head is rotated in the same way, and then quantized by range as without a
            transform, per channel or per token.
    """

    span: str = "head"
    reorder: bool = False
    clip: float | str = 1.0
    smooth: bool = False
    static: bool = False
    rotate: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "reorder", "smooth", "static", "rotate", "hadamard")
        choice("span", self.span, SPANS)
        if isinstance(self.clip, str):
            choice("clip", self.clip, CLIPS)
        elif type(self.clip) not in (int, float) or not 0 < self.clip <= 1:
            raise RecipeError(
                f"clip={self.clip!r} must be above 0 and at most 1, or calibrated: "
                f"{' or '.join(CLIPS)}"
            )
        if self.static and self.clip != 1.0:
            raise RecipeError(
                f"clip={self.clip!r} clips a token's own range; leave it out with static=True"
            )
        others = (self.span, self.reorder, self.clip, self.smooth, self.static)
        for name in ("rotate", "hadamard"):
            alone = others == ("head", False, 1.0, False, False) and self.rotate != self.hadamard
            if getattr(self, name) and not alone:
                raise RecipeError(
                    f"{name}=True stands alone: leave the other fields of Transform out"
                )

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return self.reorder or self.smooth or self.static or isinstance(self.clip, str)


def choice(name: str, value: object, allowed: tuple) -> None:
    """Raise `RecipeError` unless a value is one of those allowed, and of its type."""
    same = [a for a in allowed if a == value and type(a) is type(value)]
    if not same:
        choices = ", ".join(map(str, allowed))
        raise RecipeError(f"{name}={value!r} is not one of {choices}")
