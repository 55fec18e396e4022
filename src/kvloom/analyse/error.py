"""What a recipe's formats do to keys, values and attention, layer by layer (KIVI, Table 2).

One pass of the plain model over some contexts; in every layer all tokens are packed as each recipe
packs them (no window, no sinks: formats are compared, not recipes), and some queries attend again.
Relative errors are norms, |x - x'| / |x| over all contexts and heads:

- keys, values: of the tensors themselves.
- weights: of attention, softmax(q K') against softmax(q K), on query rows of the second half.
- output_values: of the output A V', weights exact, as the paper's table has it for values.
- output: of A' V', keys and values packed.

The paper (arXiv:2402.02750) states no formula and no bit width for its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibrate import record
from ..calibrate.attention import Attention, Sample
from ..hf import attach, compat
from ..hf.metadata import load_layer_metadata
from ..recipe.spec import Recipe
from ..store import Format, LayerMetadata, Packed
from ..store.codec import Channels
from ..store.packed import PackedTokens
from ..workload.step import Progress


@dataclass(frozen=True)
class LayerError:
    """The relative errors of one layer, as the module says; 0 for a side that stays exact."""

    keys: float
    values: float
    weights: float
    output_values: float
    output: float


NAMES = tuple(f.name for f in fields(LayerError))


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    recipes: Sequence[Recipe],
    queries: int = 64,
    progress: Progress | None = None,
) -> dict[str, dict[int, LayerError]]:
    """Errors of each recipe's formats in each layer, by recipe name and number of the layer.

    ids: int64 [M, T], contexts. The model is left as it was. Raises `IncompatibleRecipe`.
    """
    compat.refuse_unsupported(model)
    for recipe in recipes:
        recipe.check(compat.geometry(model))
    told = {recipe.name: load_layer_metadata(model, recipe) for recipe in recipes}
    routed_before = getattr(model, "_kvloom", None) is not None
    sums: dict[tuple[str, int], Tensor] = {}
    try:
        places = {number: at for at, number in enumerate(record.layers(model))}

        def see(number: int, seen: record.Seen) -> None:
            exact = Attention(Sample.of(seen, queries))
            for recipe in recipes:
                add = _squares(exact, seen, recipe, told[recipe.name][places[number]])
                key = recipe.name, number
                sums[key] = sums[key] + add if key in sums else add

        for i in range(len(ids)):
            record.read(model, ids[i : i + 1], see)
            if progress:
                progress("packing", 1)
    finally:
        if not routed_before and getattr(model, "_kvloom", None) is not None:
            attach.detach(model)
    found: dict[str, dict[int, LayerError]] = {recipe.name: {} for recipe in recipes}
    for (name, number), pairs in sums.items():
        off, whole = pairs.unbind(1)
        found[name][number] = LayerError(*(off / whole.clamp_min(1e-30)).sqrt().tolist())
    return found


def mean(errors: dict[int, LayerError]) -> LayerError:
    """The mean over layers."""
    rows = [list(asdict(e).values()) for e in errors.values()]
    return LayerError(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def to_plain(found: dict[str, dict[int, LayerError]]) -> list[dict[str, Any]]:
    """Rows for JSON: recipe, the mean over layers, and every layer."""
    return [
        {
            "recipe": name,
            **asdict(mean(errors)),
            "layers": [{"layer": number, **asdict(e)} for number, e in sorted(errors.items())],
        }
        for name, errors in found.items()
    ]


def _squares(exact: Attention, seen: record.Seen, recipe: Recipe, layer: LayerMetadata) -> Tensor:
    """Squared norms [5, 2] of what is off and of what there is, in the order of `LayerError`."""
    keys, values = recipe.store.keys, recipe.store.values
    k = packed(seen.k, keys, layer.keys, layer).float().cpu()
    v = packed(seen.v, values, layer.values, layer).float().cpu()
    weights = exact.shifted_by_keys(k - exact.k)
    out = exact.out
    pairs = (
        (k, exact.k),
        (v, exact.v),
        (weights, exact.weights),
        (exact.weights @ v, out),
        (weights @ v, out),
    )
    rows = [[(a - b).square().sum(), b.square().sum()] for a, b in pairs]
    return torch.tensor(rows, dtype=torch.float64)


def packed(
    x: Tensor, fmt: Format | None, channels: Channels | None, layer: LayerMetadata
) -> Tensor:
    """What comes back of x [B, Hk, N, D] after packing; per channel, what fills no group stays."""
    if fmt is None:
        return x
    if not isinstance(fmt, Packed):
        whole = x.shape[2] // fmt.unit * fmt.unit
        again = fmt.unpack(fmt.pack(x[:, :, :whole]), x.dtype)
        return torch.cat([again, x[:, :, whole:]], dim=2)
    whole = x.shape[2] // fmt.group * fmt.group if fmt.axis == "channel" else x.shape[2]
    if not whole:
        return x
    at = torch.arange(whole).view(1, 1, -1)
    held = PackedTokens(fmt, channels, layer.rope)
    held.append(x[:, :, :whole], at=at)
    return torch.cat([held.view(at=at).tensor(), x[:, :, whole:]], dim=2)
