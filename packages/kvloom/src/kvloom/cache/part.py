"""Stored tokens in a form that attention reads: parts, whose states merge exactly.

Decides how a step attends to a part: by a kernel that reads the tokens as they are stored, by
torch's fused attention if there is one exact part alone, else by the reference, part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend import reference
from ..kernels.attend.kv_view import KVView
from ..kernels.attend.ragged import Spans
from ..kernels.plan import OpPlan
from ..store.format_tokens import FormatView
from ..store.packed import PackedView
from .selection import Selection


class AttendPlans:
    """The attention operations bound by one layer: over whole, gathered and ragged parts."""

    def __init__(self) -> None:
        self.whole, self.gathered = OpPlan(ops.attend), OpPlan(ops.attend_gathered)
        self.ragged = OpPlan(ops.attend_ragged)


Stored = Tensor | PackedView | FormatView | KVView
"""Keys or values of a part: exact [B, Hk, N, D], packed, or packed with an exact tail."""


class Part(NamedTuple):
    """Tokens whose keys share one format and whose values share one format.

    The last `own` tokens are those of the step itself (0: all are in the past of all queries).
    visible: bool [B, 1 or Hk, N], None if no token is padding. bias: fp32 [B, Hq, N], added to the
    logits. selection: one query reads only these tokens, in this order. pieces:
    returns the same tokens as parts that the reference can read, where it cannot read this one.
    """

    keys: Stored
    values: Stored
    visible: Tensor | None
    own: int = 0
    bias: Tensor | None = None
    selection: Selection | None = None
    pieces: Callable[[], list[Part]] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that a step reads."""
        keys = self.keys
        if isinstance(keys, Tensor):
            return keys.shape[2]
        if isinstance(keys, PackedView | FormatView):
            return keys.hi - keys.lo
        return keys.tokens if self.selection is None else self.selection.tokens(keys.tokens)

    @property
    def exact(self) -> bool:
        """Whether keys and values are tensors as the model gave them."""
        return isinstance(self.keys, Tensor) and isinstance(self.values, Tensor)

    @property
    def exact_keys(self) -> Tensor:
        """The keys [B, Hk, N, D], unpacked where they are packed."""
        return _exact(self.keys)

    def attend(
        self, q: Tensor, scale: float, softcap: float | None, plans: AttendPlans | None = None
    ) -> reference.State:
        """Attend q [B, Hq, T, D] to this part; plans: as in `attend_stored`."""
        state = self.attend_stored(q, scale, softcap, plans=plans)
        if state is None and self.pieces is not None:
            return reference.merge([piece.attend(q, scale, softcap) for piece in self.pieces()])
        return state or reference.attend(
            q, self.exact_keys, _exact(self.values), scale,
            causal=self.own > 0, visible=self.visible, softcap=softcap, bias=self.bias,
        )  # fmt: skip

    def attend_stored(
        self,
        q: Tensor,
        scale: float,
        softcap: float | None,
        products: bool = False,
        plans: AttendPlans | None = None,
    ) -> reference.State | None:
        """Attend by a kernel that reads the tokens as they are stored; None if no kernel can.

        products: whether the kernel may return scale * q @ k too (see `ops.attend`). plans: the
        operations that a layer has bound (None: bind them for this call).
        """
        keys, values = self.keys, self.values
        if isinstance(keys, Tensor):
            keys = KVView(None, keys)
        if isinstance(values, Tensor):
            values = KVView(None, values)
        if not isinstance(keys, KVView) or not isinstance(values, KVView):
            ops.count_fallback(q, _format(self.keys), _format(self.values))
            return None
        if self.selection is not None:
            slots, begin, first = self.selection
            if plans is None:
                run = ops.attend_gathered.bind(q, keys, values, slots).run
            else:
                run = plans.gathered.bind(q, keys, values, slots)
            return run and run(
                q, keys, values, slots, begin, scale,
                first=first, visible=self.visible, softcap=softcap, bias=self.bias,
            )  # fmt: skip
        if plans is None:
            run = ops.attend.bind(q, keys, values).run
        else:
            run = plans.whole.bind(q, keys, values)
        return run and run(
            q, keys, values, scale, causal=self.own > 0, visible=self.visible, softcap=softcap,
            bias=self.bias, products=products,
        )  # fmt: skip


