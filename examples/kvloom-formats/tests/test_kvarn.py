"""KVarN (arXiv:2606.03458): the definition by loops, numbers by hand, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvloom_formats.kvarn import LEAST, MOST, KVarN, deviations, fast_deviations

from kvloom.errors import RecipeError
from kvloom.kernels import rotate, unrotate

TILE, D = 32, 16


def tile(seed=0):
    """A tile of rotated numbers, float64 [TILE, D], with tokens and channels of other sizes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(TILE, D, generator=g).double()
    x = (x + 0.5 * torch.randn(D, generator=g)) * torch.logspace(-0.5, 0.5, D)
    return (x * torch.rand(TILE, 1, generator=g).add(0.2)).float().double().numpy()


def std(numbers):
    mean = sum(numbers) / len(numbers)
    return (sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)) ** 0.5


def normalized(x, turns=16):
    """What tokens and channels are divided by: the turns in logarithms, in float64."""
    size = np.log(np.sqrt(np.mean(x * x)))
    log_tokens, log_channels = np.zeros(len(x)), np.zeros(x.shape[1])
    best, found = np.inf, None
    for _ in range(turns):
        for t in range(len(x)):
            now = x[t] / np.exp(log_tokens[t] + log_channels)
            log_tokens[t] += np.log(std(now))
        log_tokens = log_tokens.clip(size + np.log(LEAST), size + np.log(MOST))
        for c in range(x.shape[1]):
            now = x[:, c] / np.exp(log_tokens + log_channels[c])
            log_channels[c] += np.log(std(now))
        log_channels = log_channels.clip(np.log(LEAST), np.log(MOST))
        now = x / np.exp(log_tokens[:, None] + log_channels)
        tokens, channels = [std(row) for row in now], [std(row) for row in now.T]
        imbalance = max(tokens) / min(tokens) + max(channels) / min(channels)
        if imbalance < best:
            best, found = imbalance, (np.exp(log_tokens), np.exp(log_channels))
    return found


def rounded(group, bits):
    """A group of numbers after asymmetric round-to-nearest."""
    low, high = min(group), max(group)
    step = (high - low) / (2**bits - 1)
    return np.array([np.rint((x - low) / step) * step + low for x in group])


def by_loops(x, bits, keys):
    """What comes back of a tile: keys by range per channel, values per token."""
    tokens, channels = normalized(x)
    y = x / tokens[:, None] / channels
    y = np.stack([rounded(group, bits) for group in (y.T if keys else y)], axis=keys)
    return y * tokens[:, None] * channels


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_tiles_are_normalized_and_rounded_as_in_the_paper(axis, bits):
    tiles = [tile(0), 1e-3 * tile(1), 50 * tile(2)]  # whatever their size
    x = torch.from_numpy(np.concatenate(tiles)).float().view(1, 1, -1, D)
    fmt = KVarN(bits, axis, TILE, "fp32")
    tensors = fmt.pack(unrotate(x))
    assert sum(part.nbytes for part in tensors) == fmt.nbytes(3 * TILE, D)
    back = rotate(fmt.unpack(tensors, torch.float32))
    want = np.concatenate([by_loops(one, bits, axis == "channel") for one in tiles])
    size = np.abs(want).reshape(3, -1).max(axis=1).repeat(TILE)[:, None]
    # fp32 chooses another code only where a number lies between two codes
    differs = np.abs(back[0, 0].double().numpy() - want) > 1e-5 * size
    assert differs.mean() < 2e-3


@pytest.mark.parametrize("compute", [deviations, fast_deviations])
def test_deviations_become_more_alike(compute):
    x = torch.from_numpy(tile(3)).float()
    tokens, channels = compute(x)
    want = normalized(tile(3))
    factors = (tokens.squeeze(1).double().numpy(), channels.squeeze(0).double().numpy())
    scale = factors[1][0] / want[1][0]  # a factor may move from tokens to channels
    np.testing.assert_allclose(factors[0], want[0] / scale, rtol=1e-4)
    np.testing.assert_allclose(factors[1], want[1] * scale, rtol=1e-4)
    for dim in (0, 1):
        before, after = x.std(dim), (x / tokens / channels).std(dim)
        assert after.max() / after.min() < 0.7 * before.max() / before.min()


def test_a_tile_by_hand():
    """Tokens are one pattern times 1 or 1.5: normalized, they are all that pattern."""
    pattern = torch.tensor([-1.5, -0.5, 0.5, 1.5]).repeat(4)
    sizes = torch.tensor([1.0, 1.5]).repeat(TILE // 2)
    x = (sizes[:, None] * pattern).view(1, 1, TILE, D)
    tokens, _ = deviations(x[0, 0])
    torch.testing.assert_close(tokens[:, 0] / tokens[0, 0], sizes)
    for axis in ("channel", "token"):
        fmt = KVarN(2, axis, TILE, "fp32")
        back = rotate(fmt.unpack(fmt.pack(unrotate(x)), torch.float32))
        torch.testing.assert_close(back, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_padding_changes_nothing(axis):
    live = torch.rand(1, 1, TILE) > 0.4
    x = torch.from_numpy(tile(5)).float().view(1, 1, TILE, D)
    fmt = KVarN(4, axis, TILE)
    packed = [fmt.pack(torch.where(live.unsqueeze(-1), x, filler), live) for filler in (0.0, 1e9)]
    assert torch.equal(packed[0][1], packed[1][1])
    unpacked = [fmt.unpack(tensors, torch.float32)[live] for tensors in packed]
    assert torch.equal(*unpacked)
    rows = live[0, 0]
    for compute in (deviations, fast_deviations):
        tokens, channels = compute(x[0, 0] * rows[:, None], rows[:, None])
        want = compute(x[0, 0, rows])
        torch.testing.assert_close(tokens[rows], want[0])
        torch.testing.assert_close(channels, want[1])


@pytest.mark.parametrize("meta", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_tiles_of_any_size_come_back(axis, meta):
    """Zeros, one number, constant tokens and numbers of any size give no infinity and no NaN."""
    x = torch.randn(1, 6, TILE, D)
    x[0, 0] = 0
    x[0, 1, 1:] = 0
    x[0, 2] = 3.7
    x[0, 3] *= 1e-9
    x[0, 4] *= 1e3
    fmt = KVarN(4, axis, TILE, meta)
    back = fmt.unpack(fmt.pack(x), torch.float32)
    assert back.isfinite().all()
    assert (back[0, 0] == 0).all()
    error = (back - x)[0, 4:].norm(dim=(1, 2)) / x[0, 4:].norm(dim=(1, 2))
    assert error.max() < 0.11


@pytest.mark.parametrize("meta", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_numbers_up_to_the_largest_are_finite(axis, bits, meta):
    """All in one channel of the rotated tile, of one token or of all, and of either sign."""
    fmt = KVarN(bits, axis, TILE, meta)
    x = torch.zeros(1, 3, TILE, 512)
    x[0, 0, :, 5] = x[0, 1, 0, 5] = x[0, 2, ::2, 5] = 1
    x[0, 2, 1::2, 5] = -1
    x = unrotate(x)
    for size in (fmt.max_abs, -fmt.max_abs):
        back = fmt.unpack(fmt.pack(size * x.sign()), torch.float32)
        assert back.isfinite().all()


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(RecipeError, match="bits=5 is not one of 1, 2, 3, 4, 8"):
        KVarN(5)
    with pytest.raises(RecipeError, match="unit=12 must be a multiple of 8 tokens"):
        KVarN(unit=12)
    with pytest.raises(RecipeError, match="axis='head' is not one of channel, token"):
        KVarN(axis="head")
