"""A layer's pages and its attention, without an engine, against the reference."""

import pytest
import torch

from kvloom.kernels import dispatch
from kvloom.kernels.attend.reference import attend_exact
from kvloom.paged import (
    LayerPlan,
    PackedPages,
    PagedAttention,
    PagedRow,
    PagedStep,
    PageLayout,
    packed_by_page,
)
from kvloom.positions.rope import Rope
from kvloom.store.packed import PackedTokens
from sampling import slow_except

HEADS, QUERIES, D, PAGE, BLOCKS = 2, 6, 64, 128, 16
RECIPES = [
    "kivi", "kivi:bits=3", "kivi-4", "kivi:bits=8", "kivi-4:rotate=true", "kivi-4:sinks=5",
    "rtn:bits=4", "turbo:bits=4", "turbo:bits=2,sinks=3", "near-lossless", "balanced",
    "kivi:meta=fp8", "skvq:reorder=false,clip=1.0,group=32",
]  # fmt: skip
ROPE = Rope(500.0 ** -(torch.arange(D // 2) / (D // 2)))


def layer(recipe, dtype=torch.float32):
    """Return a layer's attention over memory in which every unwritten number is NaN."""
    found = packed_by_page(recipe, PAGE, "an engine", "page=")
    layout = PageLayout(LayerPlan.of_recipe(found, rope=ROPE), PAGE, HEADS, D, dtype)
    content = layout.bytes_per_token_and_head
    page, others = PAGE * HEADS * content, 4096  # pages of another layer lie between
    memory = torch.full((BLOCKS, page + others), 255, dtype=torch.uint8)
    view = memory[:, :page].unflatten(1, (HEADS, PAGE, content))
    tail = torch.full((BLOCKS, HEADS, PAGE, 2 * D), torch.nan, dtype=dtype)
    return PagedAttention(PackedPages(layout, view), tail, D**-0.5)


class Request:
    """One request's blocks, and all of its keys and values so far."""

    def __init__(self, seed, tokens, tail, blocks):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.v = torch.randn(2, tokens, HEADS, D, generator=generator).unbind()
        self.q = torch.randn(tokens, QUERIES, D, generator=generator)
        self.tail, self.blocks, self.seen = tail, torch.tensor(blocks), 0

    def row(self, at, begin, new):
        start, self.seen = self.seen, self.seen + new
        pages = -(-self.seen // PAGE)
        return PagedRow(at, begin, begin + new, start, self.seen, self.blocks[:pages])


def step(attention, requests, counts):
    """Run one step of an engine: `counts` new tokens of each request; return outputs by request."""
    rows, begin, parts = [], 0, []
    for at, (one, new) in enumerate(zip(requests, counts, strict=True)):
        parts.append(slice(one.seen, one.seen + new))
        rows.append(one.row(at, begin, new))
        begin += new
    q, k, v = (
        torch.cat([getattr(one, name)[part] for one, part in zip(requests, parts, strict=True)])
        for name in "qkv"
    )
    tails, out = torch.tensor([one.tail for one in requests]), torch.empty_like(q)
    attention.run(PagedStep(rows, PAGE), tails, q, k, v, out)
    return [out[row.batch_begin : row.batch_end] for row in rows]


def expected(attention, one, new):
    """Return what a request's newest tokens see: earlier pages unpacked, all else exact."""
    begin = one.seen - new
    sides = []
    plan = attention.pages.layout.plan
    for x, fmt in ((one.k, plan.keys), (one.v, plan.values)):
        x = x[: one.seen].transpose(0, 1)[None].clone()
        packed = begin // PAGE * PAGE
        if packed and fmt is not None:
            live = torch.ones(1, 1, packed, dtype=torch.bool)
            live[:, :, : attention.sinks] = False
            tokens, at = PackedTokens(fmt, rope=ROPE), torch.arange(packed)[None, None]
            tokens.append(x[:, :, :packed], live if attention.sinks else None, at)
            stored = tokens.view(positions=at).tensor()
            x[:, :, attention.sinks : packed] = stored[:, :, attention.sinks :]
        sides.append(x)
    q = one.q[begin : one.seen].transpose(0, 1)[None]
    return attend_exact(q, *sides, D**-0.5, causal=True).out[0].transpose(0, 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_without_a_kernel_for_pages(recipe):
    """A format that no kernel reads by a table of pages is read page by page."""
    check(layer(recipe))


@pytest.mark.parametrize("recipe", slow_except(RECIPES, "near-lossless"))
def test_steps_of_several_requests(recipe):
    """Prompts, chunks and single tokens, in one step and across the ends of pages."""
    attention = layer(recipe)
    before = dispatch.ran["attend", "cpu", ""]
    with dispatch.use("auto"):
        check(attention)
    assert dispatch.ran["attend", "cpu", ""] > before


def check(attention):
    requests = [
        Request(1, 400, 10, [3, 0, 7, 5]),
        Request(2, 300, 11, [1, 2, 8]),
        Request(3, 140, 12, [4, 6]),
    ]
    for counts in [
        (253, 127, 3),
        (2, 1, 1),
        (1, 1, 1),
        (1, 130, 1),
        (1, 1, 60),
        (1, 1, 61),
        (9, 1, 1),
    ]:
        found = step(attention, requests, counts)
        for one, mine, new in zip(requests, found, counts, strict=True):
            want = expected(attention, one, new)
            torch.testing.assert_close(mine, want, atol=2e-5, rtol=2e-5)


def test_a_request_reads_pages_that_another_fills_in_the_same_step():
    attention = layer("kivi-4")
    one, two = Request(1, 200, 10, [3, 0]), Request(1, 200, 11, [3, 5])
    two.seen = PAGE  # it shares block 3
    mine = step(attention, [one, two], (140, 20))[1]
    torch.testing.assert_close(mine, expected(attention, two, 20), atol=2e-5, rtol=2e-5)


def test_numbers_that_a_format_cannot_hold_are_refused():
    attention = layer("kivi")
    one = Request(1, 200, 10, [3, 0])
    one.k[5, 0, 3] = torch.inf
    with pytest.raises(ValueError, match="inf"):
        step(attention, [one], (200,))


def test_a_page_has_the_bytes_of_its_formats():
    for recipe in RECIPES:
        layout = layer(recipe).pages.layout
        plan = layout.plan
        packed = sum(fmt.nbytes(PAGE, D, HEADS) for fmt in (plan.keys, plan.values))
        sinks = 2 * plan.sinks * HEADS * D * 4
        assert layout.nbytes == packed + sinks, recipe
        assert 0 <= layout.bytes_per_token_and_head * PAGE * HEADS - layout.nbytes < PAGE * HEADS
