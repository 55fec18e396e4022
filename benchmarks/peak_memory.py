"""Peak memory of the process that reads a long prompt, `full` against `kivi`.

Each layer is packed as soon as it has run, so the exact cache of all layers never exists: the peaks
should differ by the memory that the cache saves. Each recipe runs in its own process; the peak is
the operating system's figure (maximum resident set), minus the memory that was resident before the
prompt. During the prompt, glibc keeps freed blocks of up to 32 MiB by default; this hides a part of
the saving. So each recipe is measured with that default, and with MALLOC_MMAP_THRESHOLD_ set, under
which glibc returns them. `resident` is what the process still has after the prompt.

    python benchmarks/peak_memory.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import record

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def one(recipe: str, tokens: int) -> dict[str, float]:
    """Read a prompt of `tokens` tokens with a recipe; return bytes of the cache and of the peak."""
    import torch

    import kvloom
    import kvloom_lab

    model = kvloom_lab.reference_model(torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens))
    with torch.inference_mode():
        model(input_ids=ids[:, :512], past_key_values=kvloom.Cache(model, recipe))
        before, resident = record.peak_bytes(), record.resident_bytes()
        cache = kvloom.Cache(model, recipe)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return {
        "held": cache.nbytes,
        "peak": record.peak_bytes() - before,
        "resident": record.resident_bytes() - resident,
    }


def main() -> None:
    options = record.options(__doc__, tokens=32768, one="")  # one: measured in this process
    if options.one:
        print(json.dumps(one(options.one, options.tokens)))
        return
    rows = []
    for allocator, changed in (("default", {}), ("returning", {THRESHOLD: "65536"})):
        measured = {}
        for recipe in ("full", "kivi"):
            command = [sys.executable, __file__, "--one", recipe, "--tokens", str(options.tokens)]
            out = subprocess.check_output(command, text=True, env=os.environ | changed)
            measured[recipe] = json.loads(out.splitlines()[-1])
            print(
                f"{allocator:>9} {recipe}: cache {measured[recipe]['held'] / 2**20:6.1f} MiB, "
                f"the prompt's peak is {measured[recipe]['peak'] / 2**20:6.1f} MiB, "
                f"after it the process has {measured[recipe]['resident'] / 2**20:6.1f} MiB more"
            )
        saved, below = (measured["full"][x] - measured["kivi"][x] for x in ("held", "peak"))
        print(
            f"with kivi, the cache is {saved / 2**20:.1f} MiB smaller "
            f"and the peak {below / 2**20:.1f} MiB lower"
        )
        rows.append({"allocator": allocator, **measured, "saved": saved, "peak_below": below})
    record.write(
        "peak_memory",
        {"environment": record.environment(tokens=options.tokens, dtype="float32"), "rows": rows},
    )


if __name__ == "__main__":
    main()
