"""What measurements need of formats: their error on a tensor, and a calibration without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from ..encoding import LayerEncoding
from ..positions.rope import Rope
from .formats import Format, Packed, Store
from .kv_side import KVSide
from .layer_facts import LayerFacts


def round_trip(x: Tensor, store: Store, side: str, facts: LayerFacts) -> Tensor:
    """Return keys or values x [B, Hk, N, D] after packing and unpacking, in the dtype of x.

    The tokens after the last full group, or tile, stay exact, and all of them where the side has
    no format.

    Args:
        x: The tokens at the positions 0 to N; keys as the model gives them.
        store: The formats.
        side: "keys" or "values".
        facts: What the formats need of the layer.
    """
    fmt: Format | None = getattr(store, side)
    if fmt is None:
        return x
    block = fmt.tokens_per_scale if isinstance(fmt, Packed) else fmt.unit
    whole = x.shape[2] // block * block
    packed = KVSide(fmt, calibrated=getattr(facts, side), rope=facts.rope).packed
    if not whole or packed is None:
        return x
    positions = torch.arange(whole).view(1, 1, -1)
    packed.append(x[:, :, :whole], positions=positions)
    return torch.cat([packed.view(positions=positions).tensor(), x[:, :, whole:]], dim=2)


def random_layer_facts(store: Store, heads: int, head_dim: int, rope: Rope | None) -> LayerFacts:
    """Return random calibrated numbers for a layer: the speed of a format does not depend on them.

    Args:
        store: The formats of keys and values.
        heads: Key/value heads.
        head_dim: Channels of a head.
        rope: The layer's rotary embedding.
    """
    keys, values = (_random_encoding(fmt, heads, head_dim) for fmt in (store.keys, store.values))
    return LayerFacts(keys, values, rope)


def _random_encoding(fmt: Format | None, heads: int, head_dim: int) -> LayerEncoding | None:
    """Return a random calibration of one side; None for a format that needs none."""
    if not isinstance(fmt, Packed) or not fmt.calibrated:
        return None
    size = heads, head_dim
    generator = torch.Generator().manual_seed(0)
    group_of = fmt.consecutive(*size)
    if fmt.reorder and fmt.span == "layer":
        order = torch.randperm(group_of.numel(), generator=generator)
        group_of = group_of.reshape(-1)[order].view(size)
    elif fmt.reorder:
        order = torch.randn(size, generator=generator, dtype=torch.float32).argsort(dim=-1)
        group_of = group_of.gather(-1, order)
    groups = int(group_of.max()) + 1
    clip = None
    if isinstance(fmt.clip, str):
        clip = torch.full((groups if fmt.clip == "group" else 1,), 0.95, dtype=torch.float32)
    return LayerEncoding(
        fmt.encoding,
        *size,
        group_of,
        clip,
        torch.ones(size, dtype=torch.float32) if fmt.smooth else None,
        torch.full((groups,), -4.0, dtype=torch.float32) if fmt.static else None,
        torch.full((groups,), 4.0, dtype=torch.float32) if fmt.static else None,
    )


class PromptPacker:
    """Packs the keys and values of one prompt, without the other work of a layer.

    Args:
        store: The formats.
        recents: The newest tokens of keys and of values that stay exact.
        facts: What the formats need of the layer.
    """

    def __init__(self, store: Store, recents: tuple[int, int], facts: LayerFacts) -> None:
        self.keys = KVSide(store.keys, recents[0], facts.keys, facts.rope)
        self.values = KVSide(store.values, recents[1], facts.values)

    def pack(self, k: Tensor, v: Tensor) -> None:
        """Pack keys and values [B, Hk, N, D] at the positions 0 to N; call it once."""
        self.keys.extend(
            k, 0, None, lambda lo, hi: torch.arange(lo, hi).view(1, 1, -1), prompt=True
        )
        self.values.extend(v, 0, prompt=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed and of the exact tokens."""
        return self.keys.nbytes + self.values.nbytes
