"""What calibrations are worth: the error of attention's output on text that they have not read.

For each calibration file and recipe, the relative error |o' - o| / |o| of attention's output, the
mean over layers: with every token packed, and with the first 5 and the newest 128 tokens unpacked,
as `skvq` has them. The last column is the share of clip factors at the lower end of their grid.

    python benchmarks/calibrate_error.py MODEL FILE... --recipes skvq:group=32,rptq
"""

from __future__ import annotations

import argparse

import torch

from kvloom.analyse.error import packed
from kvloom.calibrate import record
from kvloom.calibrate.attention import Attention, Sample
from kvloom.calibrate.clip import GRID
from kvloom.cli.calibrate import DEFAULT
from kvloom.cli.edge import split
from kvloom.eval import load
from kvloom.hf.metadata import load_layer_metadata
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import LayerMetadata
from kvloom.workload.text import library_text, opening, rows, tokenize

UNPACKED = (0, 0), (5, 128)


def errors(model, ids: torch.Tensor, recipe: Recipe) -> dict[int, list[float]]:
    """Relative errors of each layer, for each of `UNPACKED`."""
    layers = dict(zip(record.layers(model), load_layer_metadata(model, recipe), strict=True))
    sums = {number: torch.zeros(len(UNPACKED), 2, dtype=torch.float64) for number in layers}

    def see(number: int, seen: record.Seen) -> None:
        for i, exact in enumerate(UNPACKED):
            attention = Attention(Sample.of(seen, 64, exact))
            sums[number][i] += squares(attention, recipe, layers[number])

    for context in ids:
        record.read(model, context[None], see)
    return {n: (x[:, 0] / x[:, 1]).sqrt().tolist() for n, x in sums.items()}


def squares(exact: Attention, recipe: Recipe, layer: LayerMetadata) -> torch.Tensor:
    """Squared norms [2] of the output's error and of the output."""
    k = packed(exact.k, recipe.store.keys, layer.keys, layer)
    v = packed(exact.v, recipe.store.values, layer.values, layer)
    weights = exact.shifted_by_keys(k - exact.k)
    out = weights @ exact.v + (weights * exact.packed) @ (v - exact.v)
    return torch.tensor([(out - exact.out).square().sum(), exact.out.square().sum()])


def at_the_bound(model, recipe: Recipe) -> float:
    """The share of clip factors, keys and values of all layers, at the grid's lower end."""
    layers = load_layer_metadata(model, recipe)
    clips = [c.clip for layer in layers for c in (layer.keys, layer.values)
             if c is not None and c.clip is not None]  # fmt: skip
    return float((torch.cat(clips) < GRID[0] + 1e-3).float().mean()) if clips else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--recipes", default=DEFAULT)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--by-layer", action="store_true")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    ids = rows(tokenize(tokenizer, library_text()), opening(tokenizer), options.contexts, 1024, 0)
    print(f"{'recipe':>40} {'all packed':>10} {'as skvq':>8} {'at bound':>9}  file")
    for spec in split(options.recipes):
        for file in options.files:
            recipe = resolve(f"{spec}{',' if ':' in spec else ':'}calibration={file}")
            found = errors(model, ids, recipe)
            each = torch.tensor([found[n] for n in sorted(found)])
            bare, used = each.mean(0).tolist()
            share = at_the_bound(model, recipe)
            print(f"{spec:>40} {bare:10.4f} {used:8.4f} {share:9.1%}  {file}", flush=True)
            if options.by_layer:
                print("  by layer:", " ".join(f"{x:.4f}" for x in each[:, 1].tolist()))


if __name__ == "__main__":
    main()
