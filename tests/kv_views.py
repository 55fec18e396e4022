"""What tests of compiled attention share: formats, views of packed and exact tokens, the check.

The loops of `naive` get what the kernel gets, unpacked to fp32.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

import naive
from kvloom.kernels import ops
from kvloom.kernels.attend.cpu import attend as cpu
from kvloom.kernels.attend.regions import KVView, PageTable, Region, Slots, Spans
from kvloom.positions.rope import Rope
from kvloom.store import LayerEncoding, Packed
from kvloom.store.packed import PackedTokens

FP32 = torch.float32
TOL = 2e-6  # the reference's

cpu_attend = ops.attend.backends["cpu"].run


def page_table(page, tokens, blocks):
    """Return rows with so many tokens in any blocks; the rest of the table names no blocks."""
    tokens = torch.tensor(tokens)
    packed = (tokens - 1).clamp(min=0) // page * page
    table = torch.full((len(tokens), 4), 1 << 40)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3))
    for i, count in enumerate((packed // page).tolist()):
        table[i, :count] = order.roll(i)[:count]
    tails = torch.arange(len(tokens)) + 2
    return PageTable(table, packed, tokens, tails, page, int(tokens.max()))


def channel(bits, group, meta="fp16", pre_rope=False, **fields):
    return Packed(bits, "channel", group, meta, residual=group, pre_rope=pre_rope, **fields)


def token(bits, group, meta="fp16"):
    return Packed(bits, "token", group, meta)


def mapped(bits, group, meta="fp16", pre_rope=False, **fields):
    return Packed(bits, "token", group, meta, pre_rope=pre_rope, **fields)


def draw(shape, seed, dtype=FP32):
    """Random numbers with NaN before, behind and between, channels side by side."""
    b, h, n, d = shape
    x = torch.full((b, h + 1, n + 3, d), torch.nan, dtype=dtype)
    x[:, :h, 1 : n + 1] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x[:, :h, 1 : n + 1]


def known(fmt, hk, d, layer=0):
    """What calibration might say of a layer."""
    if not fmt.regroups:
        return None
    g, count = torch.Generator().manual_seed(d + layer), fmt.groups(hk, d)
    group_of = fmt.consecutive(hk, d)
    if fmt.reorder:
        heads = hk if fmt.span == "head" else 1  # that have groups of their own
        own, channels = count // heads, hk * d // heads
        of = [torch.randint(own, (channels,), generator=g) for _ in range(heads)]
        for i, its in enumerate(of):
            its[torch.randperm(channels, generator=g)[:own]] = torch.arange(own)  # none is empty
            its += i * own
        group_of = torch.cat(of).view(hk, d)
    spread = 0.5 + torch.rand(count, generator=g)
    return LayerEncoding(
        fmt.encoding,
        hk,
        d,
        group_of,
        0.8 + 0.2 * torch.rand(count, generator=g),
        0.5 + torch.rand(hk, d, generator=g) if fmt.smooth else None,
        -2 * spread,
        3 * spread,
    )


def rope(fmt, d):
    """The keys' rotary embedding: whole, or some channels of each head in pairs side by side."""
    if not fmt.pre_rope:
        return None
    dims = d if fmt.axis == "token" else d - 34
    return Rope(10000.0 ** -(torch.arange(0, dims, 2) / dims), interleaved=fmt.axis == "channel")


