"""What an engine prints when it starts: what a page holds, and how many tokens fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.paged import PageLayout
from kvloom.recipe import listed


def lines(recipe: str, layouts: Mapping[int, PageLayout], blocks: int, block: int) -> list[str]:
    """Return the lines of the report.

    recipe: as spelled. layouts: by number of the layer. blocks: in vLLM's pool. block: the bytes of
    one, all layers together.
    """
    first = next(iter(layouts.values()))
    page = first.tokens
    packed = [layer_index for layer_index, layout in layouts.items() if any(layout.encodings)]
    exact = [layer_index for layer_index in layouts if layer_index not in packed]
    plain = sum(layout.exact_nbytes for layout in layouts.values())
    fits, before = blocks * page, blocks * block / plain * page
    times = f"{plain / block:.2f}×"
    tails = tail_blocks(list(layouts.values()), block)
    report = [
        f"kvloom {recipe}: layers {listed(sorted(packed))} are packed"
        + (f", layers {listed(sorted(exact))} exact" if exact else ""),
        f"kvloom: a page of {page} tokens takes {block:,} bytes in all layers instead of {plain:,}",
        f"kvloom: {fits:,} tokens fit instead of {before:,.0f} ({times}); of these, each "
        f"running request takes {tails * page:,} for the exact tokens of its last page",
    ]
    sinks = max(layout.plan.sinks for layout in layouts.values())
    if sinks:
        share = sum(layout.sinks.end - layout.sinks.begin for layout in layouts.values()) / block
        report.append(
            f"kvloom: room for {sinks} exact first tokens takes {share:.0%} of every page; "
            "sinks=0 leaves it out"
        )
    return report


def tail_blocks(layouts: Sequence[PageLayout], block: int) -> int:
    """Return the blocks that the tails of one request take, `block` bytes each."""
    layers_per_block = max(1, block // max(layout.exact_nbytes for layout in layouts))
    return -(-len(layouts) // layers_per_block)
