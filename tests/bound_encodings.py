"""Encodings of tokens, for tests of packing."""

from __future__ import annotations

import torch

from kvloom.encoding import META, Encoding, LayerEncoding


def bound(x, bits, axis, group, meta, **fields):
    """An encoding bound to tokens like x [B, Hk, N, D]; meta: a name or a dtype."""
    h, d = x.shape[1], x.shape[3]
    meta = next(name for name, dtype in META.items() if meta in (name, dtype))
    group = 0 if axis == "token" and group == d else group
    return Encoding(bits, axis, group, meta, **fields).bind(h, d)


def round_trip(x, layer_encoding, dtype=torch.float32):
    """Tokens as they come back from an encoding, by the reference."""
    from kvloom.kernels.quantize import reference as ref

    return ref.from_codes(*ref.to_codes(x.float(), layer_encoding), layer_encoding).to(dtype)


def layer_encoding(fmt, like, **calibrated):
    """A format bound to tokens like `like`, with calibrated numbers."""
    h, d = like.shape[1], like.shape[3]
    calibrated.setdefault("group_of", fmt.encoding.bind(h, d).group_of)
    return LayerEncoding(fmt.encoding, h, d, **calibrated)
