"""What budgets per head change: KL divergence and needles on text that no evaluation uses.

SmolLM2 in bfloat16 after 2,048 tokens: contexts of CPython's library that the reference model was
trained on. KL: of 256 tokens that follow, from an exact cache. Needles: asked for after the context
is compressed.

    python benchmarks/heads.py
"""

from __future__ import annotations

import numpy as np
import torch

import record
from kvloom.hf import geometry
from kvloom.hf import read_tokens as forward
from kvloom.recipe import resolve
from kvloom_lab import models
from kvloom_lab.eval.comparison import correct_after, haystacks
from kvloom_lab.workload.passes import prefill, run_alone
from kvloom_lab.workload.text import calibration_text, leading_ids

CONTEXT, LATER = 2048, 256
NAMES = [
    f"{name}:fraction=0.3{heads}"
    for name in ("snapkv", "kvzip")
    for heads in ("", ",head_share=0.2", ",head_share=0.2,layers=joint")
]


@torch.inference_mode()
def main() -> None:
    args = record.options(__doc__, contexts=12, questions=48)
    torch.set_num_threads(1)
    model, tokenizer = models.load("smollm2", "bfloat16")
    text = calibration_text()[:1_500_000]
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False))
    recipes = [resolve(name) for name in ("full", *NAMES)]
    divergence: dict[str, list[float]] = {name: [] for name in NAMES}
    answered = dict.fromkeys(["full", *NAMES], 0)
    for start in np.random.default_rng(7).integers(0, len(ids) - CONTEXT - LATER, args.contexts):
        now, later = np.split(ids[start : start + CONTEXT + LATER], [CONTEXT])
        logs = []
        for each in filled(model, recipes, now):
            logits = forward(model, torch.from_numpy(later)[None], each.cache, all_logits=True)
            logs.append(logits[0].double().log_softmax(dim=-1))
        for name, log in zip(NAMES, logs[1:], strict=True):
            kl = (logs[0].exp() * (logs[0] - log)).sum(dim=-1).mean()
            divergence[name].append(kl.item())
    first = leading_ids(tokenizer)
    for hay in haystacks(tokenizer, ids, first, context=CONTEXT, questions=args.questions, seed=5):
        for each in filled(model, recipes, np.asarray(hay.context_ids)):
            work = correct_after(model, tokenizer, each.cache, hay.questions, 8)
            answered[each.recipe.name] += run_alone(model, work)
    shape = geometry(model)
    whole = recipes[0].nbytes(CONTEXT, shape)
    print(f"full: {answered['full']} of {args.questions} needles")
    rows = [{"recipe": "full", "needles": answered["full"]}]
    for recipe in recipes[1:]:
        kls = divergence[recipe.name]
        share = recipe.nbytes(CONTEXT, shape) / whole
        each = " ".join(f"{kl:.4f}" for kl in kls)
        print(f"{recipe.name}: {share:.1%} of the bytes, KL {np.mean(kls):.4f} ({each}), "
              f"{answered[recipe.name]} needles")  # fmt: skip
        rows.append(
            {"recipe": recipe.name, "bytes_share": share, "kl": float(np.mean(kls)),
             "kl_by_context": kls, "needles": answered[recipe.name]}
        )  # fmt: skip
    settings = record.environment(context=CONTEXT, later=LATER, **vars(args))
    record.write("heads", {"environment": settings, "rows": rows})


def filled(model, recipes, ids):
    """Return the caches of all recipes that hold a context."""
    found = prefill(model, recipes, torch.from_numpy(ids)[None])[1]
    for each in found:
        if each.error is not None:
            raise each.error
    return found


if __name__ == "__main__":
    main()
