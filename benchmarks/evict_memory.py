"""Memory and time of eviction: the cost of scoring, and the size of the cache.

1. `column_mass` and the full softmax of the same heads: peak memory in addition to the inputs, each
   in its own process (maximum resident set), and the error against float64.
2. Seconds of `column_mass`, plain (H2O) and with noise (Keyformer), beside torch's causal SDPA of
   the same prompt; the least of alternating runs.
3. Bytes of the cache after a prompt at budgets of 25, 50 and 75 %, beside the papers' formula
   2 * layers * heads * head_dim * kept tokens * bytes, in layers of Llama-2-7B's shape.
4. MiniKV at a budget of 50 % against full, after a prompt of 4096 and 511 more tokens, when the
   exact buffer is fullest (one token before it is packed), in layers of Llama-2-7B's shape.

    python benchmarks/evict_memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F

import record
from kvloom.cache import LayerCache
from kvloom.kernels import ops
from kvloom.kernels.score.noise import Noise
from kvloom.recipe import Geometry, resolve
from kvloom_lab.bench.timing import Candidate, time_candidates

HEADS, DIM = 8, 128  # of the scored layer
LLAMA = Geometry(layers=32, q_heads=32, kv_heads=32, head_dim=128, dtype=torch.float16)


def draw(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v [1, heads, tokens, dim] from a fixed seed."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, dim, generator=g).to(dtype) for _ in range(3)]


def peak(what: str, tokens: int) -> int:
    """Return the peak bytes of scoring, without its inputs and the first use of torch."""
    q, k, _ = draw(tokens, HEADS, DIM, torch.float32)
    ops.column_mass(q[:, :, :64], k[:, :, :64], DIM**-0.5)
    before = record.peak_bytes()
    if what == "column_mass":
        ops.column_mass(q, k, DIM**-0.5)
    else:
        weights = (q @ k.transpose(-1, -2)).mul_(DIM**-0.5)
        weights.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu_(1), -torch.inf)
        weights.softmax(-1).sum(2)
    return record.peak_bytes() - before


def scoring(lengths: list[int]) -> list[dict]:
    """Return the peak memory for every length; of the full softmax up to 8192 tokens."""
    rows = []
    for tokens in lengths:
        row = {"tokens": tokens}
        for what in ("column_mass", "softmax"):
            if what == "softmax" and tokens > 8192:
                continue
            command = [sys.executable, __file__, "--peak", what, str(tokens)]
            changed = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            row[what] = json.loads(subprocess.check_output(command, env=changed, text=True))
        row["outputs"] = 4 * HEADS * tokens
        rows.append(row)
        full = f", full softmax {row['softmax'] / 2**20:.1f}" if "softmax" in row else ""
        print(f"scoring {tokens} tokens: column_mass {row['column_mass'] / 2**20:.1f} MiB{full}")
    return rows


def error(tokens: int = 2048) -> float:
    """Return the largest relative error of column_mass in fp32 against softmax in float64."""
    q, k, _ = draw(tokens, HEADS, DIM, torch.float32)
    logits = (q.double() @ k.double().transpose(-1, -2)) * DIM**-0.5
    logits.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu_(1), -torch.inf)
    want = logits.softmax(-1).sum(2)
    return ((ops.column_mass(q, k, DIM**-0.5) - want).abs() / want).max().item()


def timing(lengths: list[int], repeats: int = 3) -> list[dict]:
    """Return seconds of scoring a prompt, 32 query and 8 key/value heads, beside its attention."""
    rows = []
    for tokens in lengths:
        noise = Noise("gumbel", 0, torch.arange(tokens).view(1, 1, -1), 0)
        for dtype in (torch.float32, torch.bfloat16):
            (q, _, _), (k, v, _) = (draw(tokens, h, DIM, dtype) for h in (32, 8))
            work = [
                Candidate("sdpa", partial(
                    F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True
                )),
                Candidate("column_mass", partial(ops.column_mass, q, k, DIM**-0.5)),
                Candidate(
                    "noisy", partial(ops.column_mass, q, k, DIM**-0.5, noise=noise, tau=1.5)
                ),
            ]  # fmt: skip
            times = time_candidates(work, repeats, warm_up=0)
            row = {"tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
            row |= {kind: min(found.ms) / 1e3 for kind, found in times.items()}
            rows.append(row)
            print(
                f"scoring {tokens} tokens in {row['dtype']}: SDPA {row['sdpa']:.2f} s, column_mass "
                f"{row['column_mass']:.2f} s ({row['column_mass'] / row['sdpa']:.2f} of it), with "
                f"noise {row['noisy']:.2f} s ({row['noisy'] / row['sdpa']:.2f})",
                flush=True,
            )
    return rows


def sizes(tokens: int) -> list[dict]:
    """Return the bytes of caches after a prompt at three budgets, beside the papers' formula."""
    rows = []
    for name in ("h2o", "keyformer", "snapkv:fraction=0.5", "random"):
        for fraction in (0.25, 0.5, 0.75):
            recipe = resolve(name).with_budget(fraction)
            cache = LayerCache(recipe, "a layer", 0, 1)
            cache.attend(*draw(tokens, LLAMA.kv_heads, LLAMA.head_dim, LLAMA.dtype), scale=0.09)
            one = Geometry(1, *(LLAMA.q_heads, LLAMA.kv_heads, LLAMA.head_dim), LLAMA.dtype)
            formula = one.token_nbytes() * int(tokens * fraction)
            rows.append({"recipe": name, "fraction": fraction, "held": cache.nbytes,
                         "predicted": recipe.nbytes(tokens, one), "formula": formula})  # fmt: skip
            print(
                f"{name} at {fraction:.0%} of {tokens}: {cache.nbytes:,} bytes per layer, "
                f"{cache.nbytes / rows[-1]['predicted']:.4f} of the prediction, "
                f"{cache.nbytes / formula:.4f} of the formula without scores and indices"
            )
    return rows