def kv_view(fmt, packed_end, n, b, hk, d, dtype, seed):
    """A view of n tokens of which about `packed_end` are packed, and all of them in fp32."""
    x = draw((b, hk, n, d), seed, dtype)
    if fmt is None:
        return KVView(None, x), x.float()
    packed_end = min(packed_end, n)
    packed_end -= packed_end % fmt.tokens_per_scale
    if not packed_end:
        return KVView(None, x, fmt.encoding), x.float()
    held = PackedTokens(fmt, known(fmt, hk, d), rope(fmt, d))
    at = torch.tensor([0, -3, 70_000])[:b, None, None]  # where the rows begin
    for lo, hi in itertools.pairwise(sorted({0, packed_end // 2 // 128 * 128, packed_end})):
        held.append(x[:, :, lo:hi], positions=at + torch.arange(lo, hi))
    view = held.view(positions=at if fmt.pre_rope else None)
    exact = torch.cat([view._replace(dtype=FP32).tensor(), x[:, :, packed_end:].float()], dim=2)
    return KVView(view, x[:, :, packed_end:], fmt.encoding), exact


def spans(counts):
    """Return spans of rows of heads with so many tokens, one after the other."""
    return Spans.of(torch.as_tensor(counts))


def span_view(fmt, tokens, d, dtype, seed):
    """Return the view of all heads' tokens, and these as they are read, in fp32."""
    x = torch.randn(1, 1, tokens, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if fmt is None:
        return KVView(None, x), x.float()
    packed = PackedTokens(fmt)
    packed.append(x)
    view = packed.view()
    return KVView(view, x[:, :, :0], fmt.encoding), view._replace(dtype=FP32).tensor()


def region(keys, values, t=1, *, causal=False, visible=None, softcap=None, bias=None):
    """All tokens of two views, of which the last t are the step's, if it is causal."""
    return Region(keys, values, None, visible, bias, t if causal else 0)


def chosen(keys, values, slots, begin, lead=None, *, visible=None, softcap=None, bias=None):
    """Exact tokens, those at slots and all from `begin` on; masks in this order."""
    first = 0 if lead is None else lead[0].shape[2]
    masks = [None if x is None else x[..., first:] for x in (visible, bias)]
    regions = [Region(keys, values, Slots(slots, begin), *masks)]
    if lead is not None:
        before = {"visible": visible, "bias": bias}
        before = {name: None if x is None else x[..., :first] for name, x in before.items()}
        regions.insert(0, Region.exact(*lead, **before))
    return regions


def attend(q, keys, values, scale, by=cpu_attend, **options):
    """Attention to all tokens of two views, by the kernel."""
    regions = [region(keys, values, q.shape[2], **options)]
    return by(q, regions, scale, softcap=options.get("softcap"))


def attend_chosen(q, keys, values, slots, begin, scale, first=None, by=cpu_attend, **options):
    """Attention to chosen tokens of two views, by the kernel."""
    regions = chosen(keys, values, slots, begin, first, **options)
    return by(q, regions, scale, softcap=options.get("softcap"))


def problems(tokens, like, keys=None, values=None, where=None, by=cpu.problems):
    """Why no kernel attends so many queries to tokens like these, in two encodings."""
    q = like.new_empty(*like.shape[:2], tokens, like.shape[3])
    return by(q, [Region(KVView(None, like, keys), KVView(None, like, values), where)])


def agrees(form, hq, hk, t, n, packed_end, b=2, seed=0, **options):
    """The kernel's state is the naive formula's."""
    kfmt, vfmt, d, dtype = form
    q = draw((b, hq, t, d), seed, dtype)
    keys, k = kv_view(kfmt, packed_end[0], n, b, hk, d, dtype, seed + 1)
    values, v = kv_view(vfmt, packed_end[1], n, b, hk, d, dtype, seed + 2)
    sinks, softcap = options.pop("sinks", None), options.get("softcap")
    regions = [region(keys, values, t, **options)]
    assert not cpu.problems(q, regions)
    got = cpu_attend(q, regions, 0.125, softcap=softcap, sink_logits=sinks)
    options["sinks"] = sinks
    options = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = naive.attention(*(x.double().numpy() for x in (q, k, v)), 0.125, **options)
    assert got.out.dtype == got.lse.dtype == FP32
    np.testing.assert_allclose(got.out.double().numpy(), out, rtol=0, atol=TOL)
    np.testing.assert_allclose(got.lse.double().numpy(), lse, rtol=TOL, atol=TOL)


def _with_gaps(keys, b, hk, seed):
    """The same codes, each at a position of its own, and what the keys are then."""
    step = torch.randint(
        1, 9, (b, hk, keys.packed.hi), generator=torch.Generator().manual_seed(seed)
    )
    packed = keys.packed._replace(positions=step.cumsum(dim=2) - 3)
    k = torch.cat([packed._replace(dtype=FP32).tensor(), keys.tail.float()], dim=2)
    return keys._replace(packed=packed), k


def chosen_agree(
    form, heads, n, m, begin, first=0, packed_end=None, b=2, seed=0, gaps=False, **options
):
    """The kernel's state over chosen tokens is the naive formula's over the listed ones.

    heads: Hq, Hk and how many choose. m of the first `begin` tokens are chosen, and all from there
    on; first: so many exact ones stand before them; gaps: between the tokens of each head.
    """
    kfmt, vfmt, d, dtype = form
    hq, hk, h = heads
    packed_end = (n, n) if packed_end is None else packed_end
    q = draw((b, hq, 1, d), seed, dtype)
    keys, k = kv_view(kfmt, packed_end[0], n, b, hk, d, dtype, seed + 1)
    values, v = kv_view(vfmt, packed_end[1], n, b, hk, d, dtype, seed + 2)
    if gaps and keys.packed is not None:
        keys, k = _with_gaps(keys, b, hk, seed)
    lead = tuple(draw((b, hk, first, d), seed + i, dtype) for i in (3, 4)) if first else None
    g = torch.Generator().manual_seed(seed)
    slots = torch.rand(b, h, max(begin, 1), generator=g).argsort(dim=-1)[..., :m]
    sinks = options.pop("sinks", None)
    regions = chosen(keys, values, slots, begin, lead, **options)
    assert not cpu.problems(q, regions)
    got = cpu_attend(q, regions, 0.125, softcap=options.get("softcap"), sink_logits=sinks)
    options["sinks"] = sinks
    listed = []
    for x, before in ((k, 0), (v, 1)):
        each = x.repeat_interleave(h // hk, dim=1)
        at = torch.cat([slots, torch.arange(begin, n).expand(b, h, -1)], dim=2)
        each = each.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, d))
        if lead is not None:
            each = torch.cat([lead[before].float().repeat_interleave(h // hk, dim=1), each], dim=2)
        listed.append(each.double().numpy())
    plain = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = naive.attention(q.double().numpy(), *listed, 0.125, **plain)
    assert got.out.dtype == got.lse.dtype == FP32
    np.testing.assert_allclose(got.out.double().numpy(), out, rtol=0, atol=TOL)
    np.testing.assert_allclose(got.lse.double().numpy(), lse, rtol=TOL, atol=TOL)


def hidden(b, h, n, seed=0):
    """A mask that hides a third of the tokens, and everything in the last row."""
    visible = torch.rand(b, h, n, generator=torch.Generator().manual_seed(seed)) > 0.3
    visible[-1] = False
    return visible
