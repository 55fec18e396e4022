"""The bytes of one layer's page, and tokens into a page and out of it by kvloom's encodings.

A page holds the keys and values of `tokens` tokens in all key/value heads of a rank: per side the
codes [H, rows, D], scales and zeros as kvloom's cache stores them, or exact tokens; then exact
copies of the first tokens, if the recipe has sinks. An engine knows only how many bytes it has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import NotFinite
from ..kernels import PackedTensors, RopeAngles, ops, rows_for
from ..positions import Rope
from ..recipe import Recipe
from ..store import LayerEncoding, Packed, PackedView
from ..store.calibration import of_heads


@dataclass(frozen=True)
class LayerPlan:
    """What a layer's pages hold: formats (None: exact) and the number of exact first tokens.

    rope: how the model rotates keys, if they are packed before RoPE.
    """

    keys: Packed | None
    values: Packed | None
    sinks: int = 0
    calibrated: tuple[LayerEncoding | None, LayerEncoding | None] = (None, None)
    rope: Rope | None = None

    @classmethod
    def of_recipe(
        cls,
        recipe: Recipe,
        keys: LayerEncoding | None = None,
        values: LayerEncoding | None = None,
        rope: Rope | None = None,
    ) -> LayerPlan:
        """Return the plan of a layer's plain recipe; keys, values: its calibrated encodings."""
        packed, sinks = recipe.store.quantized, recipe.protect.sinks
        exact_first = packed and recipe.keep is None  # an eviction packs them with the others
        return cls(
            packed.get("keys"), packed.get("values"), sinks if exact_first else 0, (keys, values),
            rope if recipe.store.pre_rope else None,
        )  # fmt: skip

    def of_head(self, head: int) -> LayerPlan:
        """Return the plan of one key/value head, whose pages are its own."""
        keys, values = self.calibrated
        keys = keys and of_heads(keys, "keys", head, 1)
        values = values and of_heads(values, "values", head, 1)
        return replace(self, calibrated=(keys, values))


