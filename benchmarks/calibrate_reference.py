"""Write the calibration that ships with the reference model: SKVQ's formats, RPTQ, SmoothQuant.

All contexts are read, also after the ranges have settled.

    python benchmarks/calibrate_reference.py
"""

from __future__ import annotations

from kvloom.calibrate import Settings, calibrate, contexts
from kvloom.cli.calibrate import training_text
from kvloom.cli.progress import progress
from kvloom.eval import load
from kvloom.hf.metadata import BESIDE
from kvloom.recipe.resolve import resolve
from kvloom.reference import WEIGHTS
from kvloom.workload.text import opening, tokenize


def recipes() -> list[str]:
    """Every bit width at every group; at group 32 without reorder and after RoPE as well.

    Groups of channels, without clip factors, before and after RoPE.
    """
    found = ["smoothquant"]
    for group in (32, 64, 128):
        found += [f"rptq:group={group}", f"rptq:group={group},pre_rope=false"]
    for bits in (1, 1.5, 2, 3, 4):
        for group in (32, 64, 128):
            found.append(f"skvq:group={group},bits={bits},value_bits={bits}")
        for other in ("reorder=false", "pre_rope=false", "reorder=false,pre_rope=false"):
            found.append(f"skvq:group=32,bits={bits},value_bits={bits},{other}")
    return found


def main() -> None:
    model, tokenizer = load()
    settings = Settings(settled=0.0)
    ids = contexts(tokenize(tokenizer, training_text()), opening(tokenizer), settings)
    chosen = [resolve(spec) for spec in recipes()]
    with progress() as shown:
        found = calibrate(model, ids, chosen, WEIGHTS / BESIDE, settings, shown)
    print(f"{WEIGHTS / BESIDE}: {len(found.tensors)} tensors")


if __name__ == "__main__":
    main()
