"""SKVQ's Table 5 (arXiv:2405.06219): memory and time of a decode step of Llama-2-7B on an A100.

Three sets of figures: the paper's; ours with the formulas of LLM-Viewer at that time, which loaded
only half of the KV cache and counted neither the embedding nor the output matrix; and ours by
`kvloom_lab.planner`, with all bytes of weights and of a cache of the recipe, scales, zero points
and exact window included. All are rooflines: bytes divided by 2,039 GB/s. Nothing is measured. The
paper's claim of one million tokens in 80 GB is computed with the true bytes too.

    python benchmarks/skvq_roofline.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

import record
from kvloom.recipe import resolve
from kvloom_lab.planner.hardware import Hardware
from kvloom_lab.planner.model import read_model
from kvloom_lab.planner.step import CacheBytes, step_work
from kvloom_lab.planner.units import Range

BANDWIDTH = 2039e9
TOKENS = {"32k": 32_000, "128k": 128_000, "200k": 200_000}
RECIPES = {"FP16": "full", "KV4": "skvq:bits=4,value_bits=4", "KV2": "skvq"}
BITS = {"FP16": 16, "KV4": 4, "KV2": 2}
# (batch, tokens) -> for FP16, KV4, KV2: milliseconds; GB read; GB of memory
PAPER = {
    (1, "32k"): ((10.6, 7.5, 7), (21.6, 15.3, 14.3), (29.7, 17.2, 15.1)),
    (1, "128k"): ((23.1, 10.8, 8.7), (47.2, 22, 17.8), (80.1, 29.7, 21.4)),
    (1, "200k"): ((32.5, 13.3, 10), (66.3, 27, 20.5), (118, 39.2, 26.1)),
    (64, "32k"): ((274.1, 76.6, 43.7), (559, 156, 89.1), (1100, 282, 147)),
    (64, "128k"): ((1100, 286.4, 154.8), (2200, 584, 316), (4300, 1100, 551)),
    (64, "200k"): ((1700, 443, 238.1), (3400, 905, 485), (6700, 1700, 853)),
    (128, "32k"): ((541.8, 146.8, 81), (1100, 299, 165), (2200, 550, 282)),
    (128, "128k"): ((2100, 566.4, 303.1), (4400, 1200, 618), (8600, 2200, 1100)),
    (128, "200k"): ((3300, 881.1, 469.7), (6800, 1800, 958), (13400, 3400, 1700)),
}
QUANTITIES = "ms", "read_gb", "memory_gb"


def config() -> LlamaConfig:
    """Return the config of Llama-2-7B in fp16."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
        dtype=torch.float16,
    )  # fmt: skip


def viewer(batch: int, tokens: int, bits: int) -> tuple[float, float, float]:
    """Return ms, GB read and GB of memory by LLM-Viewer's formulas, with its error in KV loads."""
    layers, hidden, inner = 32, 4096, 11008
    weights = 2 * layers * (4 * hidden * hidden + 3 * hidden * inner)
    kv = 2 * 2 * layers * hidden * batch * tokens * bits / 16
    scores = 4 * layers * batch * tokens * 32  # attention's logits: written and read in fp16
    read = weights + kv / 2 + scores
    return 1e3 * read / BANDWIDTH, read / 1e9, (weights + kv) / 1e9


def main() -> None:
    one = Range.exactly(1.0)
    a100 = Hardware(
        "a100", 80 * 10**9, BANDWIDTH, 312e12, {}, one, one, Range.exactly(1e9), Range.exactly(0.0)
    )
    model = read_model(config())
    caches = {name: CacheBytes(resolve(spec), model) for name, spec in RECIPES.items()}
    rows, largest = [], 0.0
    for (batch, length), paper in PAPER.items():
        tokens = TOKENS[length]
        for i, (name, cache) in enumerate(caches.items()):
            work = step_work(model, cache, tokens, batch)
            ours = (
                1e3 * a100.step(work).total.best,
                (work.weights.best + work.kv_nbytes) / 1e9,
                (model.weights.nbytes + cache.nbytes(tokens, batch)) / 1e9,
            )
            row = {"batch": batch, "tokens": tokens, "cache": name, "recipe": RECIPES[name]}
            row["paper"] = {key: paper[j][i] for j, key in enumerate(QUANTITIES)}
            with_error = viewer(batch, tokens, BITS[name])
            row["llm_viewer"] = dict(zip(QUANTITIES, with_error, strict=True))
            row["kvloom"] = dict(zip(QUANTITIES, ours, strict=True))
            rows.append(row)
            largest = max(
                largest,
                *(abs(row["llm_viewer"][key] / row["paper"][key] - 1) for key in QUANTITIES),
            )
            print(
                f"{batch:>4} x {length:>4} {name:>5}: "
                + "; ".join(
                    f"{key} {row['paper'][key]:,.1f} | {row['llm_viewer'][key]:,.1f} | "
                    f"{row['kvloom'][key]:,.1f}"
                    for key in QUANTITIES
                )
            )
    print(f"(paper | LLM-Viewer's formulas | kvloom); the second differs by at most {largest:.1%}")
    speedups = {
        source: next(r for r in rows[::-1] if r["cache"] == "FP16")[source]["ms"]
        / rows[-1][source]["ms"]
        for source in ("paper", "llm_viewer", "kvloom")
    }
    print("speedup of KV2 at 128 x 200k:", {k: round(v, 2) for k, v in speedups.items()})
    million = claim(model, caches["KV2"])
    print("1M tokens in 80 GB:", million)
    record.write(
        "skvq_roofline",
        {
            "environment": record.environment(bandwidth=BANDWIDTH, recipes=RECIPES),
            "largest_difference_from_paper": largest,
            "speedup_128_200k": speedups,
            "million_tokens": million,
            "rows": rows,
        },
    )


def claim(model, cache: CacheBytes) -> dict[str, float]:
    """Return what one million tokens take with K2V2 and with K2V1.5, in GB of 80."""
    found = {"by_paper_gb": viewer(1, 10**6, 2)[2]}
    fewer = CacheBytes(resolve("skvq-k2v1.5"), model)
    for name, one in (("k2v2", cache), ("k2v1.5", fewer)):
        kv = one.nbytes(10**6, 1)
        found[f"{name}_gb"] = (model.weights.nbytes + kv) / 1e9
        found[f"{name}_bits"] = 8 * kv / (10**6 * 2 * 32 * 4096)
    return found


if __name__ == "__main__":
    main()
