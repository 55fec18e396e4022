"""Attention of many queries to stored tokens on CPU tensors: later turns, and chunks of a prompt.

Decides the parts: packed tokens are unpacked `TILE` at a time, so that the past is never unpacked
as a whole. `attend_prompt` attends to each part; it returns the log-sum-exp, by which parts are
merged.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....encoding import Encoding
from ...limits import DTYPES, Coverage
from ..prompt import attend_tokens
from ..reference import AttentionState, attend_region, merge, with_sinks
from ..regions import Region, Spans

TILE = 1024
"""Tokens that are unpacked at once."""


def _other_dtypes(q: Tensor, region: Region, softcap: float | None) -> str | None:
    dtypes = {q.dtype, region.keys.exact.dtype, region.values.exact.dtype}
    if len(dtypes) == 1 and q.dtype in DTYPES:
        return None
    return f"queries, keys and values are {', '.join(sorted(map(str, dtypes)))}"


def _other_addressing(q: Tensor, region: Region, softcap: float | None) -> str | None:
    if region.where is None or isinstance(region.where, Spans):
        return None
    return f"{q.shape[2]} queries a step are not one"


def _other_formats(q: Tensor, region: Region, softcap: float | None) -> str | None:
    if all(isinstance(side.encoding, Encoding | None) for side in (region.keys, region.values)):
        return None
    return "tokens are packed in a format of another distribution"


COVERAGE = Coverage(
    ("queries, keys and values all in fp32, fp16 or bf16", _other_dtypes),
    ("dense tokens and `Spans`", _other_addressing),
    ("any encoding", _other_formats),
    ("no bias", lambda q, region, _: None if region.bias is None else "logits have a bias"),
    ("no softcap", lambda q, region, softcap: None if softcap is None else "logits are capped"),
)


def problems(q: Tensor, regions: Sequence[Region], softcap: float | None) -> list[str]:
    """Return why q [B, Hq, T, D] does not attend to these regions here; empty if it does."""
    reasons = [reason for region in regions for reason in COVERAGE.problems(q, region, softcap)]
    return list(dict.fromkeys(reasons))


def attend(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    *,
    softcap: float | None = None,
    products: bool = False,
    sink_logits: Tensor | None = None,
) -> AttentionState:
    """Attend as `reference.attend_regions` does; each part is rounded to q's dtype."""
    assert softcap is None
    state = merge([attend_region(q, region, scale, attend_tokens, TILE) for region in regions])
    return state if sink_logits is None else with_sinks(state, sink_logits)
