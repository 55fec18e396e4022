"""Tensors of more than 2**31 numbers, and packed storage of more than 2**31 bytes, by CPU kernels.

Memory is reserved and never touched, except for a few tokens at its end: all others are zeros that
the system makes when they are read. What a kernel reads or writes there is compared with the
reference on a small tensor of the same tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvloom.kernels import dispatch, ops
from kvloom.kernels.append.reference import WriteTarget
from kvloom.kernels.attend.reference import AttentionState
from kvloom.kernels.attend.regions import KVView, Paged, PageTable, Region, Slots, Spans
from kvloom.kernels.quantize.packed_view import PackedView
from kvloom.kernels.quantize.reference import PackedTensors
from kvloom.store import Packed

H, D = 2, 64
FAR = 192  # tokens at the end
TOKENS = (1 << 30) // D + FAR  # of each head: the last half of the second head is beyond 2**31
PAGE = 128
BLOCKS = (1 << 31) // (H * PAGE * D) + 4
DTYPE = torch.bfloat16
FORMATS = {"token": Packed(8, "token", D), "channel": Packed(8, "channel", 32, residual=32)}


def reserved(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Return zeros that take no memory until they are written."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)


def drawn(seed: int, *shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def far_tokens() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return large exact keys and values, and their last tokens."""
    near, far = [drawn(seed, 1, H, FAR, D) for seed in (1, 2)], []
    for x in near:
        far.append(reserved(1, H, TOKENS, D))
        far[-1][:, :, -FAR:] = x
    return (far[0], far[1]), (near[0], near[1])


def far_packed(fmt: Packed) -> tuple[list[PackedView], list[PackedView]]:
    """Return large packed keys and values, whose last tokens the kernel has packed, and these."""
    near, far = [], []
    encoding = fmt.encoding.bind(H, D)
    for seed in (1, 2):
        x = drawn(seed, 1, H, FAR, D)
        for tokens, views, backend, dtype in (
            (FAR, near, "ref", torch.float32), (TOKENS, far, "auto", DTYPE),
        ):  # fmt: skip
            lines = tokens // fmt.tokens_per_scale
            numbers = encoding.scales[1]
            sides = (reserved(1, H, lines, numbers, dtype=encoding.meta) for _ in range(2))
            tensors = PackedTensors(reserved(1, H, tokens, D, dtype=torch.uint8), *sides)
            with dispatch.use(backend):
                ops.pack(x, encoding, tensors, tokens - FAR)
            views.append(PackedView(*tensors, encoding, 0, tokens, dtype))
    return near, far


def compare(q: Tensor, far: list[Region], near: list[Region], zeros: int = 0) -> None:
    """Compare attention by the kernel with the reference, among so many more tokens of zeros."""
    with dispatch.use("auto"):
        assert ops.attend.choose(q, far, 0.125).backend == "cpu", "no kernel attends"
        found = ops.attend(q, far, 0.125)
    with dispatch.use("ref"):
        want = among_zeros(ops.attend(q, near, 0.125), zeros)
    torch.testing.assert_close(found.out, want.out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found.lse, want.lse, rtol=1e-4, atol=1e-3)
    assert float(want.out.abs().max()) > 0.1, "the far tokens are not read"


def among_zeros(state: AttentionState, zeros: int) -> AttentionState:
    """Return attention to the same tokens and so many of which key and value are 0."""
    if not zeros:
        return state
    lse = torch.logaddexp(state.lse, torch.tensor(math.log(zeros)))
    return AttentionState(state.out * (state.lse - lse).exp()[..., None], lse)


def exact() -> None:
    """Attend to all exact tokens, to some of them, and to a span of each head."""
    far, near = far_tokens()
    q = 20 * drawn(3, 1, 2 * H, 1, D).float()
    compare(q, [Region.exact(*far)], [Region.exact(*near)], TOKENS - FAR)
    some = torch.arange(FAR - 60).expand(1, H, -1)
    compare(
        q,
        [Region.exact(*far, where=Slots(some + TOKENS - FAR, TOKENS - 40))],
        [Region.exact(*near, where=Slots(some, FAR - 40))],
    )
    begins, counts = torch.tensor([3, 90]), torch.tensor([80, 100])
    bounds = torch.stack([begins, counts], dim=-1)[None]
    nothing = Region.exact(*(x[:, :, :0] for x in near))
    regions = []
    for sides, end in ((far, H * TOKENS), (near, H * FAR)):
        flat = [x.view(1, 1, -1, D) for x in sides]
        where = Spans(bounds + torch.tensor([end - FAR, 0]), 100)
        regions.append([nothing, Region.exact(*flat, where=where)])
    compare(q, *regions)