class RaggedPart(NamedTuple):
    """Tokens of the past of which heads have different numbers; always beside another part.

    keys, values: of all rows and heads, [1, 1, M, D]. visible: bool [B, Hk, spans.longest], None if
    no token is padding.
    """

    keys: KVView
    values: KVView
    spans: Spans
    visible: Tensor | None

    @property
    def tokens(self) -> float:
        """Tokens that a step reads of each row and head, on average."""
        return self.keys.tokens / (self.spans.bounds.numel() // 2)

    def attend(
        self, q: Tensor, scale: float, softcap: float | None, plans: AttendPlans | None = None
    ) -> reference.State:
        """Attend q [B, Hq, T, D] to this part; plans: as in `Part.attend_stored`."""
        run = ops.attend_ragged if plans is None else plans.ragged
        return run(
            q, self.keys, self.values, self.spans, scale, visible=self.visible, softcap=softcap
        )


def joined(stored: Sequence[Part | RaggedPart]) -> Sequence[Part | RaggedPart]:
    """Return exact parts as one, which torch's fused attention reads; others as they are."""
    parts = [part for part in stored if isinstance(part, Part) and part.exact]
    if len(parts) == 1 or len(parts) < len(stored):
        return stored
    keys, values = [_exact(part.keys) for part in parts], [_exact(part.values) for part in parts]
    heads = max(1 if part.visible is None else part.visible.shape[1] for part in parts)
    masks = [_mask(part, heads) for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    return [
        Part(
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            None if all(part.visible is None for part in parts) else torch.cat(masks, dim=2),
            parts[-1].own,
            torch.cat(biases, dim=2) if biases else None,
        )
    ]


def attend_parts(
    q: Tensor,
    parts: Sequence[Part | RaggedPart],
    scale: float,
    softcap: float | None,
    products: bool = False,
    plans: Sequence[AttendPlans] = (),
    tokens: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend q [B, Hq, T, D] to all parts and merge.

    products: as in `Part.attend_stored`. plans: those of the first parts, as in
    `Part.attend_stored`. tokens: of all parts (None: not counted yet). Returns [B, Hq, T, D] in
    q's dtype, and the products if a kernel returned them for a single part (else None).
    """
    only = parts[0]
    if (
        len(parts) == 1
        and isinstance(only, Part)
        and only.own < (only.tokens if tokens is None else tokens)  # it has tokens of the past
    ):
        state = only.attend_stored(q, scale, softcap, products, plans[0] if plans else None)
        if state is not None:
            out = state.out
            return out if out.dtype == q.dtype else out.to(q.dtype), state.products
        if only.pieces is not None:
            parts = only.pieces()
            only = parts[0]
    if len(parts) == 1 and isinstance(only, Part) and _fused(only, q.shape[2], softcap):
        assert isinstance(only.keys, Tensor)
        assert isinstance(only.values, Tensor)
        out = reference.sdpa(
            q, only.keys, only.values, scale,
            causal=only.own > 1, visible=only.visible, bias=only.bias,
        )  # fmt: skip
        return out, None
    planned = zip(parts, chain(plans, repeat(None)), strict=False)
    states = [part.attend(q, scale, softcap, plan) for part, plan in planned]
    return reference.merge(states).out.to(q.dtype), None


def _fused(part: Part, queries: int, softcap: float | None) -> bool:
    """Return whether torch's fused attention reads this part."""
    return softcap is None and (part.bias is None or queries == 1) and isinstance(part.keys, Tensor)


def _mask(part: Part, heads: int) -> Tensor:
    """Return the mask of an exact part, bool [B, heads, N]."""
    if part.visible is not None:
        return part.visible.expand(-1, heads, -1)
    keys = part.exact_keys
    return keys.new_ones(keys.shape[0], heads, keys.shape[2], dtype=torch.bool)


def _format(x: Stored) -> Any:
    if isinstance(x, PackedView):
        return x.layer.encoding
    return x.fmt if isinstance(x, FormatView) else None if isinstance(x, Tensor) else x.encoding


def _exact(x: Stored) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()
