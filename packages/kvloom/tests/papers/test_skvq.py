"""SKVQ (arXiv:2405.06219) and TurboQuant: numbers by hand, and the definition step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import naive
import probe
from bound_encodings import round_trip
from kvloom.cache.layer import LayerCache
from kvloom.kernels.quantize import reference as ref
from kvloom.positions.rope import Rope
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.named.quantization import skvq, skvq_k2v1_5, turbo
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import LayerEncoding, LayerFacts, Packed, Store
from steps import draw, feed, unpacked

D, HK = 32, 2
SCALE = D**-0.5
ROPE = Rope(10000.0 ** -(torch.arange(0, D, 2) / D))
# four groups over both heads, of unequal sizes: 8, 40, 4 and 12 channels
SIZES = torch.tensor([8, 40, 4, 12])


def layer(seed: int, store: Store) -> LayerFacts:
    """What calibration might say of a layer."""
    g = torch.Generator().manual_seed(seed)

    def side(fmt: Packed) -> LayerEncoding:
        group_of = torch.empty(HK * D, dtype=torch.long)
        group_of[torch.randperm(HK * D, generator=g)] = torch.arange(4).repeat_interleave(SIZES)
        clip = 0.8 + 0.2 * torch.rand(4, generator=g)
        return LayerEncoding(fmt.encoding, HK, D, group_of.view(HK, D), clip)

    return LayerFacts(side(store.keys), side(store.values), ROPE)


def recipe(**options) -> Recipe:
    return skvq(group=16, window=12, sinks=3, **options)


# --- by hand -------------------------------------------------------------------------------------


def test_a_group_over_two_heads_by_hand():
    """Channels 0 of head 0 and 1, 2 of head 1 are one group: -4, 6, 2 with alpha 0.5 and 2 bit.

    Ends -2 and 3: zero -2, scale 5/3. Codes: (-4 + 2) / s < 0 -> 0; (6 + 2) / s = 4.8 -> 3;
    (2 + 2) / s = 2.4 -> 2. Back: -2, 3, 4/3.
    """
    fmt = Packed(2, "token", 16, "fp32", span="layer", reorder=True, clip="group")
    group_of = torch.tensor([[0, 1, 1], [1, 0, 0]])
    x = torch.tensor([[-4.0, 9, 9], [9, 6, 2]]).view(1, 2, 1, 3)
    layer_encoding = LayerEncoding(fmt.encoding, 2, 3, group_of, torch.tensor([0.5, 1.0]))
    codes, scale, zero = ref.to_codes(x, layer_encoding)
    assert codes[0, :, 0].tolist() == [[0, 0, 0], [0, 3, 2]]
    assert scale[0, 0, 0].tolist() == pytest.approx([5 / 3, 0])
    assert zero[0, 0, 0].tolist() == [-2, 9]
    back = ref.from_codes(codes, scale, zero, layer_encoding)[0, :, 0]
    np.testing.assert_allclose(back, [[-2, 9, 9], [9, 3, 4 / 3]], rtol=1e-6)


def test_fp8_metadata_by_hand():
    """Range -5.3 .. 4.1: zero -5.3 is -5.5 in e4m3 (steps of 1/2), scale 9.4 / 3 = 3.133 is 3.25.

    -5.3: round(0.2 / 3.25) = 0 -> -5.5; 4.1: round(9.6 / 3.25) = 3 -> 4.25; 0: 2 -> 1.
    """
    fmt = Packed(2, "token", 16, "fp8", span="layer")
    x = torch.zeros(1, 1, 1, 16)
    x[..., 0], x[..., 1] = -5.3, 4.1
    back = round_trip(x, fmt.encoding.bind(1, 16))[0, 0, 0]
    assert back.tolist() == [-5.5, 4.25] + [1.0] * 14


def test_true_bits():
    assert skvq().store.keys.bits_per_value() == 2.125
    assert skvq_k2v1_5().store.values.bits_per_value() == pytest.approx(1.6 + 16 / 128)
    assert turbo(bits=4).store.keys.bits_per_value(head_dim=128) == 4.125
    # K2V1.5, group 128, two heads of 64, 640 packed tokens: five tokens a byte, 2 bytes a token
    geometry = Geometry(1, 4, 2, 64, torch.bfloat16)
    n = 5 + 640 + 128
    exact = (5 + 128) * 2 * 128 * 2 + 8  # both sides in bf16, and each row's first token
    keys, values = 640 // 4 * 128 + 640 * 2, 640 // 5 * 128 + 640 * 2
    assert skvq_k2v1_5().nbytes(n, geometry) == exact + keys + values


# --- step by step --------------------------------------------------------------------------------


class Skvq:
    """SKVQ by its definition in float64; a token leaves the window after the step."""

    def __init__(self, bits, known: LayerFacts, sinks, window, meta):
        self.bits, self.known, self.meta = bits, known, meta
        self.sinks, self.window = sinks, window

    def prompt(self, q, k, v):
        self.k, self.v, self.done = k.copy(), v.copy(), 0
        out, _ = naive.attention(q, k, v, SCALE, causal=True)
        self._pack()
        return out

    def decode(self, q, k, v):
        self.k, self.v = np.concatenate([self.k, k], 2), np.concatenate([self.v, v], 2)
        out, _ = naive.attention(q, self.k, self.v, SCALE)
        self._pack()
        return out

    def _pack(self):
        for i in range(self.sinks + self.done, self.k.shape[2] - self.window):
            for b in range(self.k.shape[0]):
                raw = self._turned(self.k[b, :, i], -i)
                self.k[b, :, i] = self._turned(self._fake(raw, self.known.keys), i)
                self.v[b, :, i] = self._fake(self.v[b, :, i], self.known.values)
            self.done += 1

    def _fake(self, x, layer_encoding: LayerEncoding):
        args = layer_encoding.group_of.numpy(), self.meta, layer_encoding.clip.numpy()
        return naive.mapped(x[:, None], self.bits, *args)[0][:, 0]

    @staticmethod
    def _turned(x, by):
        """x [Hk, D] turned by a position, pairs (i, i + D/2)."""
        angle = by * ROPE.inv_freq.double().numpy()
        a, b = x[:, : D // 2], x[:, D // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


@pytest.mark.sample
@pytest.mark.parametrize("prompt", [1, 2, 3, 14, 15, 16, 60])
@pytest.mark.parametrize("bits", [1.5, 2, 4])
@pytest.mark.parametrize("meta", ["fp32", "fp8"])
def test_every_step_is_the_definition(prompt, bits, meta):
    steps, made = 30, recipe(bits=bits, value_bits=bits, meta=meta)
    known = layer(prompt, made.store)
    tokens = draw(prompt, prompt + steps, 2, 4, HK, D)
    q, k, v = (x.double().numpy() for x in tokens)
    cache = LayerCache(made, facts=known)
    paper = Skvq(bits, known, 3, 12, meta)
    got = cache.attend(*(x[:, :, :prompt] for x in tokens), scale=SCALE)
    want = paper.prompt(*(x[:, :, :prompt] for x in (q, k, v)))
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-6)
    off = []
    for n in range(prompt, prompt + steps):
        got = cache.attend(*(x[:, :, n : n + 1] for x in tokens), scale=SCALE)
        off.append(np.abs(got.numpy() - paper.decode(*(x[:, :, n : n + 1] for x in (q, k, v)))))
    held = probe.tokens(cache)
    assert held.keys.packed_count == held.values.packed_count == paper.done
    # fp32 and float64 may round a tie, or a number between two of fp8's, differently: rarely
    held = unpacked(probe.values(cache)).numpy()
    same = np.isclose(held, paper.v[:, :, 3 : 3 + held.shape[2]], rtol=0, atol=1e-5)
    assert same.mean() > 0.995
    assert np.median(off) < 1e-5


def test_the_prompts_own_attention_and_the_window_are_exact():
    q, k, v = draw(0, 70, 2, 4, HK, D)
    cache = LayerCache(recipe(), facts=layer(0, recipe().store))
    got = feed(cache, q, k, v)
    want, _ = naive.attention(*(x.double().numpy() for x in (q, k, v)), SCALE, causal=True)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-6)
    assert torch.equal(probe.keys(cache).tail.view(), k[:, :, -12:])
    assert torch.equal(probe.sinks(cache).keys, k[:, :, :3])


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (4, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("name", ["turbo:bits=2,window=9", "turbo:bits=4,window=0,meta=fp8"])
def test_turbo_keeps_norms_and_predicts_its_bytes(name, heads):
    hq, hk = heads
    q, k, v = draw(0, 64, 2, hq, hk, D)
    chosen = resolve(name)
    cache = LayerCache(chosen)
    feed(cache, q, k, v)
    assert cache.nbytes == chosen.nbytes(64, Geometry(1, hq, hk, D, torch.float32), 2)
    packed_end = probe.keys(cache).packed_count
    norms = unpacked(probe.keys(cache))[:, :, :packed_end].norm(dim=-1)
    norms /= k[:, :, :packed_end].norm(dim=-1)
    assert (norms - 1).abs().max() < (0.07 if "fp8" in name else 1e-3)


def test_folding_a_permutation_of_values_into_the_weights_changes_nothing_that_is_stored():
    """SKVQ folds its permutation into W_v and W_o. Here it is a map from channel to group, so the
    same weights with permuted value channels, and the map permuted alike, hold the same numbers.
    """
    known, order = layer(1, recipe().store), torch.randperm(D)
    q, k, v = draw(0, 70, 1, 4, HK, D)
    values = replace(known.values, group_of=known.values.group_of[:, order])
    plain = LayerCache(recipe(), facts=known)
    folded = LayerCache(recipe(), facts=known._replace(values=values))
    new = draw(1, 4, 1, 4, HK, D)
    feed(plain, q, k, v)
    feed(folded, q, k, v[..., order])
    out = feed(plain, *new)
    moved = feed(folded, new[0], new[1], new[2][..., order])
    torch.testing.assert_close(moved, out[..., order], rtol=0, atol=1e-5)
    assert plain.nbytes == folded.nbytes
