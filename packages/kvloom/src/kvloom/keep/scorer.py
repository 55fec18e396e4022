"""What a score is called with, and the base class of scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend.reference import AttentionState, attend_exact
from ..kernels.score.noise import Noise
from ..positions.rope import Rope
from .select import first_tokens


@dataclass
class Step:
    """The input of a score: T new queries and the N exact tokens that they attended to.

    The first six fields are required. Set the others only if the score reads them.

    Attributes:
        q: [B, Hq, T, D] in the model's dtype, rotated as the model rotates them: of the last T
            tokens.
        k: [B, Hk, N, D] in the model's dtype.
        v: [B, Hk, N, D] in the model's dtype.
        scale: Factor on q . k.
        index: int32 or int64 [B or 1, Hk or 1, N], the tokens' positions in the sequence.
        seen: The length of the sequence so far.
        number: Counts decode steps; 0 for the prompt.
        seed: Differs from layer to layer.
        query_heads: How their scores become that of the key/value head: "sum", "mean" or "max".
        sinks: How many first tokens of each row are sinks (`Protect.sinks`), without padding.
        softcap: Cap of the logits; None: they are not capped.
        visible: bool [B, 1 or Hk, N], False for padding; None: there is no padding.
        visible_queries: bool [B, 1, T], the same of the queries' own tokens.
        bias: fp32 [B, Hq, N], added to the logits (ALiBi).
        products: scale * q @ k, where attention has computed it already (`kernels.score`).
        lse: fp32 [B, Hq, T], the log-sum-exp of each query's logits, where attention has computed
            it already: of a prompt.
        repeated: [B, Hq, T, D], what the queries would be in a repetition, where it is predicted.
        rope: The model's rotary embedding, for scores that need it; None: the model has none.
        ids: int64 [B, N], token ids, for scores with `reads_ids`.
        head: The model's number of the first key/value head, where this process has a part of them.
        norms: fp32 [B, T], the norm of the layer's input at each query, for scores with
            `uses_input_norms`; None where the model does not give it.
        later_seen: int64 [B, T], how many later tokens each query sees, as in an image; None: none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    index: Tensor
    seen: int
    number: int = 0
    seed: int = 0
    query_heads: str = "sum"
    sinks: int = 0
    softcap: float | None = None
    visible: Tensor | None = None
    visible_queries: Tensor | None = None
    bias: Tensor | None = None
    products: Tensor | None = None
    lse: Tensor | None = None
    repeated: Tensor | None = None
    rope: Rope | None = None
    ids: Tensor | None = None
    head: int = 0
    norms: Tensor | None = None
    later_seen: Tensor | None = None

    def rows_alike(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows with equal padding, and the slots of their tokens."""
        tokens = torch.arange(self.k.shape[2], device=self.k.device)
        if self.visible is None:
            yield slice(None), tokens
            return
        for row in range(len(self.k)):
            yield slice(row, row + 1), tokens[self.visible[row, 0]]

    @property
    def sink_mask(self) -> Tensor:
        """Which tokens are sinks, bool [B or 1, 1 or Hk, N]."""
        if self.visible is None:
            return self.index < self.sinks
        shape = torch.broadcast_shapes(self.visible.shape, self.index.shape)
        order = self.index.expand(shape).argsort(dim=-1)  # slots are not ordered by position
        visible = self.visible.expand(shape).gather(-1, order)
        first = first_tokens(shape[-1], self.sinks, visible, visible.device)
        return torch.zeros_like(first).scatter(-1, order, first)

    def mass(
        self,
        rows: int | None = None,
        noise: Noise | None = None,
        tau: float = 1.0,
        reduce_max: bool = False,
        other_lse: Tensor | None = None,
    ) -> Tensor:
        """Return the attention mass of each token, fp32 [B, Hk, N].

        Args:
            rows: The last queries to count; None: all.
            noise: Added to the logits (Keyformer).
            tau: Temperature of the logits (Keyformer).
            reduce_max: The largest weight of any query takes the place of their sum.
            other_lse: fp32 [B, Hq, T], the log-sum-exp of the logits of other tokens, which take
                their part of each query's weights. Queries then see all tokens of the step.
        """
        t = self.q.shape[2]
        skip = 0 if rows is None else max(0, t - rows)
        b, hk, n = self.k.shape[0], self.k.shape[1], self.k.shape[2]
        options: dict[str, Any] = {
            "visible": self.visible,
            "visible_queries": None
            if self.visible_queries is None
            else self.visible_queries[:, :, skip:],
            "softcap": self.softcap,
            "bias": self.bias,
            "noise": noise,
            "tau": tau,
        }
        if self.products is not None and not skip and not reduce_max and other_lse is None:
            mass = ops.step_mass(self.products, n, hk, **options)
        else:
            later_seen = None if self.later_seen is None else self.later_seen[:, skip:]
            options |= {"reduce_max": reduce_max, "other_lse": other_lse}
            options["later_seen"] = _if_any(later_seen)
            mass = ops.column_mass(self.q[:, :, skip:], self.k, self.scale, **options)
        return self.join_query_heads(mass.view(b, hk, -1, n))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, causal: bool = False
    ) -> AttentionState:
        """Attend q [B, Hq, T, D] to k, v [B, Hk, N, D], with the scale and softcap of the step.

        visible: bool [B, 1 or Hk, N]. causal: The queries are the last T of the N tokens. Returns
        out [B, Hq, T, D], in q's dtype or fp32, and lse [B, Hq, T].
        """
        options: dict[str, Any] = {"causal": causal, "visible": visible}
        if self.softcap is None:
            return ops.attend_prompt(q, k, v, self.scale, **options)
        return attend_exact(q, k, v, self.scale, softcap=self.softcap, **options)

    def join_query_heads(self, heads: Tensor) -> Tensor:
        """Join numbers of query heads [B, Hk, R, N] as `query_heads` states: [B, Hk, N]."""
        if self.query_heads == "max":
            return heads.amax(dim=2)
        return heads.sum(dim=2) if self.query_heads == "sum" else heads.mean(dim=2)

    def noise(self, kind: str, fixed: bool) -> Noise:
        """Noise for these queries and keys; fixed: one number a key, whatever the query."""
        first = self.seen - self.q.shape[2]
        return Noise(kind, self.seed, self.index, first, fixed, self.head)


def _if_any(later_seen: Tensor | None) -> Tensor | None:
    """Return `Step.later_seen` if it is not 0: no kernel covers it."""
    return later_seen if later_seen is not None and bool(later_seen.any()) else None


@dataclass(frozen=True)
class Scorer:
    """Base class of scores; derive a frozen dataclass whose fields are the score's options.

    Define `__call__` and `kind`, `join` for a score that remembers earlier steps, and the other
    attributes where the default is wrong. Most scores need `sums_attention` alone.

    Attributes:
        kind: The name in recipes.
        sums_attention: Whether it sums up the attention of a step's queries: `Step.mass`, but not
            the largest weights.
        repeats: Whether the model repeats the prompt for it; such scores derive from
            `Reconstruction`.
        needs_rope: Whether the score needs the model's rotary embedding, `Step.rope`.
        rotates_queries: Whether it needs `Step.rope` only to move queries by equal distances,
            whatever their positions. It then reads images with positions on several axes, and
            `without_rotation` takes its place where kvloom cannot rotate queries.
        of_prompt: Whether it needs the queries of a whole prompt, and cannot score later steps.
        supports_alibi: Whether it can score a model with ALiBi.
        reads_ids: Whether it needs `Step.ids`; such a score is a rule for outliers.
    """

    kind: ClassVar[str] = ""
    sums_attention: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    needs_rope: ClassVar[bool] = False
    rotates_queries: ClassVar[bool] = False
    of_prompt: ClassVar[bool] = False
    supports_alibi: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = False

    @property
    def uses_input_norms(self) -> bool:
        """Whether it reads `Step.norms`."""
        return False

    @property
    def without_rotation(self) -> Scorer:
        """The score for models whose queries cannot be rotated; itself, if there is no other."""
        return self

    def __call__(self, step: Step) -> Tensor:
        """Return the score of every token, fp32 [B, Hk, N], finite or infinite but not NaN."""
        raise NotImplementedError

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """Combine the scores before a step with the step's own, both fp32 [B, Hk, N].

        The default forgets the former scores.
        """
        return new
