"""The quality of calibrations: the error of attention's output on text that they were not made of.

For each calibration file and recipe, the relative error |o' - o| / |o| of attention's output, the
mean over layers: with every token quantized, and with the first 5 and the newest 128 tokens exact,
as in `skvq`. The last column is the share of clip factors at the lower end of their grid.

    python benchmarks/calibrate_error.py MODEL FILE... --recipes skvq:group=32,rptq
"""

from __future__ import annotations

import argparse

import torch

from kvloom.calibrate import (
    AttentionInputs,
    AttentionSample,
    ExactAttention,
    record,
)
from kvloom.calibrate.clip_search import GRID
from kvloom.hf import geometry, load_layer_facts
from kvloom.recipe import Recipe, resolve
from kvloom.store import LayerFacts, round_trip
from kvloom_lab.cli.options import split_recipes
from kvloom_lab.cli.recipes import DEFAULT_RECIPES
from kvloom_lab.eval import load
from kvloom_lab.workload.text import cut_rows, leading_ids, library_text, tokenize

EXACT_TOKENS = (0, 0), (5, 128)


def errors(model, ids: torch.Tensor, recipe: Recipe) -> dict[int, list[float]]:
    """Return relative errors of each layer, for each of `EXACT_TOKENS`."""
    layers = dict(zip(geometry(model).numbers, load_layer_facts(model, recipe), strict=True))
    sums = {number: torch.zeros(len(EXACT_TOKENS), 2, dtype=torch.float64) for number in layers}

    def add(number: int, inputs: AttentionInputs) -> None:
        for i, exact in enumerate(EXACT_TOKENS):
            attention = ExactAttention(AttentionSample.of(inputs, 64, exact))
            sums[number][i] += squares(attention, recipe, layers[number])

    for context in ids:
        record(model, context[None], add)
    return {n: (x[:, 0] / x[:, 1]).sqrt().tolist() for n, x in sums.items()}


def squares(exact: ExactAttention, recipe: Recipe, layer: LayerFacts) -> torch.Tensor:
    """Return squared norms [2] of the output's error and of the output."""
    k = round_trip(exact.k, recipe.store, "keys", layer)
    v = round_trip(exact.v, recipe.store, "values", layer)
    weights = exact.weights_with_keys(k - exact.k)
    out = weights @ exact.v + (weights * exact.packed) @ (v - exact.v)
    return torch.tensor([(out - exact.out).square().sum(), exact.out.square().sum()])


def at_the_bound(model, recipe: Recipe) -> float:
    """Return the share of clip factors, in all layers, at the lower end of their grid."""
    layers = load_layer_facts(model, recipe)
    clips = [c.clip for layer in layers for c in (layer.keys, layer.values)
             if c is not None and c.clip is not None]  # fmt: skip
    return float((torch.cat(clips) < GRID[0] + 1e-3).float().mean()) if clips else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--recipes", default=DEFAULT_RECIPES)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--by-layer", action="store_true")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    text, first = tokenize(tokenizer, library_text()), leading_ids(tokenizer)
    ids = cut_rows(text, first, options.contexts, 1024, 0)
    print(f"{'recipe':>40} {'all tokens':>10} {'as skvq':>8} {'at bound':>9}  file")
    for spec in split_recipes(options.recipes):
        for file in options.files:
            recipe = resolve(f"{spec}{',' if ':' in spec else ':'}calibration={file}")
            errors_by_layer = errors(model, ids, recipe)
            each = torch.tensor([errors_by_layer[n] for n in sorted(errors_by_layer)])
            all_tokens, as_skvq = each.mean(0).tolist()
            share = at_the_bound(model, recipe)
            print(f"{spec:>40} {all_tokens:10.4f} {as_skvq:8.4f} {share:9.1%}  {file}", flush=True)
            if options.by_layer:
                print("  by layer:", " ".join(f"{x:.4f}" for x in each[:, 1].tolist()))


if __name__ == "__main__":
    main()
