"""Write the calibration that ships with the reference model: SKVQ's formats, RPTQ, SmoothQuant.

Reads all contexts, even after the ranges have settled.

    python benchmarks/calibrate_reference.py
"""

from __future__ import annotations

from kvloom.calibrate import Settings, calibrate, cut_contexts
from kvloom.hf import CALIBRATION_FILE
from kvloom.recipe import resolve
from kvloom_lab.cli.progress import show_progress
from kvloom_lab.eval import load
from kvloom_lab.models import WEIGHTS
from kvloom_lab.workload.text import calibration_text, leading_ids, tokenize


def recipes() -> list[str]:
    """Return the recipes: every bit width at every group size; channel groups without clipping.

    At group 32 also without reordering, and with keys quantized after RoPE.
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
    text = tokenize(tokenizer, calibration_text())
    ids = cut_contexts(text, leading_ids(tokenizer), settings)
    chosen = [resolve(spec) for spec in recipes()]
    with show_progress() as progress:
        found = calibrate(model, ids, chosen, WEIGHTS / CALIBRATION_FILE, settings, progress)
    print(f"{WEIGHTS / CALIBRATION_FILE}: {len(found.tensors)} tensors")


if __name__ == "__main__":
    main()