class Piece(NamedTuple):
    """A tensor within a page: its first byte, its shape and its dtype."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.begin + prod(self.shape) * self.dtype.itemsize


class PageLayout:
    """Where the tensors of a page lie.

    tokens: of a page. heads: key/value heads of this rank. dtype: of exact tokens.
    """

    def __init__(
        self, plan: LayerPlan, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.plan, self.tokens, self.heads, self.head_dim = plan, tokens, heads, head_dim
        self.dtype = dtype
        self.encodings: list[LayerEncoding | None] = [
            None if fmt is None else calibrated or fmt.encoding.bind(heads, head_dim)
            for fmt, calibrated in zip((plan.keys, plan.values), plan.calibrated, strict=True)
        ]
        self.pieces: list[list[Piece]] = []
        end = 0
        for layer_encoding in self.encodings:
            shapes = self._shapes(layer_encoding)
            pieces = []
            for shape, kind in shapes:
                pieces.append(Piece(end, shape, kind))
                end = pieces[-1].end
            self.pieces.append(pieces)
        self.sinks = Piece(end, (2, heads, plan.sinks, head_dim), dtype)
        self.nbytes = self.sinks.end
        """Bytes that hold something; an engine's page may have a few more."""

    def _shapes(
        self, layer_encoding: LayerEncoding | None
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of a side's tensors: exact ones, or codes, scales and zeros."""
        h, n, d = self.heads, self.tokens, self.head_dim
        if layer_encoding is None:
            return [((h, n, d), self.dtype)]
        encoding, (rows, numbers) = layer_encoding.encoding, layer_encoding.scales
        scales = ((rows, n // encoding.tokens_per_scale, numbers), layer_encoding.meta)
        zeros = scales if encoding.zeros else ((*scales[0][:2], 0), layer_encoding.meta)
        codes = (h, rows_for(n, encoding.bits), d)
        return [(codes, torch.uint8), scales, zeros]

    @cached_property
    def bytes_per_token_and_head(self) -> int:
        """The bytes of a page over its tokens and heads, rounded up."""
        return -(-self.nbytes // (self.tokens * self.heads))

    @property
    def exact_nbytes(self) -> int:
        """Bytes of a page of exact tokens."""
        return 2 * self.tokens * self.heads * self.head_dim * self.dtype.itemsize


class PackedPages:
    """The pages of one layer in an engine's memory.

    memory: the engine's view of it, blocks first; the bytes of a page are contiguous.
    """

    def __init__(self, layout: PageLayout, memory: Tensor) -> None:
        self.layout = layout
        blocks, stride = memory.shape[0], memory.stride(0) * memory.itemsize
        self.raw = memory.view(torch.uint8).as_strided((blocks, layout.nbytes), (stride, 1))
        """The bytes of each block's page, uint8 [blocks, nbytes]."""

        def tensor(piece: Piece) -> Tensor:
            part = self.raw[:, piece.begin : piece.end].view(piece.dtype)
            return (
                part.unflatten(1, piece.shape)
                if part.numel()
                else part.new_empty(blocks, *piece.shape)
            )

        self.tensors = [[tensor(piece) for piece in pieces] for pieces in layout.pieces]
        """Of keys and of values: exact tokens [blocks, H, N, D], or codes, scales and zeros."""
        self.sinks = tensor(layout.sinks)  # [blocks, 2, H, S, D]

    def write(self, blocks: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> None:
        """Pack whole pages k, v [n, H, N, D] into blocks int64 [n].

        numbers: int64 [n], of the pages in their requests; number 0 has the sinks. Raises
        `NotFinite` for numbers that the format cannot hold.
        """
        layout, count = self.layout, self.layout.plan.sinks
        formats = layout.plan.keys, layout.plan.values
        for x, layer_encoding, tensors, fmt in zip(
            (k, v), layout.encodings, self.tensors, formats, strict=True
        ):
            if layer_encoding is None or fmt is None:
                tensors[0][blocks] = x
                continue
            largest = float(x.abs().amax())
            if not largest <= fmt.max_abs:  # NaN too
                raise NotFinite(
                    f"a key or value of magnitude {largest:g} is above {fmt.max_abs:g}, the most "
                    f"that scales in {fmt.meta} hold; use a recipe with meta=bf16 or meta=fp32"
                )
            nonpadding = None
            if count and fmt.axis == "channel":  # sinks stay out of the range of their group
                nonpadding = torch.ones(len(blocks), 1, layout.tokens, dtype=torch.bool)
                nonpadding[numbers == 0, :, :count] = False
            packed = PackedTensors(*(t.new_empty(len(blocks), *t.shape[1:]) for t in tensors))
            angles = self._back(numbers) if fmt.pre_rope else None
            ops.pack(x, layer_encoding, packed, 0, nonpadding, angles)
            for stored, new in zip(tensors, packed, strict=True):
                stored[blocks] = new
        if count:
            self.sinks[blocks] = torch.stack([k[:, :, :count], v[:, :, :count]], dim=1)

    def whole(self, side: int) -> PackedView | None:
        """Return keys (0) or values (1) of all blocks as packed; None: they are exact."""
        if self.layout.encodings[side] is None:
            return None
        return self._view(side, self.tensors[side], torch.zeros(1, 1, 1, dtype=torch.long))

    def gathered(self, side: int, blocks: Tensor, numbers: Tensor) -> Tensor | PackedView:
        """Return keys (0) or values (1) of blocks int64 [n], exact [n, H, N, D] or packed.

        numbers: as in `write`.
        """
        tensors = [t[blocks] for t in self.tensors[side]]
        if self.layout.encodings[side] is None:
            return tensors[0]
        return self._view(side, tensors, (numbers * self.layout.tokens)[:, None, None])

    def _view(self, side: int, tensors: list[Tensor], begin: Tensor) -> PackedView:
        """Return a view of packed pages; begin: int64 [n or 1, 1, 1], of their first tokens."""
        layout, layer_encoding = self.layout, self.layout.encodings[side]
        assert layer_encoding is not None
        codes, scale, zero = tensors
        view = PackedView(codes, scale, zero, layer_encoding, 0, layout.tokens, layout.dtype)
        if not layer_encoding.encoding.pre_rope:
            return view
        return view._replace(rope=layout.plan.rope, positions=begin)

    def _back(self, numbers: Tensor) -> RopeAngles:
        """Return the angles by which keys of pages rotate back to position 0."""
        rope = self.layout.plan.rope
        assert rope is not None
        positions = numbers[:, None, None] * self.layout.tokens + torch.arange(self.layout.tokens)
        return RopeAngles(*rope.angles(-positions), rope.interleaved)