def scores() -> None:
    """Score the tokens that queries attend to."""
    (far, _), (near, _) = far_tokens()
    q = drawn(3, 1, 2 * H, 4, D)
    visible = torch.zeros(1, 1, TOKENS, dtype=torch.bool)
    visible[..., -FAR:] = True
    with dispatch.use("auto"):
        assert ops.column_mass.choose(q, far, 0.125, visible=visible).backend == "cpu"
        found = ops.column_mass(q, far, 0.125, visible=visible)
    with dispatch.use("ref"):
        want = ops.column_mass(q, near, 0.125)
    torch.testing.assert_close(found[..., -FAR:], want, rtol=1e-4, atol=1e-6)


def packed(axis: str) -> None:
    """Pack tokens, attend to all of them and to some, and unpack them."""
    near, far = far_packed(FORMATS[axis])
    q = 20 * drawn(3, 1, 2 * H, 1, D).float()
    tail = drawn(4, 1, H, 5, D)
    views = [[KVView(x, tail, FORMATS[axis].encoding) for x in sides] for sides in (far, near)]
    compare(q, [Region(*views[0])], [Region(*views[1])], TOKENS - FAR)
    some = torch.arange(FAR - 60).expand(1, H, -1)
    compare(
        q,
        [Region(*views[0], Slots(some + TOKENS - FAR, TOKENS - 40))],
        [Region(*views[1], Slots(some, FAR - 40))],
    )
    for one, other in zip(near, far, strict=True):
        with dispatch.use("auto"):
            found = other.cut(TOKENS - FAR, TOKENS).tensor()
        with dispatch.use("ref"):
            assert torch.equal(found, one.tensor().to(DTYPE)), "other tokens are unpacked"


def pages() -> None:
    """Attend to pages of a pool, and store new tokens in it."""
    fmt = Packed(8, "token", D)
    encoding = fmt.encoding.bind(H, D)
    q, new = 20 * drawn(3, 2, 2 * H, 1, D).float(), [drawn(seed, 2, H, 1, D) for seed in (5, 6)]
    regions: list[Region] = []
    for blocks, dtype in ((4, torch.float32), (BLOCKS, DTYPE)):
        views = []
        for seed in (1, 2):
            x = drawn(seed, 4, H, PAGE, D)
            sides = (reserved(blocks, H, PAGE, 1, dtype=encoding.meta) for _ in range(2))
            tensors = PackedTensors(reserved(blocks, H, PAGE, D, dtype=torch.uint8), *sides)
            last = PackedTensors(*(y[-4:] for y in tensors))
            ops.pack(x, encoding, last, 0)
            tails = reserved(blocks, H, PAGE, D)
            tails[-4:] = drawn(seed + 7, 4, H, PAGE, D)
            view = PackedView(*tensors, encoding, 0, PAGE, dtype)
            views.append(KVView(view, tails, fmt.encoding))
        tokens, first = torch.tensor([2 * PAGE + 9, PAGE + 30]), blocks - 4
        table = PageTable(
            torch.tensor([[2, 0], [3, 3]]) + first, tokens // PAGE * PAGE, tokens,
            torch.tensor([1, 0]) + first, PAGE, int(tokens.max()),
        )  # fmt: skip
        regions.append(Region(*views, Paged(table, new=(new[0], new[1]))))
    near, far = regions
    compare(q, [far], [near])
    for mine, other in ((far.keys, near.keys), (far.values, near.values)):
        assert torch.equal(mine.exact[-4:], other.exact), "new tokens are stored elsewhere"


def append() -> None:
    """Store the tokens of two steps: of all heads at one place, and of each head at its own."""
    new = tuple(drawn(seed, 1, H, 1, D) for seed in (1, 2))
    data = [reserved(1, H, TOKENS, D) for _ in new]
    for row in (TOKENS - 3, torch.tensor([TOKENS - 2, TOKENS - 1]).view(1, H, 1)):
        targets = tuple(WriteTarget(x, row) for x in data)
        with dispatch.use("auto"):
            assert ops.append.choose(new, targets, (6e4, 6e4)).backend == "cpu"
            assert ops.append(new, targets, (6e4, 6e4))
        at = torch.as_tensor(row).expand(1, H, 1)[..., None].expand(-1, -1, -1, D)
        for x, stored in zip(new, data, strict=True):
            assert torch.equal(stored.gather(2, at), x), "stored elsewhere"


CASES = {
    "exact tokens": exact, "scores": scores, "append": append, "pages": pages,
    "packed by token": lambda: packed("token"), "packed by channel": lambda: packed("channel"),
}  # fmt: skip
