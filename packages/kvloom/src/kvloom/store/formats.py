"""Formats of the store: how tokens are packed, and when.

How kvloom's own quantizer packs them is its `Encoding`; formats of others bring their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..encoding import META, Encoding
from ..errors import RecipeError
from ..kernels.attend.reference import AttentionState
from ..kernels.quantize.packed_view import PackedView
from ..kernels.select.reference import gather_packed
from ..registry import Registry
from ..registry.fields import check_fields, check_whole
from .buffer import take_units

F = TypeVar("F", bound="Format")


@dataclass(frozen=True)
class Format:
    """Base class of formats; derive a frozen dataclass whose fields are the format's options.

    A format of another distribution defines `pack`, `unpack` and `nbytes`, for exact tokens x [B,
    Hk, T, D] in the model's dtype, after RoPE; T is a multiple of `unit`. Packing treats all rows,
    heads and units alike: a cache may join, reorder and drop them. The built-in quantizer `Packed`
    is packed and unpacked by kvloom's kernels instead.

    Attributes:
        kind: The name in recipes.
        unit: Tokens that are packed together; a class attribute or a field.
    """

    kind: ClassVar[str] = ""
    unit = 1  # not annotated: a field of a derived class keeps its place among the others

    def pack(self, x: Tensor, nonpadding: Tensor | None = None) -> tuple[Tensor, ...]:
        """Pack x [B, Hk, T, D] into tensors [B, Hk, n * T / unit, ...], n constant for each.

        nonpadding: bool [B, 1 or Hk, T], False for padding; no step attends to padding.
        """
        raise NotImplementedError

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, T, D] of packed tensors, in dtype."""
        raise NotImplementedError

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of `tokens` packed tokens of `heads` key/value heads, batch 1."""
        raise NotImplementedError

    def attend_problems(
        self,
        q: Tensor,
        keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView,
        *,
        visible: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> list[str]:
        """Return why `attend` does not attend to these tokens; empty if it does.

        kvloom asks the keys' format first, then the values' format. If neither attends to them, it
        unpacks the tokens and counts the reasons in `operations_run`. The base class has no kernel.
        The arguments are those of `attend`.
        """
        return ["it has no attention kernel"]

    def attend(
        self,
        q: Tensor,
        keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView,
        scale: float,
        *,
        visible: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> AttentionState:
        """Attend to tokens of which keys, values or both are packed in this format.

        kvloom calls it for cases without `attend_problems`.

        Args:
            q: Queries [B, Hq, T, D]; all of them see the tokens.
            keys: Packed keys, as a `FormatView` of tokens lo to hi, or exact ones [B, Hk, N, D].
                A view's tensors start at the unit that contains token lo: skip the first
                `lo % unit` tokens, and read hi - lo. Keys that kvloom's own format packs are a
                `PackedView`; its `tensor()` unpacks them.
            values: Values, likewise.
            scale: By which q @ k is multiplied.
            visible: bool [B, 1 or Hk, N]: False hides a token.
            bias: fp32 [B or 1, Hq, N], added to the logits (ALiBi).
            softcap: Logits become softcap * tanh(logits / softcap), before the bias.

        Returns:
            out fp32 [B, Hq, T, D] and lse fp32 [B, Hq, T], the logarithm of the sum of exp(logits).
        """
        raise NotImplementedError

    def gather(
        self, tensors: Sequence[Tensor], tokens: int, index: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the tokens [n, D] at `index`, int64 [n], of `tokens` packed ones, in dtype.

        tensors: Of one row and head. A tier reads by it; the base class unpacks whole units.
        """
        units, place = (index // self.unit).unique(return_inverse=True)
        found = tuple(take_units(x, units, tokens // self.unit) for x in tensors)
        return self.unpack(found, dtype)[0, 0, place * self.unit + index % self.unit]

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why this format does not fit a layer, one sentence each; empty if it does."""
        return []

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """Return how many of `tokens` exact tokens to pack; the newest `recent` stay exact.

        prompt: whether these tokens are a prompt, which some formats pack at once.
        """
        return max(0, tokens - recent) // self.unit * self.unit

    def bits_per_value(self, head_dim: int = 0) -> float:
        """Return the effective bits of a packed value, metadata included."""
        if not head_dim:
            raise RecipeError(f"give bits_per_value of format {self.kind!r} its head_dim")
        return 8 * self.nbytes(self.block_tokens, head_dim) / (self.block_tokens * head_dim)

    @property
    def packed_at_once(self) -> int:
        """Tokens that decoding packs at once: the field `residual`, or else a unit."""
        tokens: int = getattr(self, "residual", self.unit)
        return tokens

    @property
    def encoding(self) -> Any:
        """What kernels are bound to by a layer's keys or values in this format."""
        return self

    @property
    def block_tokens(self) -> int:
        """Tokens whose bytes and metadata are shared with no others."""
        return self.unit

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return False

    @property
    def max_abs(self) -> float:
        """The largest magnitude that can be packed; a step with a larger one is refused."""
        return math.inf


class FormatView(NamedTuple):
    """Packed tokens lo to hi, and the format that unpacks them.

    tensors: Those that `Format.pack` returned, of whole units: the first holds token lo.
    dtype: That of the exact tokens.
    """

    tensors: tuple[Tensor, ...]
    fmt: Format
    lo: int
    hi: int
    dtype: torch.dtype

    @property
    def rope(self) -> None:
        """None: such a format packs keys after RoPE."""

    def cut(self, lo: int, hi: int) -> FormatView:
        """Return tokens lo to hi of these."""
        unit, lo, hi = self.fmt.unit, self.lo + lo, self.lo + hi
        before = self.lo // unit  # units in front of these tensors
        begin, end = lo // unit - before, -(-hi // unit) - before
        whole = -(-self.hi // unit) - before
        rows = [x.shape[2] // whole for x in self.tensors]
        parts = (x[:, :, begin * n : end * n] for x, n in zip(self.tensors, rows, strict=True))
        return self._replace(tensors=tuple(parts), lo=lo, hi=hi)

    def tensor(self) -> Tensor:
        """Return the tokens [B, Hk, hi - lo, D] in the model's dtype."""
        skip = self.lo % self.fmt.unit
        return self.fmt.unpack(self.tensors, self.dtype)[:, :, skip : skip + self.hi - self.lo]


@dataclass(frozen=True)
class Packed(Encoding, Format):
    """kvloom's own quantizer: an `Encoding`, and when decoding packs.

    Attributes:
        residual: Decoding packs when this many exact tokens have gathered; per channel a multiple
            of `group`.
        unit: A first prompt is packed in whole multiples of this many tokens; later steps count
            from there. None: `residual`, as in KIVI.
    """

    residual: int = 1
    unit: int | None = None  # type: ignore[assignment]
    kind: ClassVar[str] = "packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "unit")
        check_whole("residual", self.residual, 1, " of tokens")
        if self.axis == "channel" and self.residual % self.group:
            raise RecipeError(
                f"residual={self.residual} is not a multiple of group={self.group}: per channel, "
                f"whole groups of tokens are packed; use {self.group} or {4 * self.group}"
            )
        if self.unit is not None and (self.unit < 1 or self.residual % self.unit):
            raise RecipeError(
                f"unit={self.unit} does not divide residual={self.residual}; use a unit that does"
            )
        if self.axis == "channel" and self.unit is not None and self.unit % self.group:
            raise RecipeError(
                f"unit={self.unit} is not a multiple of group={self.group}: per channel, whole "
                f"groups of tokens are packed; use {self.group}"
            )

    @cached_property
    def encoding(self) -> Encoding:
        """How tokens are packed, without when; one object for all equal encodings."""
        values = {field.name: getattr(self, field.name) for field in fields(Encoding)}
        return _interned(Encoding(**values))

    def gather(
        self, tensors: Sequence[Tensor], tokens: int, index: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the tokens [n, D] at `index`, int64 [n], and unpack no others."""
        codes, *numbers = tensors
        scale, zero = (x.view(META[self.meta]) for x in numbers)
        return gather_packed(
            codes, scale, zero, self.bits, self.axis, self.group or codes.shape[3],
            index[None, None], dtype,
        )[0, 0]  # fmt: skip

    @property
    def packs_rarely(self) -> bool:
        """Whether tokens are packed so rarely that copying them each time costs little."""
        return self.residual >= 32

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """Return how many of `tokens` exact tokens to pack; the newest `recent` stay exact."""
        block = self.unit if prompt and self.unit else self.residual
        return max(0, tokens - recent) // block * block


@cache
def _interned(encoding: Encoding) -> Encoding:
    """Return one object for all equal encodings: kernels are bound by it."""
    return encoding


@dataclass(frozen=True)
class Store:
    """Formats of keys and values.

    Attributes:
        keys: None: exact, in the model's dtype.
        values: None: exact, in the model's dtype.
        calibration: The file that `kvloom calibrate` wrote, for formats that need one; None: the
            file in the folder of the model's weights.
    """

    keys: Format | None = None
    values: Format | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "keys", "values", "calibration")
        if isinstance(self.values, Packed) and self.values.pre_rope:
            raise RecipeError("values have no rotary embedding; use pre_rope for keys alone")
        if self.calibration is not None and not self.calibrated:
            raise RecipeError(
                f"calibration={self.calibration!r}: no format of this store needs one; leave it out"
            )

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return self.keys is None and self.values is None

    @property
    def fixed_buffers(self) -> bool:
        """Whether all buffers exist before the first token; other formats make theirs later."""
        return all(fmt is None or isinstance(fmt, Packed) for fmt in (self.keys, self.values))

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of what is packed, by "keys" and "values"."""
        formats = {"keys": self.keys, "values": self.values}
        return {side: fmt for side, fmt in formats.items() if fmt is not None}

    @property
    def quantized(self) -> dict[str, Packed]:
        """The formats of kvloom's own quantizer, by "keys" and "values"."""
        return {side: fmt for side, fmt in self.formats.items() if isinstance(fmt, Packed)}

    @property
    def block_tokens(self) -> int:
        """Tokens of the smallest block that shares no byte or scale with others, on both sides."""
        return math.lcm(*(fmt.block_tokens for fmt in self.formats.values()))

    @property
    def pre_rope(self) -> bool:
        """Whether the model's rotary embedding is needed."""
        return isinstance(self.keys, Packed) and self.keys.pre_rope

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return any(fmt.calibrated for fmt in self.formats.values())

    def problems(self, head_dim: int, heads: int = 1, value_dim: int | None = None) -> list[str]:
        """Return why these formats do not fit a layer, one sentence each.

        head_dim: channels of a key. value_dim: of a value; None: as many.
        """
        dims = {"keys": head_dim, "values": value_dim or head_dim}
        return [
            f"{side}: {problem}"
            for side, fmt in self.formats.items()
            for problem in fmt.problems(dims[side], heads)
        ]

    @property
    def of_latents(self) -> Store:
        """The formats in a layer of latents: the positional part stays exact.

        Latents are read as keys and as values. So they have the format of values, with the bits of
        keys if these are more; or the format of keys, where values are exact.
        """
        keys, values = self.keys, self.values
        if isinstance(keys, Packed) and isinstance(values, Packed) and keys.bits > values.bits:
            values = replace(values, bits=keys.bits)
        if values is None and isinstance(keys, Packed):
            values = replace(keys, pre_rope=False)
        return replace(self, keys=None, values=keys if values is None else values)


FORMATS: Registry[type[Format]] = Registry(
    "format", {Packed.kind: Packed}, Format, ("pack", "unpack", "nbytes")
)


def register_format(cls: type[F]) -> type[F]:
    """Make a format available to recipes by its `kind`; usable as a decorator.

    Args:
        cls: A frozen dataclass derived from `Format`.

    Raises:
        RecipeError: It is another class, or its name is taken.
    """
    FORMATS.register(cls)
    return cls
