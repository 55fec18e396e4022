"""Attention to pages of a pool by the compiled kernel, against the reference."""

import pytest
import torch

from kv_views import page_table
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.reference import attend_regions
from kvloom.kernels.attend.regions import KVView, Paged, Region
from kvloom.positions.rope import Rope
from kvloom.recipe import resolve
from kvloom.store.packed import PackedTokens
from sampling import slow_except

HEADS, D, BLOCKS = 2, 64, 9
ROPE = Rope(500.0 ** -(torch.arange(D // 2) / (D // 2)))


def pool(fmt, page, dtype, generator):
    """Return all blocks of a side: each is a packed page, and exact tokens."""
    x = torch.randn(BLOCKS, HEADS, page, D, generator=generator).to(dtype)
    tokens, begin = PackedTokens(fmt, rope=ROPE), torch.zeros(1, 1, 1, dtype=torch.long)
    tokens.append(x, positions=begin + torch.arange(page))
    return KVView(
        tokens.view(positions=begin),
        torch.randn(x.shape, generator=generator).to(dtype),
        fmt.encoding,
    )


RAW_KEYS = "skvq:reorder=false,clip=1.0,group=32"  # before RoPE
PAGES = {
    "kivi": 128, "near-lossless": 256, "balanced": 128, "rtn:bits=8": 128, RAW_KEYS: 128,
}  # fmt: skip


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = {f"{recipe}, {dtype}": (recipe, DTYPES[dtype]) for recipe in PAGES for dtype in DTYPES}


@pytest.mark.parametrize("sinks", [0, 5, 200])
# Keys by channel, and by token; a kernel for each dtype.
@pytest.mark.parametrize("case", slow_except(CASES, "near-lossless, bf16", f"{RAW_KEYS}, fp32"))
def test_pages(case, sinks):
    recipe, dtype = case
    page = PAGES[recipe]
    store, generator = resolve(recipe).store, torch.Generator().manual_seed(0)
    keys, values = (pool(fmt, page, dtype, generator) for fmt in (store.keys, store.values))
    tokens = [3 * page + 1, 7, 2 * page, page + 60, page]
    where, options = page_table(page, tokens, BLOCKS), {}
    q = torch.randn(5, 6, 1, D, generator=generator)
    if sinks:
        exact = torch.randn(BLOCKS, 2, HEADS, min(sinks, page), D, generator=generator)
        options["sinks"] = exact.to(dtype).unbind(1)
        new = torch.randn(5, 2, HEADS, 1, D, generator=generator).to(dtype)
        options["new"] = new.unbind(1)
    copies = [view._replace(exact=view.exact.clone()) for view in (keys, values)]
    before = dispatch.ran["attend", "cpu", ""]
    with dispatch.use("auto"):
        found = ops.attend(q, [Region(keys, values, Paged(where, **options))], 0.125)
    assert dispatch.ran["attend", "cpu", ""] == before + 1
    want = attend_regions(q, [Region(*copies, Paged(where, **options))], 0.125)
    bound = 5e-6 if dtype == torch.float32 else 2e-2  # the reference rounds unpacked tokens
    torch.testing.assert_close(found.out, want.out, atol=bound, rtol=bound)
    torch.testing.assert_close(found.lse, want.lse, atol=bound, rtol=bound)
    for mine, copy in zip((keys, values), copies, strict=True):  # the new tokens, nothing else
        torch.testing.assert_close(mine.tail, copy.tail, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("recipe", "page", "why"),
    [("kivi", 96, "96 tokens"), ("kivi:bits=1.5", 160, "1.5 bit"), ("turbo:bits=8", 128, "8 bit")],
)
def test_what_the_kernel_does_not_read(recipe, page, why):
    store, generator = resolve(recipe).store, torch.Generator().manual_seed(0)
    keys, values = (pool(fmt, page, torch.float32, generator) for fmt in (store.keys, store.values))
    q = torch.randn(1, 6, 1, D, generator=generator)
    where = page_table(page, [7], BLOCKS)
    with dispatch.use("auto"):
        assert why in ops.attend.choose(q, [Region(keys, values, Paged(where))]).why
