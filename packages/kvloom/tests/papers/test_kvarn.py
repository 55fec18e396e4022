"""KVarN (arXiv:2606.03458): the definition by loops, numbers by hand, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bound_encodings import bound, round_trip
from kv_views import problems
from kvloom.errors import RecipeError
from kvloom.kernels.attend.regions import Slots
from kvloom.kernels.quantize import reference as ref
from kvloom.kernels.quantize.balanced import LEAST, MOST, deviations
from kvloom.kernels.quantize.rotated import rotate
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed

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


def spec(axis, bits, meta=torch.float32):
    like = torch.empty(1, 1, 0, D)
    group = TILE if axis == "channel" else D
    return bound(like, bits, axis, group, meta, rotation="head", balance=TILE)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_tiles_are_normalized_and_rounded_as_in_the_paper(axis, bits):
    tiles = [tile(0), 1e-3 * tile(1), 50 * tile(2)]  # whatever their size
    x = torch.from_numpy(np.concatenate(tiles)).float().view(1, 1, -1, D)
    codes, row = ref.balanced(x, spec(axis, bits))
    back = ref.unbalanced(codes, row, spec(axis, bits))
    want = np.concatenate([by_loops(one, bits, axis == "channel") for one in tiles])
    size = np.abs(want).reshape(3, -1).max(axis=1).repeat(TILE)[:, None]
    # fp32 chooses another code only where a number lies between two codes
    apart = np.abs(back[0, 0].double().numpy() - want) > 1e-5 * size
    assert apart.mean() < 2e-3


def test_deviations_become_more_alike():
    x = torch.from_numpy(tile(3)).float()
    tokens, channels = deviations(x)
    want = normalized(tile(3))
    found = (tokens.squeeze(1).double().numpy(), channels.squeeze(0).double().numpy())
    scale = found[1][0] / want[1][0]  # a factor may move from tokens to channels
    np.testing.assert_allclose(found[0], want[0] / scale, rtol=1e-4)
    np.testing.assert_allclose(found[1], want[1] * scale, rtol=1e-4)
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
    codes, row = ref.balanced(x, spec("token", 2))
    assert codes[0, 0].tolist() == [[0, 1, 2, 3] * 4] * TILE
    torch.testing.assert_close(ref.unbalanced(codes, row, spec("token", 2)), x)
    assert row.shape == (1, 1, 1, 2 * TILE + D)
    torch.testing.assert_close(row[0, 0, 0, :TILE] * row[0, 0, 0, 2 * TILE], sizes)
    codes, row = ref.balanced(x, spec("channel", 2))  # constant channels of one factor a token
    torch.testing.assert_close(ref.unbalanced(codes, row, spec("channel", 2)), x)
    torch.testing.assert_close(row[0, 0, 0, 2 * D :] / row[0, 0, 0, 2 * D], sizes)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_padding_changes_nothing(axis):
    real = torch.rand(1, 1, TILE, generator=torch.Generator().manual_seed(4)) > 0.4
    x = torch.from_numpy(tile(5)).float().view(1, 1, TILE, D)
    found = [
        ref.balanced(torch.where(real.unsqueeze(-1), x, filler), spec(axis, 3), real)
        for filler in (0.0, 1e9)
    ]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0][real], found[1][0][real])
    live = real[0, 0]
    tokens, channels = deviations(x[0, 0] * live[:, None], live[:, None])
    want = deviations(x[0, 0, live])
    torch.testing.assert_close(tokens[live], want[0])
    torch.testing.assert_close(channels, want[1])


@pytest.mark.parametrize("meta", ["fp16", "fp8", "bf16"])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_tiles_of_any_size_come_back(axis, meta):
    """Zeros, one number, constant tokens and numbers of any size give no infinity and no NaN."""
    x = torch.randn(1, 6, TILE, D, generator=torch.Generator().manual_seed(6))
    x[0, 0] = 0
    x[0, 1, 1:] = 0
    x[0, 2] = 3.7
    x[0, 3] *= 1e-9
    fmt = Packed(4, axis, TILE if axis == "channel" else 0, meta, residual=TILE, rotation="head",
                 balance=TILE)  # fmt: skip
    x[0, 4] *= fmt.largest / x[0, 4].abs().max()
    back = round_trip(x, fmt.encoding.bind(6, D))
    assert back.isfinite().all()
    assert (back[0, 0] == 0).all()
    error = (rotate(back) - rotate(x))[0, 4:].norm(dim=(1, 2)) / x[0, 4:].norm(dim=(1, 2))
    assert error.max() < (0.5 if meta == "fp8" else 0.11)


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(RecipeError, match='use rotation="head"'):
        Packed(2, "channel", 32, residual=32, balance=32)
    with pytest.raises(RecipeError, match="per channel, a tile is a group; use group=32"):
        Packed(2, "channel", 16, residual=32, rotation="head", balance=32)
    with pytest.raises(RecipeError, match="per token, a token of a tile is a group; use group=0"):
        Packed(2, "token", 32, residual=32, rotation="head", balance=32)
    with pytest.raises(RecipeError, match="pack no whole tiles of balance=64 tokens"):
        Packed(2, "token", 0, residual=32, rotation="head", balance=64)
    with pytest.raises(RecipeError, match="balance=48 is not one of 0, 16, 32, 64, 128"):
        Packed(2, "token", 0, residual=48, rotation="head", balance=48)


def test_what_kernels_do_not_read_is_refused_by_name():
    like, store = torch.zeros(1, 2, TILE, 64), resolve("kvarn").store
    assert not problems(1, like, store.keys.encoding, store.values.encoding)
    (problem,) = problems(
        1, like, None, store.values.encoding, where=Slots(torch.zeros(1, 1, 1), 1)
    )
    assert problem == "values: balance=128 is not read token by token"
    (problem,) = problems(1, like, store.values.encoding, None)
    assert problem == "keys: it reads balanced tiles per channel, not per token"
