"""KIVI's figures on the reference model: size, quality beside `rtn`, and the paper's Table 1.

Table 1 (arXiv:2402.02750): keys and values, each quantized per channel (C) or per token (T) at
2 bit in groups of 32; only the newest tokens, fewer than 32, stay exact. In the paper, K-C V-T is
best and K-T V-T is second; values per channel ruin the model.

    python benchmarks/kivi.py
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

import kvloom
import record
from kvloom import Recipe
from kvloom.hf import geometry
from kvloom.recipe import resolve
from kvloom_lab.eval import Settings, compare, load, prepare
from kvloom_lab.eval.tables import comparison_line
from kvloom_lab.papers.kivi import GROUP, cell
from kvloom_lab.workload.text import library_text


def grid() -> list[Recipe]:
    """Return the four cells of Table 1; only tokens that do not fill a group are exact."""
    return [replace(cell(2, k, v), name=f"K-{k} V-{v}") for k in "CT" for v in "CT"]


def sizes(model, tokens: int) -> list[dict]:
    """Return the bytes of KIVI's cache after a prompt beside the formula, at every bit width."""
    rows = []
    for bits in (2, 3, 4, 8):
        recipe = resolve(f"kivi:bits={bits}")
        cache = kvloom.Cache(model, recipe)
        ids = torch.randint(3, model.config.vocab_size, (1, tokens))
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        g = geometry(model)
        packed = tokens // 128 * 128, tokens - 128  # keys, values
        packed_bits = sum(n * (bits + 32 / GROUP) for n in packed)
        exact = (2 * tokens - sum(packed)) * 8 * model.dtype.itemsize
        formula = g.layers * g.kv_heads * g.head_dim * (packed_bits + exact) / 8
        rows.append({"bits": bits, "held": cache.nbytes, "formula": formula,
                     "predicted": recipe.nbytes(tokens, g), "full": cache.full_nbytes})  # fmt: skip
        print(
            f"kivi {bits} bit at {tokens} tokens: {cache.nbytes:,} bytes, formula "
            f"{formula:,.0f} ({cache.nbytes / formula:.4f}), "
            f"{cache.full_nbytes / cache.nbytes:.2f}x smaller than {model.dtype}"
        )
    return rows


def main() -> None:
    options = record.options(__doc__, context=3840, questions=96)
    model, tokenizer = load()
    nbytes = sizes(model, 4096)
    settings = Settings(
        context=options.context, new_tokens=248, batch=4, questions=options.questions
    )
    task = prepare(model, tokenizer, library_text(), settings)
    beside = compare(model, ["kivi", "kivi:residual=32", "kivi-4", "rtn", "rtn:bits=4"], task)
    table = compare(model, grid(), task)
    for row in (*beside, *table):  # those of Table 1 last
        print(comparison_line(row, {"questions": options.questions}))
    record.write(
        "kivi",
        {
            "environment": record.environment(**asdict(settings), dtype=str(model.dtype)),
            "bytes": nbytes,
            "beside": [asdict(r) for r in beside],
            "table1": [asdict(r) for r in table],
        },
    )


if __name__ == "__main__":
    main()
