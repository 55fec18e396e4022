"""Segment and Sinks: regions that cover every token once, and each row's first tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.cache.segment import Segment
from kvloom.cache.sinks import Sinks
from kvloom.kernels.attend import reference as ref
from kvloom.store import KVSide, Packed, PackedView

KEYS = (Packed(2, "channel", 16, residual=32), 0)
VALUES = (Packed(3, "token", 16), 10)
PAIRS = {
    "exact": ((None, 0), (None, 0)),
    "kivi": (KEYS, VALUES),
    "values ahead": (KEYS, (Packed(3, "token", 16), 0)),
    "keys only": (KEYS, (None, 0)),
    "values only": ((None, 0), VALUES),
    "same": (VALUES, VALUES),
}
every_pair = pytest.mark.parametrize(("keys", "values"), PAIRS.values(), ids=PAIRS)


def segment(keys, values, n: int) -> tuple[Segment, torch.Tensor, torch.Tensor]:
    body = Segment(KVSide(*keys), KVSide(*values))
    k, v = torch.randn(2, 2, 2, n, 32)
    body.extend(k, v, drop=0)
    return body, k, v


def tokens(side: KVSide) -> torch.Tensor:
    parts = [side.packed.view().tensor()] if side.packed_count else []
    return torch.cat([*parts, *([side.tail.view()] if len(side.tail) else [])], dim=2)


@every_pair
@given(st.integers(1, 90), st.integers(1, 20))
def test_attending_to_the_region_is_attending_to_the_tokens(keys, values, n, t):
    body, _, _ = segment(keys, values, n)
    q = torch.randn(2, 4, t, 32)
    body.append(*torch.randn(2, 2, 2, t, 32))
    visible = torch.rand(2, 1, n + t) > 0.3
    for see in (None, visible):
        region = body.region(see, step_tokens=t)
        assert (region.tokens, region.step_tokens) == (n + t, t)
        got = ref.attend_regions(q, [region], 0.2)
        whole = (tokens(body.keys), tokens(body.values))
        want = ref.attend_exact(q, *whole, 0.2, causal=True, visible=see)
        torch.testing.assert_close(got[:2], want[:2], rtol=0, atol=3e-6)


@every_pair
@pytest.mark.parametrize("stretch", [8, 20, 48])
def test_long_packed_stretches_are_cut_without_a_seam(keys, values, stretch, monkeypatch):
    body, _, _ = segment(keys, values, 101)
    q, visible = torch.randn(2, 4, 3, 32), torch.rand(2, 1, 101) > 0.3
    whole = (tokens(body.keys), tokens(body.values))
    monkeypatch.setattr(ref, "UNPACK_TOKENS", stretch)
    cut, unpacked = PackedView.cut, []
    monkeypatch.setattr(PackedView, "cut", lambda *x: unpacked.append(x[2] - x[1]) or cut(*x))
    got = ref.attend_regions(q, [body.region(visible, step_tokens=0)], 0.2)
    assert all(n <= stretch for n in unpacked)
    want = ref.attend_exact(q, *whole, 0.2, visible=visible)
    torch.testing.assert_close(got[:2], want[:2], rtol=0, atol=3e-6)
    for begin in (1, 33, 64):
        got = ref.attend_regions(q, [body.region(visible, 0, begin=begin)], 0.2)
        later = [x[:, :, begin:] for x in whole]
        want = ref.attend_exact(q, *later, 0.2, visible=visible[..., begin:])
        torch.testing.assert_close(got[:2], want[:2], rtol=0, atol=3e-6)


@every_pair
def test_exact_tokens_are_those_that_neither_side_packed(keys, values):
    for n in (1, 33, 70):
        body, _, _ = segment(keys, values, n)
        assert len(body) == n
        assert body.exact_newest == n - max(body.keys.packed_count, body.values.packed_count)


def test_dropping_moves_the_first_logical_index():
    body, k, v = segment(*PAIRS["exact"], 20)
    body.drop_front(5)
    assert (body.first, len(body)) == (5, 15)
    body.drop_back(3)
    assert (body.first, len(body)) == (5, 12)
    assert torch.equal(body.keys.tail.view(), k[:, :, 5:17])
    assert torch.equal(body.values.tail.view(), v[:, :, 5:17])
    visible = torch.arange(17)[None, None].expand(2, 1, 17) % 2 == 0
    region = body.region(visible, step_tokens=0)
    assert torch.equal(region.visible, visible[:, :, 5:])  # by logical index, not by slot


@every_pair
def test_bytes_are_those_of_all_tensors(keys, values):
    body, _, _ = segment(keys, values, 80)
    stored = [x for side in (body.keys, body.values) for x in tensors(side)]
    assert body.nbytes == sum(x.untyped_storage().nbytes() for x in stored)


def tensors(side: KVSide):
    if len(side.tail):
        yield side.tail.allocation.data
    if side.packed_count:
        yield from side.packed.allocation.tensors


# --- sinks -------------------------------------------------------------------------------------


def numbered(n: int, batch: int = 3) -> torch.Tensor:
    """Tokens [B, 1, n, 4] whose channels are 100 * row + index."""
    index = torch.arange(float(n)) + 100 * torch.arange(float(batch))[:, None]
    return index[:, None, :, None].repeat(1, 1, 1, 4)


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [2, 1, 7], [4, 6], [3, 3, 4]])
def test_sinks_without_padding_are_the_first_tokens(sizes):
    sinks, x, seen, skipped = Sinks(4), numbered(10), 0, 0
    assert not sinks.full(0)
    for t in sizes:
        skipped += sinks.extend(x[:, :, seen : seen + t], -x[:, :, seen : seen + t], seen, None)
        seen += t
        assert sinks.full(seen) == (seen >= 4)
        region = sinks.region(seen)
        keys = region.keys.tail
        shown = keys if region.visible is None else keys[:, :, region.visible[0, 0]]
        assert torch.equal(shown, x[:, :, : min(4, seen)])
    assert skipped == 4
    assert torch.equal(sinks.values, -x[:, :, :4])


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [2, 3, 4, 3]])
@pytest.mark.parametrize("pads", [[0, 2, 5], [7, 0, 0], [3, 3, 3]])
def test_sinks_of_padded_rows_are_each_rows_first_real_tokens(sizes, pads):
    sinks, x, seen = Sinks(4), numbered(12), 0
    visible = torch.arange(12) >= torch.tensor(pads)[:, None]
    for t in sizes:
        see = visible[:, None, : seen + t]
        part = x[:, :, seen : seen + t]
        assert sinks.extend(part, -part, seen, see) == min(t, max(0, 4 - seen))
        seen += t
        region, hidden = sinks.region(seen), sinks.hide(see)
        for row, pad in enumerate(pads):
            have = [i for i in range(pad, pad + 4) if i < seen]
            shown = region.keys.tail[row, 0][region.visible[row, 0]][:, 0]
            assert shown.tolist() == [100 * row + i for i in have]
            # and the body shows every other real token, so that each is seen once
            rest = [i for i in range(max(pad, 4), seen) if i not in have]
            assert (4 + hidden[row, 0, 4:].nonzero().flatten()).tolist() == rest
    assert sinks.full(seen) == (max(pads) + 4 <= 12)


def test_sinks_move_with_their_rows():
    sinks, x = Sinks(2), numbered(6)
    visible = (torch.arange(6) >= torch.tensor([0, 1, 3])[:, None])[:, None]
    sinks.extend(x, x, 0, visible)
    sinks.map(lambda t: t[[2, 2, 0]])
    assert sinks.start.tolist() == [3, 3, 0]
    assert sinks.keys[:, 0, :, 0].tolist() == [[203, 204], [203, 204], [0, 1]]


def test_sinks_count_their_bytes():
    sinks, x = Sinks(4), numbered(6)
    assert sinks.nbytes == 0
    sinks.extend(x, x, 0, None)
    assert sinks.nbytes == 2 * 3 * 4 * 4 * 4 + 3 * 8


def test_every_logical_index_is_in_one_place():
    """Sinks before the body, the body from `first` on: nothing twice, nothing missing."""
    for pad, sizes in itertools.product((0, 3), ([9], [2, 7], [1] * 9)):
        sinks, body, x, seen = (
            Sinks(3),
            Segment(KVSide(None, 0), KVSide(None, 0)),
            numbered(9, 1),
            0,
        )
        visible = (torch.arange(9) >= pad)[None, None] if pad else None
        for t in sizes:
            part = x[:, :, seen : seen + t]
            skip = sinks.extend(
                part, part, seen, None if visible is None else visible[:, :, : seen + t]
            )
            body.first += skip
            if skip < t:
                body.append(part[:, :, skip:], part[:, :, skip:])
            seen += t
        see = sinks.hide(visible)
        shown = []
        for region in (sinks.region(seen), body.region(see, 0)):
            keys = region.keys.tail
            keys = keys if region.visible is None else keys[:, :, region.visible[0, 0]]
            shown += keys[0, 0, :, 0].tolist()
        assert shown == list(range(pad, 9))
