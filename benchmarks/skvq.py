"""SKVQ's figures on the reference model: its ablation, and quality against effective bits.

Ladder: the ablation of SKVQ (arXiv:2405.06219, Table 3) at 2 bit, group 32, one part more in each
row, with keys before RoPE as a row of its own; then group 64, without the window, and with another
clip. The paper's order, by average LongBench score: RTN 35.55, +window 45.73, +clipping 46.44,
+reorder 47.99, +sinks 48.14, +fp8 48.04. Bits: as in its Table 2, every method at 4, 3, 2 and 1.5
bit, perplexity against effective bits, each with the same exact window.

    python benchmarks/skvq.py
"""

from __future__ import annotations

from dataclasses import asdict, replace

import record
from kvloom.recipe import Recipe, resolve
from kvloom_lab.analyse import error
from kvloom_lab.eval import Row, Settings, compare, load, prepare
from kvloom_lab.workload.text import cut_rows, leading_ids, library_text, tokenize

BARE = "group=32,reorder=false,pre_rope=false,clip=1.0,window=0,sinks=0,meta=fp16"
WINDOW = 128


def ladder() -> list[Recipe]:
    """Return SKVQ with more and more of its parts; named by the part that a row adds."""
    steps = {
        "RTN": BARE,
        "+ window": "group=32,reorder=false,pre_rope=false,clip=1.0,sinks=0,meta=fp16",
        "+ clipping": "group=32,reorder=false,pre_rope=false,sinks=0,meta=fp16",
        "+ reorder": "group=32,pre_rope=false,sinks=0,meta=fp16",
        "+ before RoPE": "group=32,sinks=0,meta=fp16",
        "+ sinks": "group=32,meta=fp16",
        "+ fp8": "group=32",
        "group 64": "group=64",
        "- window": "group=64,window=0",
        "clip=0.96": "group=64,window=0,clip=0.96",
    }
    return [replace(resolve(f"skvq:{options}"), name=name) for name, options in steps.items()]


def by_bits() -> list[str]:
    """Return every method at every bit width, all with the newest 128 tokens exact."""
    found = []
    for bits in (4, 3, 2, 1.5):
        found += [
            f"rtn:bits={bits},residual={WINDOW}",
            f"smoothquant:bits={bits},residual={WINDOW}",
            f"rptq:bits={bits},residual={WINDOW}",
            f"kivi:bits={bits}",
            f"skvq:group=32,bits={bits},value_bits={bits}",
            f"turbo:bits={bits}",
        ]
    return found


def show(found: list[Row], errors: dict) -> None:
    """Print rows; output errors are of the formats, without window and sinks."""
    for row in found:
        error = f"output error {errors[row.recipe].output:6.1%}, " if row.recipe in errors else ""
        print(
            f"{row.recipe:>42}: {row.bits_per_value:5.2f} bits, {error}perplexity "
            f"{row.perplexity:8.3f}, agreement {row.agreement:6.1%}, needles {row.needle:6.1%}"
        )


def main() -> None:
    options = record.options(__doc__, context=1024, new_tokens=160, batch=4, questions=16)
    model, tokenizer = load()
    settings = Settings(**vars(options))
    task = prepare(model, tokenizer, library_text(), settings)
    ids = cut_rows(tokenize(tokenizer, library_text()), leading_ids(tokenizer), 4, 1024, 0)
    steps, widths = ladder(), [resolve(spec) for spec in by_bits()]
    errors_by_recipe = error.measure(model, ids, [*steps, *widths])
    means = {name: error.mean(errors) for name, errors in errors_by_recipe.items()}

    climbed = compare(model, steps, task)
    show(climbed, means)
    print("perplexity against bits:")
    wide = compare(model, widths, task)
    show(wide, means)

    def plain(table: list[Row]) -> list[dict]:
        return [
            {**asdict(r), "output_error": means[r.recipe].output if r.recipe in means else 0.0}
            for r in table
        ]

    record.write(
        "skvq",
        {
            "environment": record.environment(**asdict(settings), dtype=str(model.dtype)),
            "ladder": plain(climbed),
            "by_bits": plain(wide),
        },
    )


if __name__ == "__main__":
    main()
