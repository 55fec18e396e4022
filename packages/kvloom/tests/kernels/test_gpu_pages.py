"""Attention to pages of a pool by the Triton kernel, against the reference.

In Triton's interpreter: see `test_gpu_attend`. Nobody reads what lies outside of a row's tokens: it
is NaN, and the table names no blocks there.
"""

from __future__ import annotations

import pytest
import torch

import interpreter
from kv_views import page_table
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.reference import attend_regions
from kvloom.kernels.attend.regions import KVView, Paged, Region
from kvloom.kernels.attend.triton import paged
from kvloom.recipe import resolve
from kvloom.store import LayerEncoding
from kvloom.store.packed import PackedTokens

FP32, FP16 = torch.float32, torch.float16
needs_interpreter = pytest.mark.skipif(not interpreter.INTERPRETED, reason="run by the test below")
TOL = {FP32: 4e-6, FP16: 2e-3}  # fp16: a product's factors are rounded to it
HEADS, D, BLOCKS = 2, 64, 9


@pytest.mark.slow
@pytest.mark.skipif(interpreter.INTERPRETED, reason="this is the run")
def test_in_the_interpreter():
    interpreter.run(__file__)


def pool(fmt, page, dtype, seed, channels=None):
    """Return the blocks of a side, packed pages and exact tokens, between blocks of NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCKS, HEADS, page, D, generator=generator).to(dtype)
    layer_encoding = None if channels is None else LayerEncoding(fmt.encoding, HEADS, D, channels)
    tokens = PackedTokens(fmt, layer_encoding)
    tokens.append(x)
    tail = torch.full((2 * BLOCKS, HEADS, page, D), torch.nan, dtype=dtype)[::2]
    return KVView(tokens.view(), tail, fmt.encoding)


def rows(page, tokens, views):
    """Return a table of rows with so many tokens, and write their exact tokens, but the last."""
    table = page_table(page, tokens, BLOCKS)
    for i, count in enumerate((table.tokens - table.packed_tokens).tolist()):
        for view in views:
            view.tail[table.tails[i], :, : count - 1] = torch.randn(HEADS, count - 1, D)
    return table


def agrees(keys, values, page, tokens, dtype, *, heads=6, sinks=0):
    """The kernel's state is the reference's in fp32, and the new tokens are stored."""
    where, options = rows(page, tokens, (keys, values)), {}
    q = torch.randn(len(tokens), heads, 1, D).to(dtype)
    new = torch.randn(len(tokens), 2, HEADS, 1, D).to(dtype).unbind(1)
    if sinks:
        options["sinks"] = torch.randn(BLOCKS, 2, HEADS, sinks, D).to(dtype).unbind(1)
    full = [
        KVView(view.packed._replace(dtype=FP32), view.tail.float(), view.encoding)
        for view in (keys, values)
    ]
    exact = {name: [x.float() for x in pair] for name, pair in options.items()}
    pages = Paged(where, new=[x.float() for x in new], **exact)
    want = attend_regions(q.float(), [Region(*full, pages)], 0.125)
    before = dispatch.ran["attend", "gpu", ""]
    with dispatch.use("gpu"):
        found = ops.attend(q, [Region(keys, values, Paged(where, new=new, **options))], 0.125)
    assert dispatch.ran["attend", "gpu", ""] == before + 1
    torch.testing.assert_close(found.out, want.out, rtol=0, atol=TOL[dtype])
    torch.testing.assert_close(found.lse, want.lse, rtol=TOL[dtype], atol=TOL[dtype])
    for view, other in zip((keys, values), full, strict=True):
        torch.testing.assert_close(view.tail.float(), other.tail, rtol=0, atol=0, equal_nan=True)


def sides(recipe, page, dtype, channels=None):
    store = resolve(recipe).store
    formats = enumerate((store.keys, store.values))
    return [pool(fmt, page, dtype, i, channels) for i, fmt in formats]


def mixed(page):
    """Rows with no full page, some, the end of a page, and pages that a token has just filled."""
    return [3 * page + 1, 7, 2 * page, page + page // 2, page, 1]


@needs_interpreter
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(
    ("recipe", "page"),
    [("kivi", 128), ("kivi-4", 64), ("kivi:bits=3", 32), ("near-lossless", 128), ("rtn:bits=8", 48),
     ("kivi:bits=1.5", 160), ("turbo:bits=3", 32), ("kivi:meta=fp8", 64)],
)  # fmt: skip
def test_every_format(recipe, page, dtype):
    agrees(*sides(recipe, page, dtype), page, mixed(page), dtype)


@needs_interpreter
@pytest.mark.parametrize("sinks", [1, 5, 40, 64])
def test_exact_first_tokens(sinks):
    for recipe in ("kivi", "turbo:bits=3"):
        agrees(*sides(recipe, 64, FP32), 64, mixed(64), FP32, sinks=sinks)


@needs_interpreter
def test_channels_in_groups_across_heads():
    group_of = torch.cat([torch.arange(4), torch.randint(0, 4, (HEADS * D - 4,))])
    recipe = "skvq:pre_rope=false,clip=0.9,group=32"
    agrees(*sides(recipe, 32, FP32, group_of.view(HEADS, D)), 32, mixed(32), FP32)


@needs_interpreter
@pytest.mark.parametrize("heads", [2, 10, 36])
def test_any_number_of_query_heads(heads):
    agrees(*sides("kivi", 64, FP32), 64, mixed(64), FP32, heads=heads)


@needs_interpreter
@pytest.mark.parametrize("processors", [1, 4, 40])
def test_any_number_of_splits(processors, monkeypatch):
    monkeypatch.setattr(paged, "processors", lambda device: processors)
    agrees(*sides("turbo:bits=3", 64, FP32), 64, mixed(64), FP32, sinks=3)


@needs_interpreter
@pytest.mark.parametrize("tokens", [[5], [1, 1], [64, 1]])
def test_rows_without_a_full_page(tokens):
    agrees(*sides("kivi", 64, FP32), 64, tokens, FP32, sinks=3)


@needs_interpreter
def test_pages_beside_other_tokens():
    views = sides("kivi", 64, FP32)
    new = torch.randn(2, 2, HEADS, 1, D).unbind(1)
    where = Paged(rows(64, [130, 7], views), new=new)
    q, other = torch.randn(2, 6, 1, D), torch.randn(2, 2, HEADS, 9, D).unbind(1)
    for order in (1, -1):
        regions = [Region(*views, where), Region.exact(*other)][::order]
        want = attend_regions(q, regions, 0.125)
        with dispatch.use("gpu"):
            found = ops.attend(q, regions, 0.125)
        torch.testing.assert_close(found.out, want.out, rtol=0, atol=TOL[FP32])


def test_what_the_kernel_does_not_read():
    store, like = resolve("kivi").store, torch.empty(1, HEADS, 64, D)
    formats = {"keys": store.keys.encoding, "values": store.values.encoding}
    assert "2 queries" in " ".join(paged.problems(2, like, **formats))
    exact = paged.problems(1, like, **{**formats, "values": None})
    assert "values: pages of exact tokens" in " ".join(exact)
    before_rope = resolve("skvq").store.keys.encoding
    assert "pre_rope" in " ".join(paged.problems(1, like, **{**formats, "keys": before_rope}))


@needs_interpreter
def test_capped_logits_are_left_to_the_reference():
    keys, values = sides("kivi", 64, FP32)
    where = Paged(rows(64, [70, 7], (keys, values)))
    for view in (keys, values):
        view.tail.nan_to_num_()
    q = torch.randn(2, HEADS, 1, D)
    region = Region(keys, values, where)
    with dispatch.use("gpu"):
        assert "not capped" in ops.attend.choose(q, [region], 0.1, softcap=5.0).why
    capped, plain = (attend_regions(q, [region], 0.1, softcap=x).out for x in (0.01, None))
    assert not torch.allclose(capped, plain)