def minikv(prompt: int = 4096, new: int = 511) -> dict:
    """Return the bytes per layer of MiniKV and of full, measured step by step."""
    cache = LayerCache(resolve("minikv"), "a layer", 0, 1)
    q, k, v = draw(prompt + new, LLAMA.kv_heads, LLAMA.head_dim, LLAMA.dtype)
    most = 0
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, prompt + new))]:
        cache.attend(*(x[:, :, begin:end] for x in (q, k, v)), scale=0.09)
        most = max(most, cache.nbytes) if begin else 0
    full = LLAMA.token_nbytes() // LLAMA.layers * (prompt + new)
    row = {"prompt": prompt, "new": new, "held": cache.nbytes, "most": most, "full": full,
           "smaller": 1 - cache.nbytes / full}  # fmt: skip
    print(
        f"minikv, {prompt} + {new} tokens: {cache.nbytes:,} bytes per layer instead of {full:,}: "
        f"{row['smaller']:.1%} smaller ({LLAMA.layers} layers: "
        f"{LLAMA.layers * cache.nbytes / 1e9:.3f} GB instead of {LLAMA.layers * full / 1e9:.3f}); "
        f"maximum at any step: {most:,}"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peak", nargs=2, metavar=("WHAT", "TOKENS"), help="measure in this process"
    )
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak[0], int(options.peak[1])))
        return
    figures = {
        "environment": record.environment(heads=HEADS, head_dim=DIM),
        "scoring": scoring([2048, 4096, 8192, 16384]),
        "error": error(),
        "timing": timing([8192, 16384]),
        "held": sizes(2048),
        "minikv": minikv(),
    }
    print(f"column_mass in fp32 against float64: relative error {figures['error']:.1e}")
    record.write("evict_memory", figures)


if __name__ == "__main__":
    main()
