"""The error of a recipe's formats in keys, values and attention, layer by layer (KIVI, Table 2).

The plain model reads some contexts. In every layer, all tokens are quantized as each recipe
quantizes them (without recent windows or sinks: formats are compared, not recipes), and sampled
queries attend again. Relative errors are norms, |x - x'| / |x|, over all contexts and heads:

- keys, values: of the tensors themselves.
- weights: of attention, softmax(q K') against softmax(q K), on query rows of the second half.
- output_values: of the output A V' with exact weights, as in the paper's table for values.
- output: of A' V', with quantized keys and values.

The paper (arXiv:2402.02750) states no formula and no bit width for its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom.calibrate import AttentionInputs, AttentionSample, ExactAttention, record
from kvloom.hf import attachment_restored, geometry, load_layer_facts, supported_model
from kvloom.progress import Progress
from kvloom.recipe import Recipe
from kvloom.store import LayerFacts, round_trip


@dataclass(frozen=True)
class LayerError:
    """The relative errors of one layer, as the module defines them; 0 where the side is exact."""

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
    elementwise: bool = False,
) -> dict[str, dict[int, LayerError]]:
    """Return the errors of each recipe's formats, by recipe name and layer number.

    ids: int64 [M, T], contexts. queries: sampled queries of a context. progress: called with one
    unit a context. elementwise: errors are the mean of |x - x'| / |x| over all elements but zeros,
    in place of norms. The model is left as it was. Raises `IncompatibleRecipe`.
    """
    shape = geometry(supported_model(model, all_heads_for="an analysis"))
    for recipe in recipes:
        recipe.check(shape)
    facts = {recipe.name: load_layer_facts(model, recipe) for recipe in recipes}
    sums: dict[tuple[str, int], Tensor] = {}
    summed = _ratios if elementwise else _squares
    with attachment_restored(model):
        index = {layer_index: i for i, layer_index in enumerate(shape.layer_indices)}

        def add(layer_index: int, inputs: AttentionInputs) -> None:
            exact = ExactAttention(AttentionSample.of(inputs, queries))
            for recipe in recipes:
                plain = recipe.for_layer(layer_index, shape.layer_indices)
                pairs = _pairs(exact, inputs, plain, facts[recipe.name][index[layer_index]])
                new = torch.tensor([summed(a, b) for a, b in pairs], dtype=torch.float64)
                key = recipe.name, layer_index
                sums[key] = sums[key] + new if key in sums else new

        for i in range(len(ids)):
            record(model, ids[i : i + 1], add)
            if progress:
                progress("quantizing", 1)
    errors: dict[str, dict[int, LayerError]] = {recipe.name: {} for recipe in recipes}
    for (name, layer_index), of_layer in sums.items():
        error, exact = of_layer.unbind(1)
        ratios = error / exact.clamp_min(1e-30)
        errors[name][layer_index] = LayerError(*(ratios if elementwise else ratios.sqrt()).tolist())
    return errors


def mean(errors: dict[int, LayerError]) -> LayerError:
    """Return the mean over layers."""
    rows = [list(asdict(e).values()) for e in errors.values()]
    return LayerError(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def to_data(
    errors_by_recipe: dict[str, dict[int, LayerError]], environment: dict[str, Any]
) -> dict[str, Any]:
    """Return plain data: of each recipe its name, the mean over layers, and every layer."""
    rows = [
        {
            "recipe": name,
            **asdict(mean(errors)),
            "layers": [{"layer": i, **asdict(e)} for i, e in sorted(errors.items())],
        }
        for name, errors in errors_by_recipe.items()
    ]
    return {"environment": environment, "rows": rows}


def _pairs(
    exact: ExactAttention, inputs: AttentionInputs, recipe: Recipe, layer: LayerFacts
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return each quantized tensor and the exact one, in the order of `LayerError`."""
    k = round_trip(inputs.k, recipe.store, "keys", layer).float().cpu()
    v = round_trip(inputs.v, recipe.store, "values", layer).float().cpu()
    weights = exact.weights_with_keys(k - exact.k)
    out = exact.out
    return (
        (k, exact.k),
        (v, exact.v),
        (weights, exact.weights),
        (exact.weights @ v, out),
        (weights @ v, out),
    )


def _squares(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return the squared norms of the error and of the exact tensor b."""
    return [(a - b).square().sum(), b.square().sum()]


def _ratios(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return the sum of |a - b| / |b| over the elements of b other than 0, and their number."""
    nonzero = b != 0
    return [((a - b)[nonzero] / b[nonzero]).abs().sum(dtype=torch.float64), nonzero.sum()]
