"""What an engine prints when it starts: what a page holds, and how many tokens fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.recipe.layers import listed

from .page import PageLayout


def lines(recipe: str, layouts: Mapping[int, PageLayout], blocks: int, block: int) -> list[str]:
    """Return the lines of the report.

    recipe: as spelled. layouts: by number of the layer. blocks: in vLLM's pool. block: the bytes of
    one, all layers together.
    """
    some = next(iter(layouts.values()))
    page = some.tokens
    packed = [number for number, one in layouts.items() if any(one.encodings)]
    exact = [number for number in layouts if number not in packed]
    plain = sum(one.exact_nbytes for one in layouts.values())
    fits, before = blocks * page, blocks * block // plain * page
    tails = tail_blocks(list(layouts.values()), block)
    found = [
        f"kvloom {recipe}: layers {listed(sorted(packed))} are packed"
        + (f", layers {listed(sorted(exact))} exact" if exact else ""),
        f"kvloom: a page of {page} tokens takes {block:,} bytes in all layers instead of {plain:,}",
        f"kvloom: {fits:,} tokens fit instead of {before:,} ({fits / before:.2f}×); of these, each "
        f"running request takes {tails * page:,} for the exact tokens of its last page",
    ]
    sinks = max(one.plan.sinks for one in layouts.values())
    if sinks:
        share = sum(one.sinks.end - one.sinks.begin for one in layouts.values()) / block
        found.append(
            f"kvloom: room for {sinks} exact first tokens takes {share:.0%} of every page; "
            "sinks=0 leaves it out"
        )
    return found


def tail_blocks(layouts: Sequence[PageLayout], block: int) -> int:
    """Return the blocks that the tails of one request take, `block` bytes each."""
    together = max(1, block // max(one.exact_nbytes for one in layouts))
    return -(-len(layouts) // together)
